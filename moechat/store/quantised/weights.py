"""Quantised weights of a checkpoint as plain tensors: decoded when they are read, nothing before.

A scheme finds the weights by the names, types and shapes of their parts alone, so that a checkpoint can be
checked before its data is here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moechat.errors import CheckpointError, MoechatError
from moechat.store.quantised.codes import PIECE, Codes, in_threads
from moechat.store.quantised.kept_rows import encoded_rows
from moechat.store.quantised.number_formats import rounded
from moechat.store.safetensors_file import TensorEntry, tensor_nbytes
from moechat.store.tensors import TensorFile, TensorSet

_VISIBLE = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}
_CHUNK_WEIGHTS = 2 << 20
# The least magnitude that is rounded to infinity.
_LIMITS = {"F32": math.inf, "F16": 65520.0, "BF16": float.fromhex("0x1.ffp+127")}


@dataclass(frozen=True, slots=True)
class Part:
    """One stored tensor of a matrix, as read: its name, its safetensors type, its elements."""

    name: str
    dtype: str
    values: NDArray[Any]


# The parts of one matrix, by their role in the scheme.
Parts = Mapping[str, Part]


@dataclass(frozen=True)
class PackedWeight:
    """One weight and the tensors that it is stored in.

    Attributes:
        name: Name of the plain tensor that it appears as.
        dtype: Safetensors type that it appears as; values are rounded to it once.
        shape: Shape that it appears as: ``[rows, columns]``, or ``[experts, rows, columns]``.
        parts: Names of the stored tensors, by their role; those of a 3-D weight have the experts first.
        unpack: Makes the codes of one matrix from its parts. Raises ``ValueError`` with the reason if they
            contradict each other.
        title: The format, for people.
        encoding: The encoding of :mod:`moechat.store.quantised.kept_rows` that keeps the values of experts,
            if one does; :meth:`PackedTensors.encoded_rows` may refuse a value.
        dense_encoding: The same for a dense matrix, of an encoding that holds all values.
        rows_first: Matrices are ``[rows, columns]`` even where the model's parameter is transposed.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    parts: Mapping[str, str]
    unpack: Callable[[Parts], Codes]
    title: str
    encoding: str | None = None
    dense_encoding: str | None = None
    rows_first: bool = False


@dataclass
class Found:
    """The quantised weights of a checkpoint.

    Attributes:
        weights: By name.
        problems: Errors by the name of the weight that cannot be read. They are raised when it is needed:
            many checkpoints have tensors that no model uses.
        hidden: Stored tensors that belong to quantised weights and are not shown.
    """

    weights: dict[str, PackedWeight] = field(default_factory=dict)
    problems: dict[str, MoechatError] = field(default_factory=dict)
    hidden: set[str] = field(default_factory=set)

    def add(self, weight: PackedWeight) -> None:
        """Add a weight and hide its parts."""
        self.weights[weight.name] = weight
        self.hidden.update(weight.parts.values())


def matrix_shape(tensors: TensorSet, stored: str, most: int = 3) -> tuple[int, ...]:
    """Shape of a stored tensor that holds one matrix, or one for each expert.

    Args:
        tensors: The stored tensors.
        stored: Name of the tensor.
        most: Dimensions that it may have, from 2 on.

    Raises:
        CheckpointError: It has other dimensions, or one of them is 0.
    """
    kind, shape = tensors.info(stored)
    if not 2 <= len(shape) <= most or 0 in shape:
        raise CheckpointError(
            f"{tensors.file_of(stored).path}: tensor {stored!r} is {kind} {list(shape)}; quantised weights "
            "are matrices"
        )
    return shape


