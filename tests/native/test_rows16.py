import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from native_support import from_bf16, run_isa, to_bf16

from moechat import _native

MOST = _native.ROWS16_MAX_TOKENS


@pytest.fixture(autouse=True)
def _keep_threads():
    before = _native.num_threads()
    yield
    _native.set_num_threads(before)


def matrices(seed, tokens, rows, cols, fp16):
    """Bit patterns, their values, inputs, bias."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((rows, cols)).astype(np.float32)
    if fp16:
        words = values.astype(np.float16).view(np.uint16)
        values = words.view(np.float16).astype(np.float32)
    else:
        words = to_bf16(values)
        values = from_bf16(words)
    x = rng.standard_normal((tokens, cols)).astype(np.float32)
    return words, values, x, rng.standard_normal(rows).astype(np.float32)


def product(words, fp16, x, bias):
    out = np.full((len(x), len(words)), np.nan, np.float32)
    _native.rows16_forward(words, fp16, x, bias, out)
    return out


def check_against_float64():
    """Run in a child for each instruction set."""
    for fp16 in (False, True):
        for rows, cols in ((1, 1), (3, 31), (16, 32), (17, 33), (40, 64), (5, 2050)):
            for tokens in (1, 2, 3, 4, 7, 8, 9, MOST):
                words, values, x, bias = matrices(rows * cols, tokens, rows, cols, fp16)
                expected = x.astype(np.float64) @ values.T.astype(np.float64)
                size = np.abs(x).astype(np.float64) @ np.abs(values).T.astype(np.float64) + 1
                for b in (bias, None):
                    error = np.abs(product(words, fp16, x, b) - expected - (0 if b is None else b))
                    assert (error / size).max() < 3e-7, (fp16, rows, cols, tokens)


@pytest.mark.parametrize("isa", _native.available_isas())
def test_products_match_a_float64_reference_on_every_instruction_set(isa):
    done = run_isa("import test_rows16; test_rows16.check_against_float64()", isa)
    assert done.returncode == 0, done.stderr


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    fp16=st.booleans(),
    tokens=st.integers(1, MOST),
    rows=st.integers(1, 300),
    cols=st.integers(1, 400),
    threads=st.integers(1, 4),
)
def test_bits_do_not_depend_on_threads_or_other_tokens(seed, fp16, tokens, rows, cols, threads):
    words, _, x, bias = matrices(seed, tokens, rows, cols, fp16)
    _native.set_num_threads(1)
    expected = product(words, fp16, x, bias)
    _native.set_num_threads(threads)
    assert np.array_equal(expected, product(words, fp16, x, bias))
    token = seed % tokens
    assert np.array_equal(expected[token : token + 1], product(words, fp16, x[token : token + 1], bias))


def test_bits_do_not_depend_on_threads_where_all_of_them_have_work():
    words, _, x, bias = matrices(3, 5, 3000, 500, False)
    _native.set_num_threads(1)
    expected = product(words, False, x, bias)
    for threads in (2, 3, 5):
        _native.set_num_threads(threads)
        for _ in range(10):
            assert np.array_equal(expected, product(words, False, x, bias))


@pytest.mark.parametrize("fp16", [False, True])
def test_special_values_reach_the_output(fp16):
    words, _, x, _ = matrices(1, 2, 20, 40, fp16)
    x[1, 5] = np.nan
    clean = product(words, fp16, x[:1], None)
    out = product(words, fp16, x, None)
    assert np.array_equal(out[:1], clean)
    assert np.isnan(out[1]).all()
    x[1, 5] = np.inf
    assert not np.isfinite(product(words, fp16, x, None)[1]).any()


def test_subnormal_fp16_weights_count():
    words = np.full((16, 32), 1, np.uint16)  # 2^-24
    x = np.full((1, 32), 2.0**24, np.float32)
    assert (product(words, True, x, None) == 32).all()


def test_no_byte_beyond_the_matrix_is_read():
    words = np.full((3, 37), 0x7FC0, np.uint16)  # NaN around a matrix of ones
    inner = np.ascontiguousarray(np.full((1, 37), 0x3F80, np.uint16))
    words[1] = inner
    out = np.empty((1, 1), np.float32)
    _native.rows16_forward(words[1:2], False, np.ones((1, 37), np.float32), None, out)
    assert out[0, 0] == 37


def test_no_tokens_are_no_work():
    words, _, x, _ = matrices(1, 1, 4, 8, False)
    assert product(words, False, x[:0], None).shape == (0, 4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": np.zeros((MOST + 1, 8), np.float32), "out": np.zeros((MOST + 1, 4), np.float32)}, "at most"),
        ({"x": np.zeros((1, 9), np.float32)}, r"x has shape \[1, 9\]"),
        ({"x": np.zeros((1, 8))}, "x has dtype float64"),
        ({"weights": np.zeros((4, 8), np.int16)}, "weights has dtype int16"),
        ({"weights": np.zeros((4, 16), np.uint16)[:, ::2]}, "weights is not C-contiguous"),
        ({"bias": np.zeros(5, np.float32)}, "bias has shape"),
        ({"out": np.zeros((1, 5), np.float32)}, "out has shape"),
        ({"weights": np.zeros(8, np.uint16)}, "dimensions"),
    ],
)
def test_wrong_arrays_are_refused(change, message):
    arguments = {
        "weights": np.zeros((4, 8), np.uint16),
        "is_fp16": False,
        "x": np.zeros((1, 8), np.float32),
        "bias": None,
        "out": np.zeros((1, 4), np.float32),
    }
    with pytest.raises(ValueError, match=message):
        _native.rows16_forward(**{**arguments, **change})


def test_an_output_over_an_input_is_refused():
    x = np.zeros((4, 4), np.float32)
    with pytest.raises(ValueError, match="out overlaps x"):
        _native.rows16_forward(np.zeros((4, 4), np.uint16), False, x, None, x)
    out = np.zeros((4, 4), np.float32)
    out.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        _native.rows16_forward(np.zeros((4, 4), np.uint16), False, x, None, out)
