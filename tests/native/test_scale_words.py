"""Scale words of weights of 2 to 4 bits; block_layout.h has their bits."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from moechat import _native

BITS = (2, 3, 4)
MAGNITUDES = st.floats(-12, 11).map(lambda exponent: float(np.float32(2.0**exponent)))


def test_words_are_read_bit_by_bit():
    rng = np.random.default_rng(0)
    words = rng.integers(0, 1 << 32, 1000, dtype=np.uint32)
    steps, factors, offsets = _native.read_scale_words(words)
    exponent, mantissa = (words >> 27).astype(int), words >> 24 & 7
    np.testing.assert_array_equal(steps, 2.0 ** (exponent - 24) * (1 + mantissa / 8))
    np.testing.assert_array_equal(factors, np.stack([words >> 8 & 15, words >> 12 & 15], 1))
    np.testing.assert_array_equal(offsets, np.stack([words & 255, words >> 16 & 255], 1))


def stored(bits: int, scales: list[float], zeros: list[float]) -> tuple[np.ndarray, np.ndarray, float]:
    """Scales and least values [2] as a word holds them, and its step."""
    word = _native.fit_scale_words(bits, np.array([scales], np.float32), np.array([zeros], np.float32))
    steps, factors, offsets = _native.read_scale_words(word)
    return steps[0] * factors[0], -steps[0] * offsets[0], float(steps[0])


@given(
    bits=st.sampled_from(BITS),
    scale=MAGNITUDES,
    ratio=st.floats(0, 1),
    zeros=st.tuples(st.floats(0, 1), st.floats(0, 1)),
    first=st.booleans(),
)
@example(bits=4, scale=1.0, ratio=0.0, zeros=(0.0, 1.0), first=True)
def test_fitted_words_are_close_to_what_was_wanted(bits, scale, ratio, zeros, first):
    """Zeros lie in the range of codes, so both ranges hold 0."""
    top = 2**bits - 1
    wanted = [scale, scale * ratio] if first else [scale * ratio, scale]
    scales, lows, step = stored(bits, wanted, [zero * top for zero in zeros])
    assert step <= scale / 7  # 8 to 15 steps in the larger scale
    for half in range(2):
        assert abs(scales[half] - max(wanted[half], step)) <= 0.51 * step or wanted[half] == 0
        middle = wanted[half] * (0.5 - zeros[half]) * top
        bound = (0.51 if lows[half] else 0.51 + top / 4) * step  # an offset cannot be below 0
        assert abs(lows[half] + scales[half] * top / 2 - middle) <= bound or wanted[half] < step


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("scales", [(0.0, 0.0), (0.0, 0.5), (0.5, 0.0)])
def test_a_half_with_scale_0_has_the_value_0(bits, scales):
    _, lows, _ = stored(bits, list(scales), [0.0, 0.0])
    assert all(low == 0 for low, scale in zip(lows, scales, strict=True) if scale == 0)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("zero", [-20.0, 40.0])
def test_a_range_without_0_is_widened_to_it(bits, zero):
    top = 2**bits - 1
    scales, lows, step = stored(bits, [0.01, 0.01], [zero, zero])
    low, high = -zero * 0.01, (top - zero) * 0.01
    assert np.abs(lows - min(low, 0)).max() <= 8 * step / 15 * 2
    assert np.abs(lows + top * scales - max(high, 0)).max() <= top * step


@pytest.mark.parametrize("bits", BITS)
def test_the_largest_and_least_scales_stay_finite(bits):
    largest = 2 * 4096.0 / (2**bits - 1)  # of weights from -4096 to 4096
    scales, lows, _ = stored(bits, [largest, largest], [(2**bits - 1) / 2] * 2)
    np.testing.assert_allclose(scales, largest, rtol=0.07)
    np.testing.assert_allclose(lows, -4096, rtol=0.07)
    scales, _, step = stored(bits, [1e-30, 0.0], [0.0, 0.0])
    assert step == 2.0**-24
    assert scales[0] == 2.0**-24


@pytest.mark.parametrize(
    ("bits", "scales", "zeros"),
    [
        (8, [[1.0, 1.0]], [[0.0, 0.0]]),
        (4, [[-1.0, 1.0]], [[0.0, 0.0]]),
        (4, [[np.nan, 1.0]], [[0.0, 0.0]]),
        (4, [[1.0, 1.0]], [[0.0, np.inf]]),
        (4, [[1.0]], [[0.0]]),
        (4, [[1.0, 1.0]], [[0.0, 0.0], [0.0, 0.0]]),
    ],
)
def test_scales_that_no_word_can_hold_are_refused(bits, scales, zeros):
    with pytest.raises(ValueError, match=r"bits|scale|zero|shape"):
        _native.fit_scale_words(bits, np.array(scales, np.float32), np.array(zeros, np.float32))
