"""Headers of GGUF files: a strict parser.

Format (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3): magic, version, number
of tensors and of metadata values, the values, the descriptions of the tensors, padding, data. Numbers are
little-endian, strings and arrays are preceded by their length.

A header is accepted only if all of these hold; lengths are checked against the bytes present before anything
of that size is allocated:

* it ends inside the file and within ``MAX_HEADER_BYTES``;
* no key and no tensor appears twice; names are UTF-8;
* every tensor has a known type, one to four positive dimensions whose product cannot overflow, rows of whole
  blocks, and is inside the file;
* in the order of their descriptions tensors follow each other in the data section, each at the next multiple
  of the alignment, as llama.cpp requires too. So a wrong type, shape or offset is not read as other weights.

The ``gguf`` package's reader creates an array for every word of a vocabulary (8 s for 150,000 words; this
parser 0.2 s) and follows a wrong count past the end of the file. That package is used to decode blocks only.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moechat.errors import CheckpointError
from moechat.store.mapped_file import other_kind

MAX_HEADER_BYTES = 256 << 20
_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ALIGNMENT = 32
_MAX_NAME = 4096
_MAX_DIMENSIONS = 4
_STRING, _ARRAY = 8, 9
_SCALARS = {
    number: struct.Struct(code)
    for number, code in {
        0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d",
    }.items()
}  # fmt: skip
_LENGTH = struct.Struct("<Q")
_KIND = struct.Struct("<I")
_KEPT_VALUES = 4096  # longest array kept; longer ones belong to vocabularies


@dataclass(frozen=True, slots=True)
class GgufArray:
    """Length of an array whose elements are not kept."""

    length: int


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor of a file.

    Attributes:
        kind: ggml's type number.
        shape: As in a checkpoint, rows before columns (reversed in the file).
        start: First byte in the file.
        end: One past the last byte.
    """

    kind: int
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True)
class GgufHeader:
    """Header of a file.

    Attributes:
        metadata: Values by key: numbers, booleans, strings, tuples of numbers; :class:`GgufArray` for
            arrays of strings and long arrays.
        tensors: By name.
        nbytes: Offset of the data section.
    """

    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]
    nbytes: int


def parse_gguf_header(data: bytes | memoryview, file_bytes: int, where: str) -> GgufHeader | None:
    """Check the header of a file.

    Args:
        data: The file, or its first part.
        file_bytes: Size of the whole file.
        where: Its name, for messages.

    Returns:
        The header; ``None`` if ``data`` is a first part that ends inside the header.

    Raises:
        CheckpointError: It is not a GGUF file, is damaged, or has a tensor of an unknown type.
    """
    if kind := other_kind(bytes(data[:64])):
        raise CheckpointError(f"{where} is {kind}")
    cursor = _Cursor(data)
    try:
        return _parse(cursor, file_bytes, where)
    except _EndedError:
        if len(data) < min(file_bytes, MAX_HEADER_BYTES):
            return None
        if file_bytes > len(data):
            raise CheckpointError(
                f"{where} is refused: its header is longer than {MAX_HEADER_BYTES} bytes"
            ) from None
        raise CheckpointError(
            f"{where} is damaged: it ends within its header, after {file_bytes} bytes",
            hint="download or copy the file again",
        ) from None
    except _UnknownTypeError as problem:
        raise CheckpointError(
            f"{where}: {problem}, which this version does not read",
            hint="take a file of another type, such as Q4_K_M or Q8_0; if it should have a usual one, "
            "download or copy the file again",
        ) from None
    except (_MalformedError, UnicodeDecodeError) as problem:
        raise CheckpointError(
            f"{where} is damaged: {problem}", hint="download or copy the file again"
        ) from None


def read_arrays(path: Path, keys: Collection[str]) -> dict[str, list[Any]]:
    """The whole arrays of some keys, which :func:`parse_gguf_header` leaves out.

    Args:
        path: A file that begins with a valid header.
        keys: Of the arrays; those that the file lacks are left out.

    Raises:
        CheckpointError: The header is damaged.
    """
    found: dict[str, list[Any]] = {}
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        cursor = _Cursor(bytes(data[: min(len(data), MAX_HEADER_BYTES)]))
        try:
            cursor.skip(len(_MAGIC) + _KIND.size + _LENGTH.size)
            for _ in range(cursor.number(_LENGTH)):
                key, kind = cursor.text(_MAX_NAME), cursor.number(_KIND)
                if key in keys and kind == _ARRAY:
                    element, count = cursor.number(_KIND), cursor.number(_LENGTH)
                    if element == _STRING:
                        found[key] = [cursor.text() for _ in range(count)]
                    elif element in _SCALARS:
                        found[key] = [cursor.number(_SCALARS[element]) for _ in range(count)]
                    else:
                        raise _MalformedError(f"{key} has elements of the type {element}")
                else:
                    _value(cursor, kind)
        except (_EndedError, _MalformedError, UnicodeDecodeError) as problem:
            raise CheckpointError(f"{path} is damaged: {problem or 'its header ends early'}") from None
    return found


class _EndedError(Exception):
    """The data ends inside the header."""


class _MalformedError(Exception):
    """The header has an invalid value."""


class _UnknownTypeError(Exception):
    """A tensor has a type that is not among those of the ``gguf`` package: an old or a new one."""


