"""Integers with scales and zeros, as compressed-tensors stores them.

A weight is (code - zero) times its scale: exact in float32, rounded once to the type of the scale, as
compressed-tensors' ``dequantize`` does. Codes are stored as ``I8``, or as fields of 32-bit words with an
offset of half their range, along the columns (zeros: along the rows).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moechat.errors import CheckpointError, UnsupportedModelError
from moechat.store.quantised.codes import Codes
from moechat.store.quantised.kept_rows import integer_encodings
from moechat.store.quantised.number_formats import as_float32, fields
from moechat.store.quantised.weights import PackedWeight, Part, Parts, matrix_shape
from moechat.store.tensors import TensorSet

PACKED_BITS = (2, 4, 8)
_SCALE_TYPES = ("F32", "BF16", "F16")


@dataclass(frozen=True)
class IntegerFormat:
    """How weights are quantised to integers.

    Attributes:
        bits: Bits of a weight.
        group: Columns that share a scale; 0: a whole row; -1: a whole matrix.
        symmetric: There are no zeros.
    """

    bits: int
    group: int
    symmetric: bool

    @property
    def title(self) -> str:
        """For people."""
        by = {0: "with a scale for each row", -1: "with one scale"}.get(
            self.group, f"in groups of {self.group}"
        )
        return f"{self.bits}-bit integers {by}"


def integer_weight(
    tensors: TensorSet, name: str, parts: dict[str, str], form: IntegerFormat, dtype: str
) -> PackedWeight:
    """One weight of integers.

    Args:
        tensors: The stored tensors.
        name: Name that it appears under.
        parts: Names of its ``codes``, ``scale`` and, where they exist, ``zero``, ``shape`` and ``order``, the
            group of each column.
        form: How it is quantised.
        dtype: Type that it appears as if its scales are float32; else it takes theirs.

    Raises:
        CheckpointError: A part is missing, or has another type or shape.
        UnsupportedModelError: The number of bits is not read.
    """
    where = tensors.file_of(parts["codes"]).path
    kind, stored = tensors.info(parts["codes"])[0], matrix_shape(tensors, parts["codes"])
    if parts["scale"] not in tensors:
        raise CheckpointError(
            f"{where}: tensor {name!r} is quantised and has no scale {parts['scale']!r}",
            hint="take a complete copy of the checkpoint",
        )
    if not form.symmetric and "zero" not in parts:
        raise CheckpointError(
            f"{where}: tensor {name!r} has no zero points, and the configuration says symmetric: false"
        )
    scale_type, grid = tensors.info(parts["scale"])
    if scale_type not in _SCALE_TYPES:
        raise CheckpointError(f"{where}: scale {parts['scale']!r} is {scale_type}, no float")
    if kind == "I32" and form.bits not in PACKED_BITS:
        raise UnsupportedModelError(
            f"{where}: tensor {name!r} has integers of {form.bits} bits; moechat reads "
            f"{', '.join(map(str, PACKED_BITS))}"
        )
    if kind not in ("I8", "I32") or (kind == "I8" and form.bits > 8):
        raise CheckpointError(
            f"{where}: tensor {parts['codes']!r} is {kind} {list(stored)}; {form.title} are I8 or packed I32"
        )
    columns = stored[-1]
    if kind == "I32":
        columns = grid[-1] * form.group if form.group > 0 and grid else stored[-1] * 32 // form.bits
    shape = (*stored[:-1], columns)
    width = columns if kind == "I8" else -(-columns * form.bits // 32)
    if stored[-1] != width or not _fits(shape, grid, form):
        raise CheckpointError(
            f"{where}: tensor {parts['codes']!r} {list(stored)} and scale {parts['scale']!r} {list(grid)} do "
            f"not fit together as {form.title}",
            hint="config.json and tensors contradict each other: take both from the same repository",
        )
    rows = shape[-2]
    group = {0: (1, columns), -1: (rows, columns)}.get(form.group, (1, form.group))
    groups = (-(-rows // group[0]), -(-columns // group[1]))

    def unpack(found: Parts) -> Codes:
        _require_shape(found.get("shape"), shape)
        scales = as_float32(found["scale"].values, found["scale"].dtype).reshape(groups)
        half = 1 << (form.bits - 1)
        zero = np.full(groups, half, np.float32)
        if "zero" in found and not form.symmetric:
            zero = _zeros(found["zero"], form.bits, groups)
        codes = found["codes"].values
        unsigned = fields(codes, form.bits)[:, :columns] if kind == "I32" else _unsigned(codes, half)
        order = _order(found.get("order"), columns, groups[1])
        return Codes("affine", form.bits, unsigned, scales, group, zero, order)

    visible = dtype if scale_type == "F32" else scale_type
    kept = dense = None
    if "order" not in parts:
        width = columns if form.group < 1 else form.group
        kept, dense = integer_encodings(form.bits, width, columns, scale_type, symmetric=form.symmetric)
    return PackedWeight(name, visible, shape, parts, unpack, form.title, kept, dense)


def _fits(shape: tuple[int, ...], grid: tuple[int, ...], form: IntegerFormat) -> bool:
    """Whether scales of this shape belong to weights of that shape."""
    *experts, rows, columns = shape
    if form.group == -1:
        return grid in (tuple(experts), (*experts, 1), (*experts, 1, 1), (1,))
    if form.group == 0:
        return grid in ((*experts, rows, 1), (*experts, rows))
    return columns % form.group == 0 and grid == (*experts, rows, columns // form.group)


def _require_shape(part: Part | None, shape: tuple[int, ...]) -> None:
    """Compare the shape that is stored beside packed words."""
    if part is not None and tuple(part.values.reshape(-1).tolist()[-2:]) != shape[-2:]:
        raise ValueError(f"{part.name!r} says {part.values.tolist()}, the packed words {list(shape)}")


def _zeros(part: Part, bits: int, groups: tuple[int, int]) -> NDArray[np.float32]:
    """Zeros as unsigned codes, ``[row groups, column groups]``."""
    if part.dtype == "I32":
        columns = part.values.reshape(-1, groups[1])
        whole = fields(columns.T, bits)
        if whole.shape[1] < groups[0]:
            raise ValueError(f"{part.name!r} has {whole.shape[1]} zeros in a column, not {groups[0]}")
        return whole[:, : groups[0]].T.astype(np.float32)
    if part.dtype != "I8":
        raise ValueError(f"{part.name!r} is {part.dtype}; zeros are I8 or packed I32")
    return part.values.astype(np.float32).reshape(groups) + (1 << (bits - 1))


def _unsigned(codes: NDArray[np.int8], half: int) -> NDArray[np.uint8]:
    shifted = codes.astype(np.int16) + half
    if shifted.size and not 0 <= shifted.min() <= shifted.max() < 2 * half:
        raise ValueError(f"a code is outside of {-half} to {half - 1}")
    return shifted.astype(np.uint8)


def _order(part: Part | None, columns: int, groups: int) -> NDArray[np.intp] | None:
    """The group of each column; ``None`` if they are in order."""
    if part is None or (part.values < 0).any():  # -1: never set
        return None
    order = part.values.reshape(-1).astype(np.intp)
    if len(order) != columns or order.max(initial=0) >= groups:
        raise ValueError(f"{part.name!r} does not have one of {groups} groups for each of {columns} columns")
    return order
