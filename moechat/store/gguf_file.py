"""GGUF files under the tensor names of a transformers checkpoint: mapped, decoded when a tensor is read.

Every tensor appears with float elements, except tables of whole numbers. Float tensors keep their type.
Packed ones are decoded to float32 if they will be packed again, else to float16, which suffices: scales in
these formats are float16 and codes have at most 8 bits.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moechat import _native
from moechat.errors import CheckpointError, UnsupportedModelError
from moechat.store.encoded_file import decoded_halves, require_halves
from moechat.store.gguf_changes import Change, Ungroup
from moechat.store.gguf_header import MAX_HEADER_BYTES, GgufHeader, GgufTensor, parse_gguf_header
from moechat.store.mapped_file import GuardedMapping, MappedFile, opened_regular, place_of
from moechat.store.safetensors_file import TensorEntry

F32, F16, I32, BF16 = 0, 1, 26, 30
PLAIN = {F32: ("F32", "<f4"), F16: ("F16", "<f2"), BF16: ("BF16", "<u2"), I32: ("I32", "<i4")}
# Types whose values a store can keep, by ggml's number; see native/src/kernels/layout/kept_encodings.h.
KEPT = {2: "q4_0", 3: "q4_1", 6: "q5_0", 7: "q5_1", 8: "q8_0", 10: "q2_k", 11: "q3_k", 12: "q4_k", 13: "q5_k"}
KEPT |= {14: "q6_k", 16: "iq2_xxs", 17: "iq2_xs", 18: "iq3_xxs", 19: "iq1_s", 20: "iq4_nl", 21: "iq3_s"}
KEPT |= {22: "iq2_s", 23: "iq4_xs", 29: "iq1_m", 39: "mxfp4"}
# Weights decoded at once; the temporaries of one piece fit the processor's caches.
_PIECE = 1 << 20
_CHUNK_BYTES = 8 << 20
_WORKERS = min(8, os.cpu_count() or 1)


@dataclass(frozen=True, slots=True)
class GgufSource:
    """Location of one checkpoint tensor in a GGUF file.

    Attributes:
        tensor: Name in the file.
        dtype: Safetensors type that it appears as: its own for floats and whole numbers, else ``F32`` or
            ``F16``.
        expert: Index in dimension 0; ``None`` takes all of it.
        changes: What turns it into the checkpoint's tensor, in order. If one of them computes, ``dtype`` is
            ``F32``.
    """

    tensor: str
    dtype: str
    expert: int | None = None
    changes: tuple[Change, ...] = ()


class GgufFile(MappedFile):
    """A GGUF file, checked and mapped read-only.

    Attributes:
        path: The file.
        header: Metadata and tensors.
    """

    def __init__(
        self, path: Path, header: GgufHeader, mapping: GuardedMapping, status: os.stat_result
    ) -> None:
        """Use :meth:`open`."""
        super().__init__(path, mapping, status)
        self.header = header

    @classmethod
    def open(cls, path: Path) -> GgufFile:
        """Check the header of ``path`` and map the file.

        Raises:
            CheckpointError: It cannot be read, is not a GGUF file, or is damaged.
        """
        with opened_regular(path, CheckpointError) as (descriptor, status):
            if not status.st_size:
                raise CheckpointError(f"{path} is empty", hint="download or copy the file again")
            try:
                mapping = GuardedMapping.of(descriptor, status.st_size)
            except ValueError as problem:  # it has become shorter
                raise CheckpointError(f"{path} cannot be mapped: {problem}") from problem
        with memoryview(mapping)[:MAX_HEADER_BYTES] as beginning:
            header = parse_gguf_header(beginning, len(mapping), str(path))
        assert header is not None  # None only for the first part of a file
        return cls(path, header, mapping, status)

    def read_bytes(self, start: int, end: int) -> bytes:
        """The bytes ``[start, end)`` of the file."""
        return self._mapping[start:end]

    def rows(self, tensor: GgufTensor, expert: int | None) -> NDArray[np.uint8]:
        """The packed rows of a matrix, ``uint8 [rows, bytes]``, in file order; a view."""
        shape = tensor.shape if expert is None else tensor.shape[1:]
        count = int(np.prod(shape[:-1], dtype=np.int64))
        size = tensor.end - tensor.start
        parts = 1 if expert is None else tensor.shape[0]
        start = tensor.start + (expert or 0) * (size // parts)
        return np.ndarray((count, size // parts // count), np.uint8, buffer=self._mapping, offset=start)


class GgufView:
    """A GGUF file as a shard of a checkpoint; see :class:`moechat.store.tensors.TensorFile`.

    Attributes:
        path: The file.
        tensors: By name in the checkpoint, with the type they appear as and their byte range in the file.
    """

    def __init__(self, file: GgufFile, sources: Mapping[str, GgufSource]) -> None:
        """Create the view.

        Args:
            file: The file.
            sources: Location of each checkpoint tensor.
        """
        self.path = file.path
        self._file = file
        self._sources = dict(sources)
        self.tensors: Mapping[str, TensorEntry] = entries(file.header, sources)

    @property
    def lost(self) -> int | None:
        """See :class:`moechat.store.tensors.TensorFile`."""
        return self._file.lost

    def is_current(self) -> bool:
        """See :meth:`GgufFile.is_current`."""
        return self._file.is_current()

    def checksum(self, start: int, end: int) -> int:
        """See :meth:`MappedFile.checksum`."""
        return self._file.checksum(start, end)

    def place(self, name: str) -> str:
        """See :class:`moechat.store.tensors.TensorFile`."""
        return place_of(self.path, self._sources[name].tensor)

    def array(self, name: str) -> NDArray[Any]:
        """The tensor: a view of the file for floats, else decoded.

        Raises:
            CheckpointError: A value is too large for the tensor's type.
        """
        source, entry, tensor = self._of(name)
        values = self._values(self._file.rows(tensor, source.expert), tensor.kind, source)
        if not source.changes:
            return values.reshape(entry.shape)
        values = values.reshape(tensor.shape if source.expert is None else tensor.shape[1:])
        try:
            for change in source.changes:
                values = change.apply(values)
        except CheckpointError as problem:
            raise CheckpointError(f"{self.path}: {source.tensor}: {problem}") from problem
        return np.ascontiguousarray(values)

    def encoding(self, name: str) -> str | None:
        """See :class:`moechat.store.tensors.EncodedFile`."""
        source, _, tensor = self._of(name)
        return kept_encoding(source, tensor)

    def unkept_type(self, name: str) -> str:
        """See :class:`moechat.store.tensors.PackedFile`."""
        return unkept_type(self._of(name)[2])

    def columns(self, name: str) -> tuple[int, int, int] | None:
        """See :class:`moechat.store.tensors.EncodedFile`."""
        return column_order(self._of(name)[0])

    def encoded_rows(self, name: str, expert: int | None) -> NDArray[np.uint8]:
        """See :class:`moechat.store.tensors.EncodedFile`."""
        source, _, tensor = self._of(name)
        which = source.expert if expert is None else expert
        rows = self._file.rows(tensor, which)
        if not source.changes or column_order(source) is not None:
            return rows
        shape = tensor.shape if which is None else tensor.shape[1:]
        parts = rows.reshape(*shape[:-1], rows.shape[1])
        for change in source.changes:
            parts = change.apply(parts)
        return parts.reshape(-1, rows.shape[1])

    def chunks(self, name: str) -> Iterator[bytes]:
        """The bytes of a tensor in its visible type, in pieces of about 8 MiB.

        Raises:
            CheckpointError: As :meth:`array`.
        """
        source, entry, tensor = self._of(name)
        if source.changes:
            data = self.array(name).tobytes()
            for first in range(0, len(data), _CHUNK_BYTES):
                yield data[first : first + _CHUNK_BYTES]
        else:
            rows = self._file.rows(tensor, source.expert)
            step = max(1, _CHUNK_BYTES // (4 * entry.shape[-1]))
            for first in range(0, len(rows), step):
                yield self._values(rows[first : first + step], tensor.kind, source).tobytes()
        self.release(entry.start, entry.end)

    def release(self, start: int, end: int) -> None:
        """See :meth:`GgufFile.release`."""
        self._file.release(start, end)

    def _of(self, name: str) -> tuple[GgufSource, TensorEntry, GgufTensor]:
        source = self._sources[name]
        return source, self.tensors[name], self._file.header.tensors[source.tensor]

    def _values(self, rows: NDArray[np.uint8], kind: int, source: GgufSource) -> NDArray[Any]:
        if kind in PLAIN and PLAIN[kind][0] == source.dtype:
            return rows.view(PLAIN[kind][1])
        if source.dtype == "F32":
            return decode(rows, kind)
        values, most = _decode_halves(rows, kind)
        require_halves(most, f"{self.path}: {source.tensor}")
        return values


def kept_encoding(source: GgufSource, tensor: GgufTensor) -> str | None:
    """The encoding that a store can keep: rows and columns are the checkpoint's, in some order."""
    fits = column_order(source) is not None or all(change.by_rows for change in source.changes)
    return KEPT.get(tensor.kind) if fits and len(tensor.shape) > 1 else None