class _Cursor:
    """Reads values in sequence; raises ``_EndedError`` at the end of the data."""

    def __init__(self, data: bytes | memoryview) -> None:
        self._data = memoryview(data)
        self.position = 0

    def bytes(self, count: int) -> bytes:
        self.skip(count)
        return bytes(self._data[self.position - count : self.position])

    def number(self, form: struct.Struct) -> Any:
        self.require(form.size)
        (value,) = form.unpack_from(self._data, self.position)
        self.position += form.size
        return value

    def text(self, most: int | None = None, *, after: str = "") -> str:
        length = self.number(_LENGTH)
        if most is not None and length > most:
            place = f" after {after[:200]!r}" if after else ""
            raise _MalformedError(f"a name in it{place} has {length} bytes")
        return self.bytes(length).decode("utf-8")

    def skip(self, count: int) -> None:
        self.require(count)
        self.position += count

    def require(self, count: int) -> None:
        if count > MAX_HEADER_BYTES:
            raise _MalformedError(f"a value in its header claims {count} bytes")
        if count > len(self._data) - self.position:
            raise _EndedError


def _parse(cursor: _Cursor, file_bytes: int, where: str) -> GgufHeader:
    if cursor.bytes(4) != _MAGIC:
        raise _MalformedError("it does not begin like a GGUF file")
    version = cursor.number(_KIND)
    if version not in _VERSIONS:
        if int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS:
            raise CheckpointError(
                f"{where} is a big-endian GGUF file, which moechat does not read",
                hint="take the little-endian file",
            )
        raise CheckpointError(
            f"{where} has GGUF version {version}; moechat reads {_VERSIONS[0]} and {_VERSIONS[1]}",
            hint="convert the model again with a current llama.cpp",
        )
    tensor_count, value_count = cursor.number(_LENGTH), cursor.number(_LENGTH)
    metadata: dict[str, Any] = {}
    for _ in range(value_count):
        key = cursor.text(_MAX_NAME)
        if key in metadata:
            raise _MalformedError(f"the key {key[:200]!r} appears twice")
        metadata[key] = _value(cursor, cursor.number(_KIND))
    places: dict[str, tuple[int, tuple[int, ...], int]] = {}
    name = ""
    for _ in range(tensor_count):
        name = cursor.text(_MAX_NAME, after=name)
        if name in places:
            raise _MalformedError(f"the tensor {name[:200]!r} appears twice")
        places[name] = _place(cursor, name)
    alignment = metadata.get("general.alignment", _ALIGNMENT)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise _MalformedError(f"its alignment is {str(alignment)[:80]}, not a power of two")
    data_start = -(-cursor.position // alignment) * alignment
    tensors = {
        name: _tensor(name, kind, shape, data_start + offset, file_bytes)
        for name, (kind, shape, offset) in places.items()
    }
    _require_in_order(tensors, data_start, alignment)
    return GgufHeader(metadata, tensors, data_start)


def _require_in_order(tensors: Mapping[str, GgufTensor], data_start: int, alignment: int) -> None:
    """Check that tensors neither overlap nor leave holes."""
    before, expected = "the header", data_start
    for name, tensor in tensors.items():
        if tensor.start != expected:
            raise _MalformedError(
                f"the tensor {name[:200]!r} begins at {tensor.start}, but {before} ends at {expected}, "
                f"padded to {alignment} bytes"
            )
        before, expected = f"the tensor {name[:200]!r}", -(-tensor.end // alignment) * alignment


def _value(cursor: _Cursor, kind: int) -> Any:
    if kind in _SCALARS:
        return cursor.number(_SCALARS[kind])
    if kind == _STRING:
        return cursor.text()
    if kind != _ARRAY:
        raise _MalformedError(f"a value in its header has the unknown type {kind}")
    element, count = cursor.number(_KIND), cursor.number(_LENGTH)
    if element == _STRING:
        cursor.require(count * _LENGTH.size)
        for _ in range(count):
            cursor.skip(cursor.number(_LENGTH))
        return GgufArray(count)
    if element not in _SCALARS:
        raise _MalformedError(f"an array in its header has elements of the type {element}")
    form = _SCALARS[element]
    if count > _KEPT_VALUES:
        cursor.skip(count * form.size)
        return GgufArray(count)
    return tuple(cursor.number(form) for _ in range(count))


def _place(cursor: _Cursor, name: str) -> tuple[int, tuple[int, ...], int]:
    """Type, shape and offset in the data section."""
    dimensions = cursor.number(_KIND)
    if not 1 <= dimensions <= _MAX_DIMENSIONS:
        raise _MalformedError(f"the tensor {name[:200]!r} has {dimensions} dimensions")
    shape = tuple(cursor.number(_LENGTH) for _ in range(dimensions))[::-1]
    return cursor.number(_KIND), shape, cursor.number(_LENGTH)


def _tensor(name: str, kind: int, shape: tuple[int, ...], start: int, file_bytes: int) -> GgufTensor:
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    except (ValueError, KeyError):
        raise _UnknownTypeError(f"the tensor {name[:200]!r} has type {kind}") from None
    if 0 in shape or shape[-1] % block:
        raise _MalformedError(f"the tensor {name[:200]!r} has shape {list(shape)} in blocks of {block}")
    nbytes = math.prod(shape) // block * block_bytes
    if start + nbytes > file_bytes:
        raise _MalformedError(
            f"the tensor {name[:200]!r} is at {start}..{start + nbytes}, the file has {file_bytes} bytes"
        )
    return GgufTensor(kind, shape, start, start + nbytes)
