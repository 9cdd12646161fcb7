"""Safetensors files in which some matrices keep the encoding of the file that they come from.

Such a matrix is stored as ``U8`` rows, as in a GGUF file or as :mod:`moechat.store.quantised.kept_rows` makes
them of a quantised checkpoint, and appears in its own shape as ``F16``, or ``BF16`` if metadata say so;
metadata give its encoding. Its columns may be in another order than the model's, because blocks of an
encoding cannot be taken apart: metadata then give ``outer``, ``inner`` and ``size`` of the change that brings
them in order, :class:`moechat.store.gguf_changes.Ungroup`. Stores have their dense weights in these files.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from moechat import _native
from moechat.errors import COPY_AGAIN, CheckpointError, MoechatError
from moechat.store.gguf_changes import Ungroup
from moechat.store.quantised.number_formats import rounded
from moechat.store.safetensors_file import (
    PlannedTensor,
    SafetensorsFile,
    TensorEntry,
    build_header,
    strict_json,
)

ENCODINGS = "moechat.encodings"
COLUMNS = "moechat.columns"
TYPES = "moechat.types"
Columns = tuple[int, int, int]
_USUAL = "F16"
_VISIBLE = (_USUAL, "BF16")
_CHUNK_BYTES = 8 << 20
_PIECE_WEIGHTS = 1 << 22  # decoded to float32 at a time
# Type of the words, and the bits of the exponent: all of them are set where a value is not finite.
_EXPONENTS = {"BF16": ("<u2", 0x7F80), "F16": ("<u2", 0x7C00), "F32": ("<u4", 0x7F800000)}
_FP16_MAX = 65504.0
_BF16_LIMIT = float.fromhex("0x1.ffp+127")  # the least magnitude that is rounded to infinity


class EncodedSource(Protocol):
    """Tensors, some with an encoding."""

    def dense_encoding(self, name: str) -> str | None:
        """The encoding that a store keeps of a dense tensor; ``None``: its visible type."""
        ...

    def dense_rows(self, name: str) -> NDArray[np.uint8]:
        """The rows of a tensor that has a ``dense_encoding``, ``uint8 [rows, bytes]``."""
        ...

    def columns(self, name: str) -> Columns | None:
        """The order of the columns of encoded rows, if it is not the model's."""
        ...

    def chunks(self, name: str) -> Iterator[bytes]:
        """The bytes of a tensor in its visible type."""
        ...

    def place(self, name: str) -> str:
        """File and tensor, for messages."""
        ...


def column_index(columns: Columns) -> NDArray[np.int64]:
    """For every column of the model that of the encoded rows."""
    outer, inner, size = columns
    index: NDArray[np.int64] = Ungroup(outer, inner, size).apply(np.arange(outer * inner * size))
    return index


