"""FP4: e2m1 weights, two in a byte, the low half first.

NVFP4 has an e4m3 scale for each 16 columns and one float32 scale for the matrix. compressed-tensors divides
by the latter, ModelOpt multiplies with it; in both the combined scale is a float32, and a weight its product
with the value of the code, rounded once to the type of the model. MXFP4 has an e8m0 scale for each 32
columns, so its weights are exact in bf16.
"""

from __future__ import annotations

import numpy as np

from moechat.errors import CheckpointError
from moechat.store.quantised import kept_rows
from moechat.store.quantised.codes import Codes
from moechat.store.quantised.number_formats import as_float32, nibbles
from moechat.store.quantised.weights import PackedWeight, Parts, matrix_shape
from moechat.store.tensors import TensorSet

NVFP4_COLUMNS = 16
MXFP4_COLUMNS = 32
NVFP4 = "NVFP4"
MXFP4 = "MXFP4"


def nvfp4_weight(
    tensors: TensorSet, name: str, parts: dict[str, str], dtype: str, *, divides: bool
) -> PackedWeight:
    """One NVFP4 weight.

    Args:
        tensors: The stored tensors.
        name: Name that it appears under.
        parts: Names of its ``codes``, ``scale`` and ``global`` scale.
        dtype: Type that it appears as.
        divides: The global scale divides the others.

    Raises:
        CheckpointError: A part is missing, or has another type or shape.
    """
    shape = _packed_shape(tensors, name, parts, "F8_E4M3", NVFP4_COLUMNS)
    where = tensors.file_of(parts["codes"]).path
    if parts["global"] not in tensors:
        raise CheckpointError(
            f"{where}: NVFP4 tensor {name!r} has no global scale {parts['global']!r}",
            hint="take a complete copy of the checkpoint",
        )
    kind, count = tensors.info(parts["global"])
    # One for the matrix, or one for each expert.
    if kind != "F32" or count not in ((), (1,), shape[:-2], (*shape[:-2], 1), (*shape[:-2], 1, 1)):
        raise CheckpointError(
            f"{where}: global scale {parts['global']!r} is {kind} {list(count)}; one F32 is expected"
        )

    def unpack(found: Parts) -> Codes:
        codes, scale, whole = found["codes"], found["scale"], found["global"]
        factor = whole.values.reshape(-1).astype(np.float32)[0]
        if not np.isfinite(factor):
            raise ValueError(f"its global scale is {factor}")
        scales = as_float32(scale.values, scale.dtype)
        with np.errstate(all="ignore"):  # values that are not finite are reported
            scales = scales / factor if divides else scales * factor
            split = (scale.values, np.float32(1) / factor if divides else factor)
        return Codes("e2m1", 4, nibbles(codes.values), scales, (1, NVFP4_COLUMNS), parts=split)

    kept = None if shape[-1] % kept_rows.WIDE else kept_rows.NVFP4
    return PackedWeight(name, dtype, shape, parts, unpack, NVFP4, kept, kept)


def mxfp4_weight(tensors: TensorSet, name: str, parts: dict[str, str], dtype: str) -> PackedWeight:
    """One MXFP4 weight.

    Args:
        tensors: The stored tensors.
        name: Name that it appears under.
        parts: Names of its ``codes`` and ``scale``.
        dtype: Type that it appears as.

    Raises:
        CheckpointError: A part is missing, or has another type or shape.
    """
    shape = _packed_shape(tensors, name, parts, "U8", MXFP4_COLUMNS)

    def unpack(found: Parts) -> Codes:
        codes, scale = found["codes"], found["scale"]
        numbers = as_float32(scale.values, scale.dtype)
        return Codes("e2m1", 4, nibbles(codes.values.view(np.uint8)), numbers, (1, MXFP4_COLUMNS))

    kept = kept_rows.MXFP4
    return PackedWeight(name, dtype, shape, parts, unpack, MXFP4, kept, kept)


def _packed_shape(
    tensors: TensorSet, name: str, parts: dict[str, str], scale_type: str, columns: int
) -> tuple[int, ...]:
    """Shape of the weight, from that of its codes and scales."""
    codes, scale = parts["codes"], parts["scale"]
    where = tensors.file_of(codes).path
    if scale not in tensors:
        raise CheckpointError(
            f"{where}: tensor {name!r} is packed FP4 and has no scale {scale!r}",
            hint="take a complete copy of the checkpoint",
        )
    (kind, packed), (found, grid) = tensors.info(codes), tensors.info(scale)
    matrix_shape(tensors, codes)
    if kind not in ("U8", "I8"):
        raise CheckpointError(
            f"{where}: tensor {codes!r} is {kind} {list(packed)}; packed FP4 is U8 matrices"
        )
    allowed = ("U8", "F8_E8M0") if scale_type == "U8" else (scale_type,)
    shape = (*packed[:-1], 2 * packed[-1])
    expected = (*packed[:-1], shape[-1] // columns)
    if found not in allowed or grid != expected or shape[-1] % columns:
        raise CheckpointError(
            f"{where}: scale {scale!r} is {found} {list(grid)}; for {list(shape)} weights in blocks of "
            f"{columns} it would be {allowed[0]} {list(expected)}",
            hint="config.json and tensors contradict each other: take both from the same repository",
        )
    return shape