class PackedTensors(TensorSet):
    """The tensors of a checkpoint with plain tensors in place of quantised ones."""

    def __init__(self, stored: TensorSet, found: Found, *, where: str) -> None:
        """Create the view.

        Args:
            stored: The tensors as they are in the files.
            found: The quantised ones among them.
            where: Name of the checkpoint, for messages.
        """
        self._stored = stored
        self._weights = found.weights
        self._problems = found.problems
        owners = {name: stored.file_of(name) for name in stored if name not in found.hidden}
        for weight in found.weights.values():
            owners[weight.name] = stored.file_of(next(iter(weight.parts.values())))
        for name in found.problems:
            owners.setdefault(name, stored.files[0])
        super().__init__(owners, where=where)

    @property
    def files(self) -> tuple[TensorFile, ...]:
        """See :attr:`TensorSet.files`."""
        return self._stored.files

    def weight(self, name: str) -> PackedWeight | None:
        """How a tensor is stored, if it is quantised.

        Raises:
            MoechatError: It cannot be read.
        """
        if name in self._problems:
            raise self._problems[name]
        return self._weights.get(name)

    def rows_first(self, name: str) -> bool:
        """See :meth:`TensorSet.rows_first`."""
        weight = self.weight(name)
        return weight is not None and weight.rows_first

    def packed_as(self, name: str) -> str | None:
        """See :meth:`TensorSet.packed_as`."""
        weight = self.weight(name)
        return None if weight is None else weight.title

    def stored_names(self, name: str) -> tuple[str, ...]:
        """See :meth:`TensorSet.stored_names`."""
        weight = self.weight(name)
        return super().stored_names(name) if weight is None else tuple(weight.parts.values())

    def stored_file(self, name: str) -> TensorFile:
        """See :meth:`TensorSet.stored_file`."""
        return self._stored.file_of(name)

    def place(self, name: str) -> str:
        """See :meth:`TensorSet.place`; of a quantised tensor also the format."""
        weight = self.weight(name)
        return super().place(name) if weight is None else self._where_is(weight)

    def entry(self, name: str) -> TensorEntry:
        """See :meth:`TensorSet.entry`; a quantised tensor has no bytes of its own in a file."""
        weight = self.weight(name)
        if weight is None:
            return self._stored.entry(name)
        nbytes = tensor_nbytes(weight.dtype, weight.shape)
        return TensorEntry(weight.dtype, weight.shape, 0, nbytes or 0)

    def array(self, name: str) -> NDArray[Any]:
        """See :meth:`TensorSet.array`; a quantised tensor is decoded.

        Raises:
            CheckpointError: Its parts contradict each other, or a value is not finite.
        """
        weight = self.weight(name)
        if weight is None:
            return self._stored.array(name)
        if len(weight.shape) == 2:
            return self._decoded(weight, None, slice(None))
        return np.stack([self._decoded(weight, index, slice(None)) for index in range(weight.shape[0])])

    def matrix(self, name: str, expert: int | None, rows: slice) -> NDArray[Any]:
        """See :meth:`TensorSet.matrix`.

        Raises:
            CheckpointError: As :meth:`array`.
        """
        weight = self.weight(name)
        if weight is None:
            return self._stored.matrix(name, expert, rows)
        return self._decoded(weight, expert, rows)

    def encoding(self, name: str) -> str | None:
        """The encoding of a tensor that keeps its values; ``None`` for others."""
        weight = self._weights.get(name)
        return None if weight is None else weight.encoding

    def dense_encoding(self, name: str) -> str | None:
        """See :meth:`TensorSet.dense_encoding`."""
        weight = self._weights.get(name)
        if weight is None:
            return super().dense_encoding(name)
        return weight.dense_encoding if len(weight.shape) == 2 else None

    def encoded_rows(self, name: str, expert: int | None) -> NDArray[np.uint8]:
        """The rows of a matrix of experts in :meth:`encoding`, ``uint8 [rows, bytes]``. REQUIRES: it has one.

        Raises:
            CheckpointError: Its parts contradict each other or the configuration, or the encoding cannot hold
                a scale.
        """
        weight = self.weight(name)
        assert weight is not None
        return self._encoded(weight, weight.encoding, expert, "quantise the experts anew: --bits 4")

    def dense_rows(self, name: str) -> NDArray[np.uint8]:
        """See :meth:`TensorSet.dense_rows`.

        Raises:
            CheckpointError: Its parts contradict each other or the configuration.
        """
        weight = self.weight(name)
        if weight is None:
            return super().dense_rows(name)
        hint = "config.json and tensors contradict each other: take both from the same repository"
        return self._encoded(weight, weight.dense_encoding, None, hint)

    def _encoded(
        self, weight: PackedWeight, encoding: str | None, expert: int | None, hint: str
    ) -> NDArray[np.uint8]:
        assert encoding is not None
        codes = self.codes(weight.name, expert)
        try:
            return encoded_rows(codes, encoding)
        except ValueError as problem:
            where = self._where_is(weight)
            raise CheckpointError(f"{where} cannot be kept as it is: {problem}", hint=hint) from problem

    def codes(self, name: str, expert: int | None = None) -> Codes:
        """The stored content of one quantised matrix, without loss.

        Args:
            name: A quantised tensor.
            expert: Index in dimension 0 of a 3-D tensor.

        Raises:
            CheckpointError: The tensor is not quantised, or its parts contradict each other.
        """
        weight = self.weight(name)
        if weight is None:
            raise CheckpointError(f"tensor {name!r} is not quantised")
        parts = {}
        for role, part in weight.parts.items():
            values = self._stored.array(part)
            # A scale for all experts has no dimension for them, and neither has a shape.
            if expert is not None and values.ndim and role != "shape" and len(values) == weight.shape[0]:
                values = values[expert]
            parts[role] = Part(part, self._stored.info(part)[0], values)
        try:
            return weight.unpack(parts)
        except ValueError as problem:
            raise CheckpointError(f"{self._where_is(weight)} cannot be decoded: {problem}") from problem

    def chunks(self, name: str) -> Iterator[bytes]:
        """See :meth:`TensorSet.chunks`; the bytes are those of the decoded tensor.

        Raises:
            CheckpointError: As :meth:`array`.
        """
        weight = self.weight(name)
        if weight is None:
            yield from self._stored.chunks(name)
            return
        rows, columns = weight.shape[-2:]
        step = max(1, _CHUNK_WEIGHTS // columns)
        for expert in [None] if len(weight.shape) == 2 else range(weight.shape[0]):
            codes = self.codes(name, expert)
            for first in range(0, rows, step):
                yield self._values(weight, codes, slice(first, first + step)).tobytes()
        self.release((name,))

    def release(self, names: Iterable[str], part: tuple[int, int] | None = None) -> None:
        """See :meth:`TensorSet.release`."""
        for name in names:
            self._stored.release(self.stored_names(name), part)

    def _decoded(self, weight: PackedWeight, expert: int | None, rows: slice) -> NDArray[Any]:
        return self._values(weight, self.codes(weight.name, expert), rows)

    def _values(self, weight: PackedWeight, codes: Codes, rows: slice) -> NDArray[Any]:
        if codes.shape != weight.shape[-2:]:
            raise CheckpointError(
                f"{self._where_is(weight)} holds {list(codes.shape)}, not {list(weight.shape[-2:])}"
            )
        index = range(codes.shape[0])[rows]
        columns = codes.shape[1]
        out = np.empty((len(index), columns), _VISIBLE[weight.dtype])
        step = max(1, PIECE // max(1, columns))

        def decode(first: int) -> bool:
            part = index[first : first + step]
            values = codes.values(slice(part.start, part.stop, part.step))
            out[first : first + step] = rounded(values, weight.dtype)
            # A largest value that is NaN, or that rounding makes infinite, is no less than the limit.
            return float(np.abs(values, out=values).max(initial=0.0)) < _LIMITS[weight.dtype]

        if not all(in_threads(decode, range(0, len(index), step))):
            where = self._where_is(weight)
            raise CheckpointError(f"{where} has values that are not finite in {weight.dtype}")
        return out

    def _where_is(self, weight: PackedWeight) -> str:
        part = next(iter(weight.parts.values()))
        return f"{self._stored.file_of(part).path}: tensor {weight.name!r} ({weight.title})"