def unkept_type(tensor: GgufTensor) -> str:
    """The type of a packed tensor that no store can keep, for people; empty for any other."""
    from gguf.constants import GGMLQuantizationType

    other = tensor.kind not in KEPT and tensor.kind not in PLAIN
    return GGMLQuantizationType(tensor.kind).name if other else ""


def column_order(source: GgufSource) -> tuple[int, int, int] | None:
    """The order of columns that a store keeps, if it is not the checkpoint's."""
    if len(source.changes) != 1 or source.expert is not None:
        return None
    (change,) = source.changes
    if isinstance(change, Ungroup) and (change.axis, change.start) == (1, 0):
        return change.outer, change.inner, change.size
    return None


def entries(header: GgufHeader, sources: Mapping[str, GgufSource]) -> dict[str, TensorEntry]:
    """Visible type, shape and byte range of tensors, by name in the checkpoint.

    Raises:
        CheckpointError: A change does not fit the shape of its tensor.
    """
    found = {}
    for name, source in sources.items():
        tensor = header.tensors[source.tensor]
        shape, start, end = tensor.shape, tensor.start, tensor.end
        if source.expert is not None:
            size = (end - start) // shape[0]
            start += source.expert * size
            shape, end = shape[1:], start + size
        try:
            for change in source.changes:
                shape = change.shape(shape)
        except CheckpointError as problem:
            raise CheckpointError(f"{source.tensor}: {problem}") from problem
        found[name] = TensorEntry(source.dtype, shape, start, end)
    return found


