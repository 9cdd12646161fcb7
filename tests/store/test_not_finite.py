"""Values that are no numbers: refused at conversion, by the name of their tensor."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from store_support import mixtral_plan, overwrite, write_mixtral

from moechat.errors import CheckpointError
from moechat.store.checkpoint import Checkpoint
from moechat.store.convert import convert
from moechat.store.quantised.codes import Codes
from moechat.store.quantised.kept_rows import encoded_rows

EXPERT = "model.layers.1.block_sparse_moe.experts.2.w2.weight"
# All bits set: NaN in every float type. The others: infinity, in the order of the bytes.
PATTERNS = {
    "BF16": (b"\xff", b"\x80\x7f"),
    "F16": (b"\xff", b"\x00\x7c"),
    "F32": (b"\xff", b"\x00\x00\x80\x7f"),
}


def source(directory: Path, dtype: str) -> Path:
    return write_mixtral(directory, layers=2, experts=3, hidden=72, intermediate=100, dtype=dtype)


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
@pytest.mark.parametrize("bits", [2, 4, 6, 8, 16])
def test_experts_that_are_not_finite_are_refused_with_every_number_of_bits(
    tmp_path: Path, dtype: str, bits: int
) -> None:
    for number, pattern in enumerate(PATTERNS[dtype]):
        path = source(tmp_path / f"m{number}", dtype)
        overwrite(path / "model.safetensors", EXPERT, pattern)
        checkpoint = Checkpoint.open(path)
        with pytest.raises(
            CheckpointError, match=r"expert 2, down weight at row 0, column 0 is .*: not finite"
        ) as e:
            convert(checkpoint, mixtral_plan(checkpoint), tmp_path / "s", bits=bits, source_name="m")
        assert f"model.safetensors: tensor '{EXPERT}'" in str(e.value)
        assert e.value.exit_code == 3


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
@pytest.mark.parametrize("key", ["model.embed_tokens.weight", "model.layers.0.input_layernorm.weight"])
def test_dense_weights_that_are_not_finite_are_refused(tmp_path: Path, dtype: str, key: str) -> None:
    for number, pattern in enumerate(PATTERNS[dtype]):
        path = source(tmp_path / f"m{number}", dtype)
        overwrite(path / "model.safetensors", key, pattern)
        checkpoint = Checkpoint.open(path)
        with pytest.raises(CheckpointError, match=rf"tensor '{key}' has values that are not finite"):
            convert(checkpoint, mixtral_plan(checkpoint), tmp_path / "s", bits=4, source_name="m")


@pytest.mark.parametrize("place", [0, 1, 71, 99 * 72, 100 * 72 - 1])
@pytest.mark.parametrize("dtype", ["BF16", "F16"])
def test_one_value_anywhere_in_an_expert_of_16_bits_is_found(tmp_path: Path, place: int, dtype: str) -> None:
    path = source(tmp_path / "m", dtype)
    key = "model.layers.0.block_sparse_moe.experts.0.w1.weight"
    checkpoint = Checkpoint.open(path)
    array = checkpoint.array(key)
    offset = array.ctypes.data - checkpoint.tensors.file_of(key).array(key).ctypes.data + 2 * place
    start = checkpoint.tensors.file_of(key).tensors[key].start
    with open(path / "model.safetensors", "r+b") as file:
        file.seek(start + offset)
        file.write(b"\xff\xff")
    checkpoint = Checkpoint.open(path)
    row, column = divmod(place, 72)
    with pytest.raises(
        CheckpointError, match=rf"gate weight at row {row}, column {column} is .*nan: not finite"
    ):
        convert(checkpoint, mixtral_plan(checkpoint), tmp_path / "s", bits=16, source_name="m")


def test_the_largest_numbers_of_a_type_are_kept_in_16_bits(tmp_path: Path) -> None:
    for dtype, pattern in (
        ("BF16", b"\x7f\x7f"),
        ("F16", b"\xff\x7b"),
        ("BF16", b"\x7f\xff"),
        ("F16", b"\xff\xfb"),
    ):
        path = source(tmp_path / f"{dtype}{pattern[1]}", dtype)
        overwrite(path / "model.safetensors", EXPERT, pattern)
        checkpoint = Checkpoint.open(path)
        destination = tmp_path / f"s{dtype}{pattern[1]}"
        store = convert(checkpoint, mixtral_plan(checkpoint), destination, bits=16, source_name="m")
        assert pattern * 36 in store.expert_layer(1)[2].tobytes()


@pytest.mark.parametrize("scale", [np.nan, np.inf, -np.inf, 3e38])
def test_scales_whose_values_are_not_finite_are_refused(scale: float) -> None:
    codes = Codes(
        kind="affine",
        bits=4,
        codes=np.full((1, 64), 15, np.uint8),
        scale=np.array([[scale]], np.float32),
        zero=None,
        group=(1, 64),
    )
    for encoding in ("int4", "int8", "fp8"):
        with pytest.raises(ValueError, match=r"finite|mantissa"):
            encoded_rows(codes, encoding)
