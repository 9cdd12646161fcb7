"""Dense weights that keep the encoding of their source: conversion, reading, damage."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType as Kind
from gguf_support import save_model, tensors_of, write_gguf
from kept_support import DENSE_ENCODINGS, file_rows, values

from moechat.errors import CheckpointError, StoreDamagedError
from moechat.models.checkpoint_mapping import plan_checkpoint
from moechat.models.gguf_source import opened_gguf
from moechat.store.convert import convert
from moechat.store.encoded_file import COLUMNS, TYPES, EncodedSafetensors, encodings_header
from moechat.store.encoded_file import ENCODINGS as METADATA
from moechat.store.quantised.number_formats import as_float32, rounded
from moechat.store.safetensors_file import PlannedTensor, build_header
from moechat.store.store import Store

ROWS, WIDTH = 5, 512


def write(path: Path, planned: list[PlannedTensor], parts: list[np.ndarray]) -> Path:
    path.write_bytes(encodings_header(planned) + b"".join(part.tobytes() for part in parts))
    return path


@pytest.mark.parametrize("encoding", DENSE_ENCODINGS)
def test_a_matrix_appears_as_the_values_of_its_rows(tmp_path: Path, encoding: str) -> None:
    rows = file_rows(np.random.default_rng(1), encoding, ROWS, WIDTH)
    plain = np.arange(7, dtype=np.float32)
    planned = [PlannedTensor("b", "F32", (7,)), PlannedTensor("a", "U8", rows.shape, encoding)]
    file = EncodedSafetensors.open(write(tmp_path / "f", planned, [plain, rows]))
    assert (file.tensors["a"].dtype, file.tensors["a"].shape) == ("F16", (ROWS, WIDTH))
    assert (file.encoding("a"), file.encoding("b")) == (encoding, None)
    np.testing.assert_array_equal(file.encoded_rows("a", None), rows)
    expected = values(encoding, rows).astype(np.float16)
    np.testing.assert_array_equal(file.array("a"), expected)
    assert b"".join(file.chunks("a")) == file.array("a").tobytes()
    np.testing.assert_array_equal(file.array("b"), plain)
    assert b"".join(file.chunks("b")) == plain.tobytes()


def test_matrices_of_several_dimensions_keep_their_shape(tmp_path: Path) -> None:
    rows = file_rows(np.random.default_rng(1), "q8_0", 6, 64)
    planned = PlannedTensor("a", "U8", (2, 3, rows.shape[1]), "q8_0")
    file = EncodedSafetensors.open(write(tmp_path / "f", [planned], [rows]))
    assert file.array("a").shape == (2, 3, 64)
    np.testing.assert_array_equal(file.encoded_rows("a", 1), rows[3:])


def test_columns_appear_in_the_order_of_the_model(tmp_path: Path) -> None:
    rows = file_rows(np.random.default_rng(1), "q8_0", ROWS, 2 * 3 * 32)
    planned = PlannedTensor("a", "U8", rows.shape, "q8_0", (2, 3, 32))
    file = EncodedSafetensors.open(write(tmp_path / "f", [planned], [rows]))
    assert file.columns("a") == (2, 3, 32)
    np.testing.assert_array_equal(file.encoded_rows("a", None), rows)
    # Head i * 2 + j of the model is head j * 3 + i of the file.
    heads = values("q8_0", rows).astype(np.float16).reshape(ROWS, 6, 32)[:, [0, 3, 1, 4, 2, 5]]
    np.testing.assert_array_equal(file.array("a"), heads.reshape(ROWS, -1))


@pytest.mark.parametrize("encoding", ["int4", "nvfp4"])
def test_rows_of_a_bf16_checkpoint_appear_as_bf16(tmp_path: Path, encoding: str) -> None:
    rows = file_rows(np.random.default_rng(1), encoding, ROWS, WIDTH)
    planned = PlannedTensor("a", "U8", rows.shape, encoding, visible="BF16")
    file = EncodedSafetensors.open(write(tmp_path / "f", [planned], [rows]))
    assert (file.tensors["a"].dtype, file.tensors["a"].shape) == ("BF16", (ROWS, WIDTH))
    expected = rounded(values(encoding, rows), "BF16")
    found = file.array("a")
    np.testing.assert_array_equal(as_float32(found, "BF16"), as_float32(expected, "BF16"))
    assert b"".join(file.chunks("a")) == found.tobytes()


def test_a_value_beyond_bf16_is_an_error_where_it_is_read(tmp_path: Path) -> None:
    rows = file_rows(np.random.default_rng(1), "int4", 1, 64)
    rows[0, :4] = np.array([2.0**127], np.float32).view(np.uint8)
    rows[0, 4] = 15
    planned = PlannedTensor("a", "U8", rows.shape, "int4", visible="BF16")
    file = EncodedSafetensors.open(write(tmp_path / "f", [planned], [rows]))
    with pytest.raises(CheckpointError, match="a has values that are not finite in BF16"):
        file.array("a")


@pytest.mark.parametrize(
    ("types", "message"),
    [
        ('{"a":"F32"}', "are not among F16, BF16"),
        ('{"a":1}', "are not among F16, BF16"),
        ("[]", "are not among F16, BF16"),
        ('{"c":"BF16"}', "do not fit 'c'"),
        ("{", "are not valid"),
    ],
)
def test_damaged_types_are_refused(tmp_path: Path, types: str, message: str) -> None:
    planned = PlannedTensor("a", "U8", (ROWS, 36))
    header = build_header([planned], metadata={METADATA: '{"a":"int4"}', TYPES: types})
    (tmp_path / "f").write_bytes(header + bytes(planned.nbytes))
    with pytest.raises(StoreDamagedError, match=message):
        EncodedSafetensors.open(tmp_path / "f", error=StoreDamagedError)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ("[]", "are not three numbers each"),
        ('{"a":[2,3]}', "are not three numbers each"),
        ('{"a":[2,3,0]}', "are not three numbers each"),
        ('{"a":[2,3,true]}', "are not three numbers each"),
        ('{"a":[2,3,5]}', "do not fit 'a'"),
        ('{"c":[2,3,5]}', "do not fit 'c'"),
        ("{", "are not valid"),
    ],
)
def test_damaged_columns_are_refused(tmp_path: Path, columns: str, message: str) -> None:
    planned = PlannedTensor("a", "U8", (ROWS, 34))
    header = build_header([planned], metadata={METADATA: '{"a":"q8_0"}', COLUMNS: columns})
    (tmp_path / "f").write_bytes(header + bytes(planned.nbytes))
    with pytest.raises(StoreDamagedError, match=message):
        EncodedSafetensors.open(tmp_path / "f", error=StoreDamagedError)


@pytest.mark.parametrize(
    ("metadata", "shape", "dtype", "message"),
    [
        ("{", (ROWS, 34), "U8", "are not valid"),
        ("[]", (ROWS, 34), "U8", "do not map tensors to encodings"),
        ('{"a":"q9"}', (ROWS, 34), "U8", "do not map tensors to encodings"),
        ('{"a":1}', (ROWS, 34), "U8", "do not map tensors to encodings"),
        ('{"c":"q8_0"}', (ROWS, 34), "U8", "'c' does not hold rows of q8_0"),
        ('{"a":"q8_0"}', (ROWS, 33), "U8", "'a' does not hold rows of q8_0"),
        ('{"a":"q8_0"}', (34,), "U8", "'a' does not hold rows of q8_0"),
        ('{"a":"q8_0"}', (ROWS, 34), "I8", "'a' does not hold rows of q8_0"),
    ],
)
def test_damaged_encodings_are_refused(
    tmp_path: Path, metadata: str, shape: tuple[int, ...], dtype: str, message: str
) -> None:
    planned = PlannedTensor("a", dtype, shape)
    header = build_header([planned], metadata={METADATA: metadata})
    (tmp_path / "f").write_bytes(header + bytes(planned.nbytes))
    with pytest.raises(StoreDamagedError, match=message):
        EncodedSafetensors.open(tmp_path / "f", error=StoreDamagedError)


def test_a_value_beyond_16_bits_is_an_error_where_it_is_read(tmp_path: Path) -> None:
    rows = file_rows(np.random.default_rng(1), "q8_0", 1, 32)
    rows[0, :2] = np.float16(60000).reshape(1).view(np.uint8)
    planned = PlannedTensor("a", "U8", rows.shape, "q8_0")
    file = EncodedSafetensors.open(write(tmp_path / "f", [planned], [rows]))
    with pytest.raises(CheckpointError, match="a has values that are not finite or above 65504"):
        file.array("a")


def test_a_store_has_the_rows_of_the_file_and_is_of_format_4(tmp_path: Path) -> None:
    config = save_model("olmoe", tmp_path / "source")
    write_gguf("olmoe", config, tensors_of(tmp_path / "source"), tmp_path / "m.gguf", lambda *_: Kind.Q8_0)
    with opened_gguf(tmp_path / "m.gguf") as opened:
        made = convert(opened, plan_checkpoint(opened), tmp_path / "store", bits=4, source_name="x")
    assert json.loads((made.path / "manifest.json").read_text())["format_version"] == 4
    store = Store.open(made.path)
    assert store.manifest.dense_format == 4
    reader = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    name = "model.layers.0.self_attn.o_proj.weight"
    assert store.dense.encoding(name) == "q8_0"
    np.testing.assert_array_equal(
        store.dense.encoded_rows(name, None), reader["blk.0.attn_output.weight"].data
    )


def test_a_scale_that_is_not_finite_ends_the_conversion(tmp_path: Path) -> None:
    config = save_model("olmoe", tmp_path / "source")
    write_gguf("olmoe", config, tensors_of(tmp_path / "source"), tmp_path / "m.gguf", lambda *_: Kind.Q8_0)
    reader = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    damaged = reader["blk.1.attn_output.weight"]
    content = bytearray((tmp_path / "m.gguf").read_bytes())
    second_row = damaged.data_offset + damaged.data.shape[1]
    content[second_row : second_row + 2] = np.float16(np.inf).tobytes()
    (tmp_path / "m.gguf").write_bytes(content)
    with (
        opened_gguf(tmp_path / "m.gguf") as opened,
        pytest.raises(CheckpointError, match=r"m\.gguf: tensor 'blk\.1\.attn_output.*scale at row 1"),
    ):
        convert(opened, plan_checkpoint(opened), tmp_path / "store", bits=4, source_name="x")
    assert not (tmp_path / "store").exists()
