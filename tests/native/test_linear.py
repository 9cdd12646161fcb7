"""Quantised matrices outside the experts."""

from __future__ import annotations

import numpy as np
import pytest
from integer_model import linear_codes
from kept_support import DENSE_ENCODINGS, file_rows, values
from native_support import from_bf16, relative_error, to_bf16

from moechat import _native

BITS = (2, 3, 4, 6, 8)
# Relative error of random matrices against float64 on the same codes, with inputs of 16 and 8 bits.
BOUNDS = {16: 5e-5, 8: 1.5e-2, 32: 2e-6}


@pytest.fixture(autouse=True)
def _keep_threads():
    before = _native.num_threads()
    yield
    _native.set_num_threads(before)


def packed(rows: int, cols: int, bits: int, seed: int = 0) -> tuple[_native.LinearLayout, np.ndarray]:
    weights = np.random.default_rng(seed).standard_normal((rows, cols)).astype(np.float32)
    layout = _native.LinearLayout(rows, cols, bits)
    return layout, _native.pack_linear(layout, weights)


def kept(layout: _native.LinearLayout, rows: np.ndarray) -> np.ndarray:
    data = np.full(layout.nbytes, 0xA5, np.uint8)
    _native.pack_kept_linear(layout, rows, data)
    return data


def forward(
    layout: _native.LinearLayout,
    data: np.ndarray,
    x: np.ndarray,
    bias: np.ndarray | None = None,
    activation_bits: int = 16,
) -> np.ndarray:
    out = np.full((len(x), layout.rows), np.nan, np.float32)
    _native.linear_forward(layout, data, x, bias, out, activation_bits)
    return out


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (16, 64), (17, 65), (100, 300), (512, 128)])
def test_products_match_float64_within_the_stated_bounds(bits, rows, cols):
    layout, data = packed(rows, cols, bits)
    rng = np.random.default_rng(1)
    weights = _native.unpack_linear(layout, data).astype(np.float64)
    for tokens in (1, 2, 3, 5, 8, 33):
        x = rng.standard_normal((tokens, cols)).astype(np.float32)
        bias = rng.standard_normal(rows).astype(np.float32)
        for activation_bits, bound in BOUNDS.items():
            for b in (None, bias):
                truth = x.astype(np.float64) @ weights.T + (0 if b is None else b)
                # Where a sum cancels, the error is relative to its terms.
                size = np.abs(x).astype(np.float64) @ np.abs(weights).T + (0 if b is None else np.abs(b))
                error = np.abs(forward(layout, data, x, b, activation_bits) - truth)
                assert (error <= bound * size).all()


@pytest.mark.parametrize("bits", BITS)
def test_packing_gives_the_codes_of_the_experts_solver(bits):
    rows, cols = 64, 192
    weights = (np.random.default_rng(0).standard_normal((rows, cols)) * 0.1).astype(np.float32)
    layout = _native.LinearLayout(rows, cols, bits)
    block = _native.BlockLayout(cols, rows, bits)
    records = np.empty((block.blocks, block.record_bytes), np.uint8)
    _native.pack_expert(block, weights, weights, weights.T.copy(), None, records)
    data = _native.pack_linear(layout, weights)
    assert np.array_equal(data[: layout.sz], records[0, block.gate_q : block.up_q])
    assert np.array_equal(data[layout.sz :], records[0, block.gate_sz : block.up_sz])
    values = linear_codes(layout, data).values()
    assert np.allclose(values, _native.unpack_linear(layout, data), rtol=1e-6, atol=1e-7)
    assert relative_error(values, weights) < {2: 0.5, 3: 0.25, 4: 0.12, 6: 0.03, 8: 0.01}[bits]


def test_sources_of_all_types_and_strides_pack_alike():
    layout = _native.LinearLayout(40, 100, 4)
    patterns = to_bf16(np.random.default_rng(0).standard_normal((40, 100)))
    weights = from_bf16(patterns)
    expected = _native.pack_linear(layout, weights)
    assert expected.ctypes.data % 64 == 0
    assert np.array_equal(_native.pack_linear(layout, patterns), expected)
    assert np.array_equal(_native.pack_linear(layout, np.asfortranarray(weights), threads=1), expected)
    half = weights.astype(np.float16)
    assert np.array_equal(
        _native.pack_linear(layout, half), _native.pack_linear(layout, half.astype(np.float32))
    )


@pytest.mark.parametrize("activation_bits", [8, 16, 32])
@pytest.mark.parametrize("bits", BITS)
def test_rows_of_the_output_depend_on_their_token_only(bits, activation_bits):
    layout, data = packed(700, 200, bits)
    x = np.random.default_rng(1).standard_normal((11, 200)).astype(np.float32)
    _native.set_num_threads(1)
    expected = forward(layout, data, x, None, activation_bits)
    for threads in (1, 2, 3, 5):
        _native.set_num_threads(threads)
        assert np.array_equal(forward(layout, data, x, None, activation_bits), expected)
        for token in (0, 4, 10):
            alone = forward(layout, data, x[token : token + 1], None, activation_bits)
            assert np.array_equal(alone[0], expected[token])


