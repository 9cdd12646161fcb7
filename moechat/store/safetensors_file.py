"""Safetensors files: a strict parser, read-only mapping, and headers for streamed writing.

Format (https://github.com/huggingface/safetensors): 8 bytes little-endian header length, a JSON object
``name -> {dtype, shape, data_offsets}`` with an optional ``__metadata__`` of strings, padded with spaces,
then the data.

A file is accepted only if all of these hold; each is checked against the size of the real file before
anything is allocated or mapped:

* it is a regular file, and the header fits inside it and is at most ``MAX_HEADER_BYTES`` long;
* the header is one UTF-8 JSON object without duplicate keys, and every tensor has exactly the three fields;
* every dtype is known, every shape is a list of non-negative integers whose product cannot overflow;
* ``end - start`` is exactly the size given by dtype and shape;
* in order of offset the tensors cover the data section without gap, overlap or remainder.
"""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from moechat.errors import CheckpointError, MoechatError
from moechat.store.mapped_file import GuardedMapping, MappedFile, opened_regular, other_kind

MAX_HEADER_BYTES = 16 << 20
MAX_DIMENSIONS = 32
DIRECT_IO_ALIGNMENT = 4096
_READ_CHUNK = 8 << 20

DTYPE_BITS: Mapping[str, int] = {
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}

