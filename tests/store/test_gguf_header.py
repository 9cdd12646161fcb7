"""Headers of GGUF files: equal to those of gguf's own reader, and clear errors for damaged files."""

from __future__ import annotations

import os
import struct
import threading
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType as Kind
from hypothesis import given, settings
from hypothesis import strategies as st

from moechat.errors import CheckpointError, MoechatError, UnsupportedModelError
from moechat.store.gguf_file import GgufFile, decode, require_decodable
from moechat.store.gguf_header import GgufArray, GgufHeader, parse_gguf_header


def write(path: Path, alignment: int | None = None) -> Path:
    writer = gguf.GGUFWriter(path, "olmoe")
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    writer.add_block_count(3)
    writer.add_string("text", "grüße")
    writer.add_bool("yes", True)
    writer.add_float64("wide", 1.5)
    writer.add_int8("small", -3)
    writer.add_array("numbers", [1, 2, 3])
    writer.add_token_list([f"word{number}" for number in range(300)])
    writer.add_token_scores([0.5] * 5000)
    rng = np.random.default_rng(0)
    writer.add_tensor("a", rng.standard_normal((3, 64), dtype=np.float32))
    writer.add_tensor("b", rng.standard_normal((2, 5, 32)).astype(np.float16))
    packed = gguf.quantize(rng.standard_normal((4, 96), dtype=np.float32), Kind.Q8_0)
    writer.add_tensor("c", packed, raw_dtype=Kind.Q8_0)
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        step()
    writer.close()
    return path


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write(tmp_path_factory.mktemp("gguf") / "m.gguf").read_bytes()


def parse(data: bytes, file_bytes: int | None = None) -> GgufHeader | None:
    return parse_gguf_header(data, len(data) if file_bytes is None else file_bytes, "m.gguf")