def test_unaligned_data_gives_the_same_result():
    layout, data = packed(100, 200, 4)
    x = np.random.default_rng(1).standard_normal((2, 200)).astype(np.float32)
    askew = np.empty(layout.nbytes + 1, np.uint8)[1:]
    askew[:] = data
    assert np.array_equal(forward(layout, askew, x), forward(layout, data, x))


def test_nan_reaches_the_rows_of_its_token():
    layout, data = packed(50, 130, 4)
    x = np.random.default_rng(1).standard_normal((3, 130)).astype(np.float32)
    x[1, 3] = np.nan
    out = forward(layout, data, x)
    assert np.isnan(out[1]).all()
    assert np.isfinite(out[[0, 2]]).all()


def test_no_tokens_is_no_work():
    layout, data = packed(50, 130, 4)
    assert forward(layout, data, np.empty((0, 130), np.float32)).shape == (0, 50)


def test_refusals_name_the_argument():
    for rows, cols, bits, words in (
        (0, 64, 4, "is 0; it must be between 1"),
        (64, 1 << 21, 4, "is 2097152; it must be between 1"),
        (64, 64, 5, "5 bits are not supported"),
        (64, 64, 16, "16 bits are not supported"),
    ):
        with pytest.raises(ValueError, match=words):
            _native.LinearLayout(rows, cols, bits)
    layout, data = packed(50, 130, 4)
    x = np.zeros((2, 130), np.float32)
    with pytest.raises(ValueError, match="data has shape"):
        forward(layout, data[:-1], x)
    with pytest.raises(ValueError, match=r"x has shape \[2, 129\]"):
        forward(layout, data, np.zeros((2, 129), np.float32))
    with pytest.raises(ValueError, match=r"bias has shape \[49\]; it must be \[50\]"):
        forward(layout, data, x, np.zeros(49, np.float32))
    with pytest.raises(ValueError, match="activations of 9 bits"):
        forward(layout, data, x, None, 9)
    square, packed_square = packed(130, 130, 4)
    with pytest.raises(ValueError, match="out overlaps x"):
        _native.linear_forward(square, packed_square, x, None, x)
    one = np.zeros((1, 130), np.float32)
    with pytest.raises(ValueError, match="out overlaps bias"):
        _native.linear_forward(square, packed_square, one, x[0], x[:1])
    weights = packed_square[: 130 * 4].view(np.float32).reshape(1, 130)
    with pytest.raises(ValueError, match="out overlaps data"):
        _native.linear_forward(square, packed_square, one, None, weights)
    bad = np.zeros((50, 130), np.float32)
    bad[7, 9] = np.inf
    with pytest.raises(ValueError, match="matrix weight at row 7, column 9 is inf: not finite"):
        _native.pack_linear(layout, bad)
    with pytest.raises(ValueError, match="threads is -1"):
        _native.pack_linear(layout, bad, -1)


@pytest.mark.parametrize("encoding", DENSE_ENCODINGS)
def test_kept_matrices_have_the_values_of_the_file_bit_by_bit(encoding):
    rng = np.random.default_rng(3)
    columns = {32: 160, 64: 192, 256: 512}[_native.kept_encodings()[encoding][1]]
    source = file_rows(rng, encoding, 2 * 37, columns)[::2]
    layout = _native.LinearLayout(37, columns, encoding)
    assert layout.encoding == encoding
    data = kept(layout, source)
    expected = values(encoding, source)
    np.testing.assert_array_equal(_native.unpack_linear(layout, data), expected)
    x = rng.standard_normal((3, columns)).astype(np.float32)
    askew = np.empty(layout.nbytes + 1, np.uint8)[1:]
    askew[:] = data
    np.testing.assert_array_equal(forward(layout, askew, x), forward(layout, data, x))


def test_kept_matrices_refuse_what_they_cannot_hold():
    layout = _native.LinearLayout(20, 64, "q8_0")
    rows = file_rows(np.random.default_rng(0), "q8_0", 20, 64)
    with pytest.raises(ValueError, match=r"cols is 80; this encoding has blocks of 32 columns"):
        _native.LinearLayout(4, 80, "q8_0")
    with pytest.raises(ValueError, match='encoding "q9" is unknown'):
        _native.LinearLayout(4, 64, "q9")
    with pytest.raises(ValueError, match=r"rows must be uint8 \[20, 68\]"):
        kept(layout, rows[1:])
    with pytest.raises(ValueError, match="keeps the values of files"):
        _native.pack_linear(layout, np.zeros((20, 64), np.float32))
    with pytest.raises(ValueError, match="does not keep the values of files"):
        kept(_native.LinearLayout(20, 64, 4), rows)
    _native.check_file_rows("q8_0", rows)
    rows[11, 35] = 0x7C  # the scale of columns 32 to 63: infinite
    rows[11, 34] = 0
    with pytest.raises(ValueError, match="matrix scale at row 11, columns 0 to 63 is not finite"):
        kept(layout, rows)
    with pytest.raises(ValueError, match="rows scale at row 11, columns 0 to 63 is not finite"):
        _native.check_file_rows("q8_0", rows)