# Element types that numpy lacks (bf16, fp8) are shown as unsigned integers of the same width, sub-byte types
# as flat bytes.
_NUMPY_DTYPES: Mapping[str, str] = {
    "BOOL": "?",
    "U8": "u1",
    "I8": "i1",
    "I16": "<i2",
    "U16": "<u2",
    "F16": "<f2",
    "BF16": "<u2",
    "I32": "<i4",
    "U32": "<u4",
    "F32": "<f4",
    "C64": "<c8",
    "F64": "<f8",
    "I64": "<i8",
    "U64": "<u8",
}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a file: element type, shape, and the absolute byte range ``[start, end)`` in the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor in the file."""
        return self.end - self.start


def tensor_nbytes(dtype: str, shape: Iterable[int]) -> int | None:
    """Bytes of a tensor; ``None`` if they are not a whole number below 2**63.

    Raises:
        KeyError: ``dtype`` is unknown.
    """
    bits = DTYPE_BITS[dtype]
    dimensions = tuple(shape)
    # Zeros are left out: numpy multiplies the other dimensions of an empty tensor too, which can overflow.
    if math.prod(n for n in dimensions if n) * bits >= 1 << 63:
        return None
    total = math.prod(dimensions) * bits
    return total // 8 if total % 8 == 0 else None


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, value in pairs:
        if name in result:
            raise ValueError(f"the key {name[:200]!r} appears twice")
        result[name] = value
    return result


def _reject_constant(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")


def strict_json(data: bytes) -> Any:
    """Parse UTF-8 JSON without duplicate keys, ``NaN`` or ``Infinity``.

    Raises:
        ValueError: ``data`` is not such JSON.
    """
    try:
        return json.loads(
            data.decode("utf-8"), object_pairs_hook=_no_duplicates, parse_constant=_reject_constant
        )
    except RecursionError:
        raise ValueError("the JSON is nested too deeply") from None


def parse_header(
    data: bytes, data_start: int, file_bytes: int, where: str, error: type[MoechatError] = CheckpointError
) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    """Validate the JSON part of a header.

    Args:
        data: The JSON bytes, padding included.
        data_start: Offset of the data section in the file.
        file_bytes: Size of the file.
        where: Name of the file for error messages.
        error: Class to raise.

    Returns:
        Tensors by name in order of offset, and the metadata.

    Raises:
        MoechatError: Of class ``error``, naming the file, the tensor and the numbers.
    """

    def refuse(reason: str) -> MoechatError:
        return error(f"{where} is damaged: {reason}", hint="download or copy the file again")

    if not data.startswith(b"{"):
        raise refuse("its header does not start with '{'")
    try:
        header = strict_json(data)
    except ValueError as problem:
        raise refuse(f"its header is not valid: {problem}") from None
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise refuse("its metadata is not a map of strings")

    data_bytes = file_bytes - data_start
    tensors: list[tuple[str, TensorEntry]] = []
    for name, fields in header.items():
        short = name if len(name) <= 200 else name[:200] + "…"
        try:
            name.encode("utf-8")
        except UnicodeEncodeError:
            raise refuse(f"the tensor name {short!r} is not valid text") from None
        if not isinstance(fields, dict) or fields.keys() != {"dtype", "shape", "data_offsets"}:
            raise refuse(f"tensor {short!r} does not have exactly dtype, shape and data_offsets")
        dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
        if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
            raise refuse(f"tensor {short!r} has the unknown element type {str(dtype)[:40]!r}")
        if not isinstance(shape, list) or not all(type(n) is int and 0 <= n < 1 << 63 for n in shape):
            raise refuse(f"the shape of tensor {short!r} is not a list of non-negative integers")
        if len(shape) > MAX_DIMENSIONS:
            raise refuse(f"tensor {short!r} has {len(shape)} dimensions, more than {MAX_DIMENSIONS}")
        if not isinstance(offsets, list) or len(offsets) != 2 or not all(type(n) is int for n in offsets):
            raise refuse(f"the offsets of tensor {short!r} are not two integers")
        start, end = offsets
        if not 0 <= start <= end <= data_bytes:
            raise refuse(f"tensor {short!r} is at {start}..{end}, the file has {data_bytes} data bytes")
        expected = tensor_nbytes(dtype, shape)
        if expected is None or expected != end - start:
            raise refuse(
                f"tensor {short!r} spans {end - start} bytes, its shape {shape} of {dtype} does not fit them"
            )
        tensors.append((name, TensorEntry(dtype, tuple(shape), data_start + start, data_start + end)))

    tensors.sort(key=lambda item: (item[1].start, item[1].end))
    position = data_start
    for name, entry in tensors:
        if entry.start != position:
            kind = "overlaps the one before" if entry.start < position else "leaves a hole before it"
            raise refuse(f"tensor {name[:200]!r} at {entry.start - data_start} {kind}")
        position = entry.end
    if position != file_bytes:
        raise refuse(f"its tensors end at byte {position}, the file at {file_bytes}")
    return dict(tensors), metadata


class SafetensorsFile(MappedFile):
    """One safetensors file, checked and mapped read-only.

    Attributes:
        path: The file.
        tensors: Tensors by name, in order of offset.
        metadata: The ``__metadata__`` strings.
        data_start: Offset of the data section.
        file_bytes: Size of the file.
    """

    def __init__(
        self,
        path: Path,
        tensors: dict[str, TensorEntry],
        metadata: dict[str, str],
        data_start: int,
        mapping: GuardedMapping,
        status: os.stat_result,
        error: type[MoechatError],
    ) -> None:
        """Use :meth:`open`."""
        super().__init__(path, mapping, status)
        self.tensors: Mapping[str, TensorEntry] = tensors
        self.metadata: Mapping[str, str] = metadata
        self.data_start = data_start
        self.file_bytes = len(mapping)
        self._error = error

    @classmethod
    def open(cls, path: Path, *, error: type[MoechatError] = CheckpointError) -> Self:
        """Check the header of ``path`` and map the file; no tensor data is read.

        Args:
            path: The file.
            error: Class of errors.

        Raises:
            MoechatError: Of class ``error``; the file is missing, unreadable, or breaks a rule in the module
                docstring.
        """
        with opened_regular(path, error) as (descriptor, status):
            data, data_start = _read_header(descriptor, status.st_size, str(path), error)
            tensors, metadata = parse_header(data, data_start, status.st_size, str(path), error)
            try:
                mapping = GuardedMapping.of(descriptor, status.st_size)
            except ValueError as problem:  # it has become shorter
                raise error(f"{path} cannot be mapped: {problem}") from problem
            _prefer_huge_pages(mapping)
        return cls(path, tensors, metadata, data_start, mapping, status, error)

    def array(self, name: str) -> NDArray[Any]:
        """The tensor as a read-only view of the file, without a copy.

        bf16 is shown as ``uint16`` and fp8 as ``uint8`` of the tensor's shape, sub-byte types as flat
        ``uint8``. The view may be unaligned, depending on the file.

        Raises:
            KeyError: The tensor does not exist.
        """
        entry = self.tensors[name]
        numpy_dtype = _NUMPY_DTYPES.get(entry.dtype, "u1")
        shape = (entry.nbytes,) if DTYPE_BITS[entry.dtype] < 8 else entry.shape
        return np.ndarray(shape, dtype=numpy_dtype, buffer=self._mapping, offset=entry.start)

    def chunks(self, name: str) -> Iterator[bytes]:
        """The bytes of a tensor in pieces of 8 MiB; read, not mapped, so that a truncated file is an error.

        Raises:
            MoechatError: Of the class given to :meth:`open`; the file has changed its size or cannot be read.
        """
        entry = self.tensors[name]
        try:
            with open(self.path, "rb", buffering=0) as file:
                position = entry.start
                while position < entry.end:
                    data = os.pread(file.fileno(), min(_READ_CHUNK, entry.end - position), position)
                    if not data:
                        raise self._error(f"{self.path} ends at byte {position}; it was longer a moment ago")
                    position += len(data)
                    yield data
        except OSError as problem:
            raise self._error(f"{self.path} cannot be read: {problem.strerror}") from problem


def _prefer_huge_pages(mapping: mmap.mmap) -> None:
    """Advise the kernel to map the file in huge pages; no effect without support for files."""
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):
            mapping.madvise(mmap.MADV_HUGEPAGE)


def _read_header(
    descriptor: int, file_bytes: int, where: str, error: type[MoechatError]
) -> tuple[bytes, int]:
    if file_bytes < 10:
        raise error(f"{where} is damaged: {file_bytes} bytes are too few for a header")
    beginning = os.pread(descriptor, 64, 0)
    length = int.from_bytes(beginning[:8], "little")
    # The letters of a text are a number too, and a larger one than any header's length.
    if length > min(file_bytes - 8, MAX_HEADER_BYTES) and (kind := other_kind(beginning)):
        raise error(f"{where} is {kind}")
    if length > file_bytes - 8:
        raise error(f"{where} is damaged: its header claims {length} bytes, the file has {file_bytes}")
    if length > MAX_HEADER_BYTES:
        raise error(f"{where} is refused: its header has {length} bytes, more than {MAX_HEADER_BYTES}")
    data = os.pread(descriptor, length, 8)
    if len(data) != length:
        raise error(f"{where} is damaged: its header ends after {len(data)} of {length} bytes")
    return data, 8 + length


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """A tensor about to be written: name, element type, shape.

    Attributes:
        encoding: Of rows that keep the encoding of their source, whose ``dtype`` is ``U8``; see
            :mod:`moechat.store.encoded_file`.
        columns: If these rows have their columns in another order than the model; see there.
        visible: Type that these rows appear as.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    encoding: str | None = None
    columns: tuple[int, int, int] | None = None
    visible: str = "F16"

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor.

        Raises:
            CheckpointError: They are not a whole number.
        """
        size = tensor_nbytes(self.dtype, self.shape)
        if size is None:
            raise CheckpointError(
                f"tensor {self.name!r} of {self.dtype} {self.shape} has no whole number of bytes"
            )
        return size


def build_header(
    tensors: Iterable[PlannedTensor], *, alignment: int = 8, metadata: Mapping[str, str] | None = None
) -> bytes:
    """Header of a file whose data section holds ``tensors`` in the order given.

    Args:
        tensors: Content of the file.
        alignment: The data section begins at a multiple of this; the JSON is padded with spaces.
        metadata: Entries for ``__metadata__``.

    Returns:
        The length prefix and the padded JSON.
    """
    entries: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    position = 0
    for tensor in tensors:
        end = position + tensor.nbytes
        entries[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    text += b" " * (-(8 + len(text)) % alignment)
    return len(text).to_bytes(8, "little") + text