def require_decodable(header: GgufHeader, where: str) -> None:
    """Check before a long conversion that every element type in a file can be decoded.

    Raises:
        UnsupportedModelError: A type cannot be decoded.
    """
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    first = {tensor.kind: name for name, tensor in reversed(header.tensors.items())}
    for kind in sorted(first.keys() - PLAIN.keys()):
        name = GGMLQuantizationType(kind)
        try:
            decode(np.zeros((1, GGML_QUANT_SIZES[name][1]), np.uint8), kind)
        except NotImplementedError:
            raise UnsupportedModelError(
                f"{where}: {first[kind][:200]} has type {name.name}, which cannot be decoded",
                hint="take a file in Q4_K_M, Q6_K, Q8_0 or F16",
            ) from None


def decode(rows: NDArray[np.uint8], kind: int) -> NDArray[np.float32]:
    """Decode packed rows.

    Args:
        rows: ``uint8 [rows, bytes]``.
        kind: ggml's type number.

    Returns:
        float32 ``[rows, columns]``.

    Raises:
        NotImplementedError: The gguf package does not decode this type.
    """
    from gguf import dequantize
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    name = GGMLQuantizationType(kind)
    block, block_bytes = GGML_QUANT_SIZES[name]
    columns = rows.shape[1] // block_bytes * block
    values = np.empty((len(rows), columns), np.float32)
    if kind in KEPT:
        _native.decode_file_rows(KEPT[kind], rows, values)
        return values
    step = max(1, _PIECE // columns)

    def work(first: int) -> None:
        with np.errstate(invalid="ignore", over="ignore"):  # a scale may be NaN: packing reports it
            values[first : first + step] = dequantize(rows[first : first + step], name)

    firsts = range(0, len(rows), step)
    if len(firsts) == 1:
        work(0)
    else:
        with ThreadPoolExecutor(_WORKERS) as pool:
            list(pool.map(work, firsts))
    return values


def _decode_halves(rows: NDArray[np.uint8], kind: int) -> tuple[NDArray[np.float16], float]:
    """Decode packed rows, rounded to float16; and the largest magnitude before."""
    if kind in KEPT:
        return decoded_halves(KEPT[kind], rows)
    values = decode(rows, kind)
    with np.errstate(over="ignore", invalid="ignore"):
        return values.astype(np.float16), float(np.abs(values).max(initial=0.0))