def planned_dense(source: EncodedSource, name: str, dtype: str, shape: tuple[int, ...]) -> PlannedTensor:
    """How a dense tensor is stored.

    Args:
        source: Has the tensor.
        name: Its name.
        dtype: Its visible type.
        shape: Its shape.
    """
    encoding = source.dense_encoding(name)
    if encoding is None:
        return PlannedTensor(name, dtype, shape)
    _, block, block_bytes = _native.kept_encodings()[encoding]
    stored = (*shape[:-1], shape[-1] // block * block_bytes)
    visible = dtype if dtype in _VISIBLE else _USUAL
    return PlannedTensor(name, "U8", stored, encoding, source.columns(name), visible)


def dense_chunks(source: EncodedSource, planned: PlannedTensor) -> Iterator[Any]:
    """The bytes of a tensor as it is stored, in pieces of at most 8 MiB.

    Raises:
        CheckpointError: A scale, or a number that is not quantised, is not finite.
        MoechatError: The tensor cannot be read.
    """
    if planned.encoding is None:
        for data in source.chunks(planned.name):
            if not all_finite(data, planned.dtype):
                raise CheckpointError(
                    f"{source.place(planned.name)} has values that are not finite", hint=COPY_AGAIN
                )
            yield data
        return
    rows = source.dense_rows(planned.name)
    step = max(1, _CHUNK_BYTES // max(1, rows.shape[1]))
    for first in range(0, len(rows), step):
        part = np.ascontiguousarray(rows[first : first + step])
        try:
            _native.check_file_rows(planned.encoding, part)
        except ValueError as problem:
            raise CheckpointError(
                f"{source.place(planned.name)} is damaged: counted from row {first}, the "
                f"{str(problem).removeprefix('rows ')}",
                hint=COPY_AGAIN,
            ) from problem
        yield part


def all_finite(data: bytes, dtype: str) -> bool:
    """Whether no number is infinite or NaN; true for types other than ``BF16``, ``F16`` and ``F32``.

    Args:
        data: Whole elements.
        dtype: Their safetensors type.
    """
    if dtype not in _EXPONENTS:
        return True
    kind, mask = _EXPONENTS[dtype]
    words = np.frombuffer(data, kind)
    # The largest exponent, without a temporary array of booleans.
    return int((words & words.dtype.type(mask)).max(initial=0)) != mask


def encodings_header(tensors: Iterable[PlannedTensor], *, alignment: int = 8) -> bytes:
    """Header of a file of these tensors; see :func:`moechat.store.safetensors_file.build_header`."""
    tensors = list(tensors)
    encodings = {tensor.name: tensor.encoding for tensor in tensors if tensor.encoding is not None}
    columns = {tensor.name: tensor.columns for tensor in tensors if tensor.columns is not None}
    types = {tensor.name: tensor.visible for tensor in tensors if tensor.visible != _USUAL}
    metadata = {
        key: json.dumps(entries, separators=(",", ":"))
        for key, entries in ((ENCODINGS, encodings), (COLUMNS, columns), (TYPES, types))
        if entries
    }
    return build_header(tensors, alignment=alignment, metadata=metadata)


def decoded_halves(encoding: str, rows: NDArray[np.uint8]) -> tuple[NDArray[np.float16], float]:
    """Rows rounded to float16 ``[rows, columns]``, and the largest magnitude before, or NaN."""
    _, block, block_bytes = _native.kept_encodings()[encoding]
    halves = np.empty((len(rows), rows.shape[1] // block_bytes * block), np.uint16)
    most = _native.decode_file_rows(encoding, rows, halves)
    return halves.view(np.float16), most


def decoded_bf16(encoding: str, rows: NDArray[np.uint8]) -> tuple[NDArray[np.uint16], float]:
    """Rows rounded to bf16 ``[rows, columns]``, and the largest magnitude before, or NaN."""
    _, block, block_bytes = _native.kept_encodings()[encoding]
    columns = rows.shape[1] // block_bytes * block
    out = np.empty((len(rows), columns), np.uint16)
    step = max(1, _PIECE_WEIGHTS // columns)
    values = np.empty((min(step, len(rows)), columns), np.float32)
    largest = [0.0]
    for first in range(0, len(rows), step):
        part = rows[first : first + step]
        largest.append(_native.decode_file_rows(encoding, part, values[: len(part)]))
        out[first : first + step] = rounded(values[: len(part)], "BF16")
    return out, float(np.max(largest))


def _require_bf16(most: float, where: str) -> None:
    if not most < _BF16_LIMIT:
        raise CheckpointError(f"{where} has values that are not finite in BF16")


def require_halves(most: float, where: str) -> None:
    """Check the largest magnitude of values that become float16.

    Raises:
        CheckpointError: They are not finite, or too large.
    """
    if not most <= _FP16_MAX:
        raise CheckpointError(f"{where} has values that are not finite or above {_FP16_MAX:g}")


class EncodedSafetensors(SafetensorsFile):
    """A safetensors file with encoded matrices, a :class:`moechat.store.tensors.EncodedFile`.

    Files without encodings are read as any other.
    """

    _encodings: dict[str, str]
    _columns: dict[str, Columns]
    _stored: Mapping[str, TensorEntry]  # as the header has them

    @classmethod
    def open(cls, path: Path, *, error: type[MoechatError] = CheckpointError) -> Self:
        """See :meth:`SafetensorsFile.open`.

        Raises:
            MoechatError: Of class ``error``; also if metadata and tensors contradict each other.
        """
        file = super().open(path, error=error)
        file._stored = file.tensors
        file._encodings = _read_encodings(file.metadata, path, error)
        file._columns = _read_columns(file.metadata, path, error)
        types = _read_types(file.metadata, path, error)
        visible = dict(file.tensors)
        for name, encoding in file._encodings.items():
            dtype = types.pop(name, _USUAL)
            visible[name] = _visible(visible.get(name), encoding, dtype, name, path, error)
        if types:
            raise error(f"{path} is damaged: its {TYPES} do not fit {min(types)[:200]!r}")
        for name, columns in file._columns.items():
            if name not in file._encodings or math.prod(columns) != visible[name].shape[-1]:
                raise error(f"{path} is damaged: its {COLUMNS} do not fit {name[:200]!r}")
        file.tensors = visible
        return file

    def array(self, name: str) -> NDArray[Any]:
        """See :meth:`SafetensorsFile.array`; an encoded matrix is decoded.

        Raises:
            KeyError: The tensor does not exist.
            CheckpointError: Its values do not fit the type that it appears as.
        """
        encoding = self._encodings.get(name)
        if encoding is None:
            return super().array(name)
        values: NDArray[Any]
        in_bf16 = self.tensors[name].dtype == "BF16"
        values, most = (decoded_bf16 if in_bf16 else decoded_halves)(encoding, self.encoded_rows(name, None))
        (_require_bf16 if in_bf16 else require_halves)(most, f"{self.path}: {name}")
        columns = self._columns.get(name)
        if columns is not None:
            values = np.take(values, column_index(columns), axis=1)
        return values.reshape(self.tensors[name].shape)

    def chunks(self, name: str) -> Iterator[bytes]:
        """See :meth:`SafetensorsFile.chunks`; an encoded matrix is decoded.

        Raises:
            MoechatError: As :meth:`array` and :meth:`SafetensorsFile.chunks`.
        """
        if name not in self._encodings:
            yield from super().chunks(name)
            return
        data = self.array(name).data.cast("B")
        for first in range(0, len(data), _CHUNK_BYTES):
            yield bytes(data[first : first + _CHUNK_BYTES])

    def encoding(self, name: str) -> str | None:
        """See :class:`moechat.store.tensors.EncodedFile`."""
        return self._encodings.get(name)

    def columns(self, name: str) -> Columns | None:
        """See :class:`moechat.store.tensors.EncodedFile`."""
        return self._columns.get(name)

    def encoded_rows(self, name: str, expert: int | None) -> NDArray[np.uint8]:
        """See :class:`moechat.store.tensors.EncodedFile`."""
        entry = self._stored[name]
        rows = np.ndarray(entry.shape, np.uint8, buffer=self._mapping, offset=entry.start)
        part = rows if expert is None else rows[expert]
        return part.reshape(-1, entry.shape[-1])


def _entries(
    metadata: Mapping[str, str], key: str, path: Path, error: type[MoechatError]
) -> dict[str, Any] | None:
    """A JSON object in metadata; ``None`` if it is another value."""
    try:
        found = strict_json(metadata.get(key, "{}").encode("utf-8"))
    except ValueError as problem:
        raise error(f"{path} is damaged: its {key} are not valid: {problem}") from None
    return found if isinstance(found, dict) else None


def _read_columns(metadata: Mapping[str, str], path: Path, error: type[MoechatError]) -> dict[str, Columns]:
    found = _entries(metadata, COLUMNS, path, error)

    def valid(value: Any) -> bool:
        return isinstance(value, list) and len(value) == 3 and all(type(n) is int and n > 0 for n in value)

    if found is None or not all(map(valid, found.values())):
        raise error(f"{path} is damaged: its {COLUMNS} are not three numbers each")
    return {name: (outer, inner, size) for name, (outer, inner, size) in found.items()}


def _read_types(metadata: Mapping[str, str], path: Path, error: type[MoechatError]) -> dict[str, str]:
    found = _entries(metadata, TYPES, path, error)
    if found is None or not all(value in _VISIBLE for value in found.values()):
        raise error(f"{path} is damaged: its {TYPES} are not among {', '.join(_VISIBLE)}")
    return found


def _read_encodings(metadata: Mapping[str, str], path: Path, error: type[MoechatError]) -> dict[str, str]:
    found = _entries(metadata, ENCODINGS, path, error)
    known = _native.kept_encodings()
    if found is None or not all(isinstance(name, str) and name in known for name in found.values()):
        raise error(f"{path} is damaged: its {ENCODINGS} do not map tensors to encodings")
    return found


def _visible(
    entry: TensorEntry | None,
    encoding: str,
    dtype: str,
    name: str,
    path: Path,
    error: type[MoechatError],
) -> TensorEntry:
    _, block, block_bytes = _native.kept_encodings()[encoding]
    if entry is None or entry.dtype != "U8" or len(entry.shape) < 2 or entry.shape[-1] % block_bytes:
        raise error(f"{path} is damaged: {name[:200]!r} does not hold rows of {encoding}")
    shape = (*entry.shape[:-1], entry.shape[-1] // block_bytes * block)
    return TensorEntry(dtype, shape, entry.start, entry.end)
