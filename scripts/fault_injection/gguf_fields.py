"""The fields of a GGUF file's header, each of which can be changed: counts, names, types, sizes, offsets."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from pathlib import Path

# Bytes of values by their type; 8 is a string, 9 an array.
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_STRING, _ARRAY = 8, 9
_ELEMENTS = 30  # of an array that are fields of their own
_INTEGERS = (
    0,
    1,
    2,
    3,
    7,
    31,
    32,
    255,
    256,
    2**16,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**40,
    2**63 - 1,
    2**63,
    2**64 - 1,
)
_FLOATS = (0.0, -1.0, 1e-45, 1e38, float("inf"), float("-inf"), float("nan"))

Field = tuple[int, int, str]  # offset, bytes, kind: integer, float, text


def base_file(work: Path) -> Path:
    """A small file that answers; made once."""
    path = work / "base.gguf"
    if not path.exists():
        _write(work, path)
    return path


def _write(work: Path, path: Path) -> None:
    from gguf.constants import GGMLQuantizationType as Kind
    from gguf_support import save_model, tensors_of, write_gguf
    from tiny import BYTE_VOCABULARY, write_byte_tokenizer
    from transformers import AutoTokenizer

    directory = work / "for-gguf"
    directory.mkdir()
    config = save_model("qwen3_moe", directory, vocab_size=BYTE_VOCABULARY)
    write_byte_tokenizer(directory)

    def choose(name: str, shape: tuple[int, ...]) -> Kind:
        if len(shape) == 1 or "ffn_gate_inp" in name:
            return Kind.F32
        return Kind.Q4_K if "_exps" in name else Kind.F16

    tokenizer = AutoTokenizer.from_pretrained(directory)
    write_gguf("qwen3_moe", config, tensors_of(directory), path, choose, tokenizer=tokenizer)


def change(data: bytearray, generator: random.Random) -> None:
    """Change one to three fields, now and then bytes of tensors or the length of the file."""
    known = list(fields(bytes(data)))
    # Vocabularies have most fields: half of the changes are for the others.
    few = [field for field in known if field[2] != "element"]
    for _ in range(generator.randint(1, 3)):
        offset, size, kind = generator.choice(few if generator.random() < 0.8 else known)
        data[offset : offset + size] = _other(bytes(data[offset : offset + size]), kind, generator)
    kind = generator.random()
    if kind < 0.05:
        del data[generator.randrange(len(data)) :]
    elif kind < 0.15:
        begin = len(data) // 2  # in the tensors
        for _ in range(generator.choice((1, 100, 10_000))):
            data[generator.randrange(begin, len(data))] = generator.choice((0, 0x7F, 0x80, 0xFF))


def _other(old: bytes, kind: str, generator: random.Random) -> bytes:
    if kind == "text" or not old:
        changed = bytearray(old)
        for place in range(len(changed)):
            if generator.random() < 0.3:
                changed[place] = generator.choice((0, 0x2E, 0x2F, 0x7B, 0x80, 0xFF, generator.randrange(256)))
        return bytes(changed)
    if kind == "float":
        return struct.pack("<f" if len(old) == 4 else "<d", generator.choice(_FLOATS))
    value = int.from_bytes(old, "little")
    near = (value + 1, value - 1, value * 2, value ^ (1 << generator.randrange(8 * len(old))))
    chosen = generator.choice(near if generator.random() < 0.4 else _INTEGERS)
    return (chosen % (1 << (8 * len(old)))).to_bytes(len(old), "little")


def fields(data: bytes) -> Iterator[Field]:
    """All fields of the header."""
    yield 4, 4, "integer"  # version
    yield 8, 8, "integer"  # tensors
    yield 16, 8, "integer"  # entries
    tensors, entries = struct.unpack_from("<QQ", data, 8)
    at = 24
    for _ in range(entries):
        at = yield from _text(data, at)
        (kind,) = struct.unpack_from("<I", data, at)
        yield at, 4, "integer"
        at = yield from _value(data, at + 4, kind, "integer")
    for _ in range(tensors):
        at = yield from _text(data, at)
        (dimensions,) = struct.unpack_from("<I", data, at)
        yield at, 4, "integer"
        for number in range(dimensions):
            yield at + 4 + 8 * number, 8, "integer"
        at += 4 + 8 * dimensions
        yield at, 4, "integer"  # type
        yield at + 4, 8, "integer"  # offset
        at += 12


def _text(data: bytes, at: int, kind: str = "text") -> Iterator[Field]:
    (size,) = struct.unpack_from("<Q", data, at)
    yield at, 8, "integer" if kind == "text" else kind
    yield at + 8, size, kind
    return at + 8 + size


def _value(data: bytes, at: int, kind: int, field: str) -> Iterator[Field]:
    if kind == _STRING:
        return (yield from _text(data, at, "text" if field == "integer" else field))
    if kind == _ARRAY:
        element, count = struct.unpack_from("<IQ", data, at)
        yield at, 4, "integer"
        yield at + 4, 8, "integer"
        at += 12
        for number in range(count):
            inner = list(_inner(data, at, element))
            if number < _ELEMENTS:
                yield from inner[:-1]
            at = inner[-1][0]
        return at
    size = _SIZES[kind]
    yield at, size, "float" if kind in (6, 12) and field == "integer" else field
    return at + size


def _inner(data: bytes, at: int, kind: int) -> Iterator[Field]:
    """The fields of an element, then its end as a field of no bytes."""
    end = yield from _value(data, at, kind, "element")
    yield end, 0, "end"