@pytest.mark.parametrize("alignment", [None, 256])
def test_the_parser_agrees_with_the_reader_of_the_gguf_package(tmp_path: Path, alignment: int | None) -> None:
    path = write(tmp_path / "m.gguf", alignment)
    file, theirs = GgufFile.open(path), gguf.GGUFReader(path)
    assert file.header.nbytes == theirs.data_offset
    assert list(file.header.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        ours = file.header.tensors[tensor.name]
        assert ours.kind == tensor.tensor_type
        assert ours.shape == tuple(int(size) for size in reversed(tensor.shape))
        assert (ours.start, ours.end) == (tensor.data_offset, tensor.data_offset + tensor.n_bytes)
        values = decode(file.rows(ours, None), ours.kind)
        assert np.array_equal(
            values.reshape(ours.shape), gguf.dequantize(tensor.data, tensor.tensor_type).reshape(ours.shape)
        )
    shown = {key: field.contents() for key, field in theirs.fields.items() if not key.startswith("GGUF.")}
    kept = {key: value for key, value in file.header.metadata.items() if not isinstance(value, GgufArray)}
    assert {key: list(value) if isinstance(value, tuple) else value for key, value in kept.items()} == {
        key: shown[key] for key in kept
    }
    left = {key: value.length for key, value in file.header.metadata.items() if isinstance(value, GgufArray)}
    assert left == {"tokenizer.ggml.tokens": 300, "tokenizer.ggml.scores": 5000}


def test_an_expert_is_a_part_of_its_tensor(tmp_path: Path) -> None:
    file = GgufFile.open(write(tmp_path / "m.gguf"))
    tensor = file.header.tensors["b"]
    whole = decode(file.rows(tensor, None), tensor.kind).reshape(2, 5, 32)
    assert np.array_equal(decode(file.rows(tensor, 1), tensor.kind), whole[1])


def test_a_prefix_without_the_whole_header_returns_none(content: bytes) -> None:
    header = parse(content)
    assert header is not None
    ends = [0, 3, 4, 20, 24, 100, 2000, header.nbytes - 40]
    assert [parse(content[:end], len(content)) for end in ends] == [None] * len(ends)
    assert parse(content[: header.nbytes], len(content)) == header


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_damaged_headers_raise_only_checkpoint_errors(content: bytes, data: st.DataObject) -> None:
    header = parse(content)
    assert header is not None
    changed = bytearray(content)
    for _ in range(data.draw(st.integers(1, 4))):
        changed[data.draw(st.integers(0, header.nbytes - 1))] = data.draw(st.integers(0, 255))
    end = data.draw(st.one_of(st.just(len(changed)), st.integers(0, len(changed))))
    try:
        found = parse(bytes(changed[:end]))
    except MoechatError:
        return
    assert found is not None
    assert all(0 <= tensor.start <= tensor.end <= end for tensor in found.tensors.values())


def numbered(form: str, *values: int) -> bytes:
    return struct.pack("<" + form, *values)


def text(value: str) -> bytes:
    return numbered("Q", len(value.encode())) + value.encode()


ONE = b"GGUF" + numbered("IQQ", 3, 1, 0)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"GGML" + bytes(60), "does not begin like a GGUF file"),
        (b"GGUF" + numbered("IQQ", 1, 0, 0), "has GGUF version 1; moechat reads 2 and 3"),
        (b"GGUF" + numbered("IQQ", 0x03000000, 0, 0), "big-endian GGUF file"),
        (b"GGUF" + numbered("IQQ", 3, 0, 1) + numbered("Q", 1 << 60), "a name in it has 1152921504606846976"),
        (
            b"GGUF" + numbered("IQQ", 3, 0, 1) + text("k") + numbered("IIQ", 9, 0, 1 << 62),
            "claims 46116860184",
        ),
        (
            b"GGUF" + numbered("IQQ", 3, 0, 1) + text("k") + numbered("IIQ", 9, 8, 1 << 59),
            "header claims 4611",
        ),
        (b"GGUF" + numbered("IQQ", 3, 0, 1) + text("k") + numbered("IIQ", 9, 9, 1), "elements of the type 9"),
        (b"GGUF" + numbered("IQQ", 3, 0, 1) + text("k") + numbered("I", 77), "the unknown type 77"),
        (
            b"GGUF" + numbered("IQQ", 3, 0, 2) + (text("k") + numbered("II", 4, 1)) * 2,
            "the key 'k' appears twice",
        ),
        (
            b"GGUF" + numbered("IQQ", 3, 0, 1) + text("general.alignment") + numbered("II", 4, 24),
            "its alignment is 24",
        ),
        (b"GGUF" + numbered("IQQ", 3, 0, 1) + numbered("Q", 1) + b"\xff", "can't decode byte 0xff"),
        (ONE + text("t") + numbered("IQIQ", 1, 8, 0, 0), "'t' is at 64..96, the file has"),
        (ONE + text("t") + numbered("IQIQ", 1, 8, 0, 1 << 63) + bytes(64), "'t' is at"),
        (
            ONE + text("t") + numbered("IQIQ", 1, 33, 8, 0) + bytes(64),
            r"'t' has shape \[33\] in blocks of 32",
        ),
        (ONE + text("t") + numbered("IQIQ", 1, 0, 0, 0) + bytes(64), r"'t' has shape \[0\]"),
        (ONE + text("t") + numbered("I", 9), "'t' has 9 dimensions"),
        (
            ONE + text("t") + numbered("IQIQ", 1, 1, 0, 32) + bytes(128),
            "'t' begins at 96, but the header ends at",
        ),
        (
            b"GGUF"
            + numbered("IQQ", 3, 2, 0)
            + text("a")
            + numbered("IQIQ", 1, 8, 0, 0)
            + text("b")
            + numbered("IQIQ", 1, 8, 0, 0)
            + bytes(128),
            "'b' begins at 96, but the tensor 'a' ends at 128, padded to 32 bytes",
        ),
        (
            b"GGUF"
            + numbered("IQQ", 3, 2, 0)
            + text("a")
            + numbered("IQIQ", 1, 8, 0, 0)
            + numbered("Q", 9999),
            "a name in it after 'a' has 9999 bytes",
        ),
        (
            b"GGUF" + numbered("IQQ", 3, 0, 1) + text("general.alignment") + numbered("I?", 7, True),
            "its alignment is True, not a power of two",
        ),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:12", "m.gguf is a pointer of Git LFS"),
        (b"\n<!DOCTYPE html><title>Not found</title>", "m.gguf is a web page, not the file"),
        (
            b"GGUF" + numbered("IQQ", 3, 2, 0) + (text("t") + numbered("IQIQ", 1, 1, 0, 0)) * 2 + bytes(64),
            "the tensor 't' appears twice",
        ),
        (b"GGUF" + numbered("IQQ", 3, 1 << 62, 1 << 62), "it ends within its header, after 24 bytes"),
    ],
)
def test_each_fault_is_named(data: bytes, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        parse(data)


@pytest.mark.parametrize("kind", [31, 36, 99])
def test_unknown_types_of_tensors_are_named_as_such(kind: int) -> None:
    with pytest.raises(CheckpointError) as caught:
        parse(ONE + text("t") + numbered("IQIQ", 1, 32, kind, 0) + bytes(64))
    assert str(caught.value) == f"m.gguf: the tensor 't' has type {kind}, which this version does not read"
    assert caught.value.hint is not None
    assert caught.value.hint.startswith("take a file of another type")


def test_types_that_cannot_be_decoded_are_refused_before_reading(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "olmoe")
    writer.add_tensor("t", np.zeros((2, 292), np.uint8), raw_dtype=Kind.Q8_K)
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        step()
    writer.close()
    with pytest.raises(UnsupportedModelError, match="has type Q8_K, which cannot be decoded"):
        require_decodable(GgufFile.open(tmp_path / "m.gguf").header, "m.gguf")


def test_special_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.gguf").touch()
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(CheckpointError, match=r"empty\.gguf is empty"):
        GgufFile.open(tmp_path / "empty.gguf")
    failures: list[BaseException] = []

    def open_pipe() -> None:
        try:
            GgufFile.open(tmp_path / "pipe.gguf")
        except CheckpointError as error:
            failures.append(error)

    opener = threading.Thread(target=open_pipe, daemon=True)
    opener.start()
    opener.join(10)
    assert "is not a regular file" in str(failures[0])
    with pytest.raises(CheckpointError, match="cannot be opened: No such file"):
        GgufFile.open(tmp_path / "none.gguf")
