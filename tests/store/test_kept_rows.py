"""Quantised matrices rewritten in encodings of GGUF files have the same values, by the gguf package."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType as Kind

from moechat.store.quantised.codes import Codes
from moechat.store.quantised.kept_rows import encoded_rows, symmetric_encoding

ROWS, COLUMNS = 6, 128
KINDS = {"q4_0": Kind.Q4_0, "q8_0": Kind.Q8_0, "mxfp4": Kind.MXFP4}


def integers(bits: int, group: tuple[int, int], *, zero: int | None = None) -> Codes:
    rng = np.random.default_rng(bits)
    codes = rng.integers(0, 1 << bits, (ROWS, COLUMNS), dtype=np.uint8)
    grid = (-(-ROWS // group[0]), -(-COLUMNS // group[1]))
    scale = rng.standard_normal(grid).astype(np.float16).astype(np.float32)
    middle = np.full(grid, (1 << (bits - 1)) if zero is None else zero, np.float32)
    return Codes("affine", bits, codes, scale, group, middle)


def exponents() -> Codes:
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 16, (ROWS, COLUMNS), dtype=np.uint8)
    scale = np.ldexp(np.float32(1), rng.integers(-120, 120, (ROWS, COLUMNS // 32))).astype(np.float32)
    return Codes("e2m1", 4, codes, scale, (1, 32))


@pytest.mark.parametrize(
    ("encoding", "codes"),
    [
        ("q4_0", integers(4, (1, 32))),
        ("q4_0", integers(4, (1, COLUMNS))),
        ("q8_0", integers(8, (1, 64))),
        ("q8_0", integers(8, (ROWS, COLUMNS))),
        ("mxfp4", exponents()),
    ],
)
def test_the_values_are_those_of_the_codes(encoding: str, codes: Codes) -> None:
    rows = encoded_rows(codes, encoding)
    assert np.array_equal(gguf.dequantize(rows, KINDS[encoding]), codes.values())


def test_what_an_encoding_cannot_hold_is_refused() -> None:
    with pytest.raises(ValueError, match="a zero is not 8"):
        encoded_rows(integers(4, (1, 32), zero=7), "q4_0")
    turned = integers(4, (1, 32))
    order = np.arange(COLUMNS) % 4
    with pytest.raises(ValueError, match="not in the order of their groups"):
        encoded_rows(Codes("affine", 4, turned.codes, turned.scale, (1, 32), turned.zero, order), "q4_0")
    fine = integers(8, (1, 32))
    for scale in (np.float32(1 + 2**-12), np.float32(1e6), np.float32(np.nan)):
        wrong = np.full_like(fine.scale, scale)
        with pytest.raises(ValueError, match="is not exact in fp16"):
            encoded_rows(Codes("affine", 8, fine.codes, wrong, (1, 32), fine.zero), "q8_0")
    powers = exponents()
    with pytest.raises(ValueError, match="no power of two"):
        encoded_rows(Codes("e2m1", 4, powers.codes, powers.scale * np.float32(3), (1, 32)), "mxfp4")


def test_only_short_scales_of_whole_blocks_are_kept() -> None:
    assert symmetric_encoding(4, 128, 256, "BF16") == "q4_0"
    assert symmetric_encoding(8, 32, 256, "F16") == "q8_0"
    assert symmetric_encoding(4, 16, 256, "BF16") is None
    assert symmetric_encoding(4, 32, 48, "BF16") is None
    assert symmetric_encoding(4, 128, 256, "F32") is None
    assert symmetric_encoding(2, 128, 256, "BF16") is None
