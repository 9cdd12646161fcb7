"""Quantised matrices rewritten in encodings that a store keeps have the same values: by the gguf package, or
as the native code reads them.
"""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType as Kind
from kept_support import FINITE_E4M3

from moechat import _native
from moechat.store.quantised.codes import Codes
from moechat.store.quantised.kept_rows import encoded_rows, integer_encodings
from moechat.store.quantised.number_formats import E4M3, rounded

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


def in_groups(bits: int, group: int, *, in_bf16: bool) -> Codes:
    """Integers with any zeros and with scales below the range of fp16, or with subnormal ones of fp16."""
    rng = np.random.default_rng(group)
    codes = rng.integers(0, 1 << bits, (ROWS, COLUMNS), dtype=np.uint8)
    grid = (ROWS, COLUMNS // group)
    scale = (rng.standard_normal(grid) * (1e-20 if in_bf16 else 1e-6)).astype(np.float32)
    short = rounded(scale, "BF16").astype(np.uint32) << 16 if in_bf16 else scale.astype(np.float16)
    scale = short.view(np.float32) if in_bf16 else short.astype(np.float32)
    zero = rng.integers(0, 1 << bits, grid).astype(np.float32)
    return Codes("affine", bits, codes, scale, (1, group), zero)


@pytest.mark.parametrize("in_bf16", [True, False])
@pytest.mark.parametrize(
    ("encoding", "bits", "group"), [("int4", 4, 64), ("int4", 4, 128), ("int4_32", 4, 32), ("int4_32", 4, 64)]
)
def test_integers_have_any_zero_and_any_short_scale(
    encoding: str, bits: int, group: int, in_bf16: bool
) -> None:
    for name, wide in ((encoding, bits), (encoding.replace("4", "8", 1), 8)):
        codes = in_groups(wide, group, in_bf16=in_bf16)
        out = np.empty((ROWS, COLUMNS), np.float32)
        _native.decode_file_rows(name, encoded_rows(codes, name), out)
        assert np.array_equal(out, codes.values())


def nvfp4() -> Codes:
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 16, (ROWS, COLUMNS), dtype=np.uint8)
    patterns = rng.integers(0, 127, (ROWS, COLUMNS // 16), dtype=np.uint8)
    factor = np.float32(0.00123)
    return Codes("e2m1", 4, codes, E4M3[patterns] * factor, (1, 16), parts=(patterns, factor))


def test_values_of_nvfp4_differ_by_rounding_to_float32_at_most() -> None:
    codes = nvfp4()
    out = np.empty((ROWS, COLUMNS), np.float32)
    _native.decode_file_rows("nvfp4", encoded_rows(codes, "nvfp4"), out)
    np.testing.assert_allclose(out, codes.values(), rtol=2**-19, atol=0)


def fp8(group: tuple[int, int], scale: float = 1e-3) -> Codes:
    rng = np.random.default_rng(0)
    codes = rng.choice(FINITE_E4M3, (ROWS, COLUMNS))
    grid = (-(-ROWS // group[0]), -(-COLUMNS // group[1]))
    return Codes("e4m3", 8, codes, (rng.standard_normal(grid) * scale).astype(np.float32), group)


@pytest.mark.parametrize("group", [(4, 64), (ROWS, COLUMNS), (1, COLUMNS), (1, 64)])
def test_values_of_fp8_are_exact_with_any_scale(group: tuple[int, int]) -> None:
    codes = fp8(group)
    out = np.empty((ROWS, COLUMNS), np.float32)
    _native.decode_file_rows("fp8", encoded_rows(codes, "fp8"), out)
    assert np.array_equal(out, codes.values())


def test_values_of_fp8_that_are_not_finite_are_refused() -> None:
    damaged = fp8((4, 64))
    damaged.codes[2, 3] = 0xFF
    for codes in (damaged, fp8((4, 64), 1e38)):
        with pytest.raises(ValueError, match="a value is not finite"):
            encoded_rows(codes, "fp8")


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
    for name, block in (("int8", 64), ("int8_32", 32)):
        fine = integers(8, (1, block))
        long = np.full_like(fine.scale, 1 + 2**-16)
        with pytest.raises(ValueError, match="is not exact in 16 bits"):
            encoded_rows(Codes("affine", 8, fine.codes, long, (1, block), fine.zero), name)
        for zero in (-1, 256):
            with pytest.raises(ValueError, match="a zero is not within 0 to 255"):
                encoded_rows(integers(8, (1, block), zero=zero), name)
    with pytest.raises(ValueError, match="not those of NVFP4"):
        encoded_rows(exponents(), "nvfp4")
    endless = nvfp4()
    endless.scale[1, 1] = np.inf
    with pytest.raises(ValueError, match="a scale is not finite"):
        encoded_rows(endless, "nvfp4")
    powers = exponents()
    with pytest.raises(ValueError, match="no power of two"):
        encoded_rows(Codes("e2m1", 4, powers.codes, powers.scale * np.float32(3), (1, 32)), "mxfp4")


@pytest.mark.parametrize(
    ("bits", "group", "columns", "scale", "symmetric", "expected"),
    [
        (4, 128, 256, "BF16", True, ("int4", "int4")),
        (4, 128, 256, "F16", False, ("int4", "int4")),
        (8, 192, 192, "F16", False, ("int8", "int8")),
        (4, 32, 256, "BF16", True, ("q4_0", "int4_32")),
        (8, 32, 256, "F16", True, ("q8_0", "int8_32")),
        (4, 96, 192, "F16", False, ("int4_32", "int4_32")),
        (8, 96, 96, "F16", False, ("int8_32", "int8_32")),
        (4, 16, 256, "BF16", True, (None, None)),
        (4, 32, 48, "BF16", True, (None, None)),
        (4, 128, 256, "F32", True, (None, None)),
        (2, 128, 256, "BF16", True, (None, None)),
    ],
)
def test_only_short_scales_of_whole_blocks_are_kept(
    bits: int, group: int, columns: int, scale: str, symmetric: bool, expected: tuple[str | None, str | None]
) -> None:
    assert integer_encodings(bits, group, columns, scale, symmetric=symmetric) == expected
