"""Tests of the comparison of ways to run at equal hardness."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moechat.trials import Comparison, Gap


def compared(
    ratio: float,
    *,
    tokens: int = 32,
    harder: float = 0.0,
    noise: float = 0.05,
    slope: float = 0.02,
    seed: int = 0,
    base: float = 0.05,
) -> Comparison:
    """A reference and a rival in turns of eight tokens.

    Args:
        ratio: Time of the rival's tokens, divided by the reference's at equal hardness.
        tokens: Tokens of each.
        harder: How much harder the rival's tokens are on average; the reference's have 40.
        noise: Standard deviation of the tokens' logarithms at equal hardness.
        slope: How much longer a token takes for each unit of hardness.
        seed: Random seed.
        base: Seconds of a token of hardness 0.
    """
    random = np.random.default_rng(seed)
    found = Comparison()
    for token in range(2 * tokens):
        rival = token // 8 % 2 == 1
        hardness = max(0.0, random.normal(40, 10)) + (harder if rival else 0.0)
        seconds = base * (1 + slope * hardness) * (ratio if rival else 1.0)
        found.add("rival" if rival else "reference", seconds * math.exp(noise * random.normal()), hardness)
    return found


def gap_of(comparison: Comparison) -> Gap:
    found = comparison.gap("rival", "reference")
    assert found is not None
    return found


@pytest.mark.parametrize("ratio", [0.7, 0.9, 1.0, 1.1, 1.5])
def test_the_ratio_is_recovered_from_noisy_tokens(ratio: float) -> None:
    found = gap_of(compared(ratio, tokens=64))
    assert found.share == pytest.approx(ratio - 1, abs=0.03)
    assert abs(found.share - (ratio - 1)) < 3 * found.error


@pytest.mark.parametrize("harder", [-10.0, 10.0])
def test_ways_are_compared_at_equal_hardness(harder: float) -> None:
    comparison = compared(0.9, tokens=64, harder=harder)
    # Without regard to hardness the tokens differ by another 11 %.
    plain = comparison.seconds("rival") / comparison.seconds("reference") - 1
    assert abs(plain + 0.1) > 0.07
    assert gap_of(comparison).share == pytest.approx(-0.1, abs=0.03)


@given(
    ratio=st.floats(0.5, 1.8),
    harder=st.floats(-8, 8),
    noise=st.floats(0.0, 0.08),
    slope=st.floats(0.0, 0.04),
    base=st.floats(1e-4, 10.0),
    seed=st.integers(0, 1 << 20),
)
def test_the_gap_is_within_five_errors_of_the_truth(
    ratio: float, harder: float, noise: float, slope: float, base: float, seed: int
) -> None:
    found = gap_of(compared(ratio, tokens=48, harder=harder, noise=noise, slope=slope, base=base, seed=seed))
    # One slope serves both ways, so what differs in hardness is a little off where they differ in speed.
    crooked = abs(ratio - 1) * slope * abs(harder) / 2
    assert abs(found.share - (ratio - 1)) < 5 * found.error + crooked
    assert 0 < found.error < 0.1


@pytest.mark.parametrize("tokens", [8, 16, 64])
def test_the_error_covers_the_truth_about_as_often_as_it_says(tokens: int) -> None:
    gaps = [gap_of(compared(1.1, tokens=tokens, noise=0.08, seed=seed)) for seed in range(300)]
    errors = np.array([(gap.share - 0.1) / gap.error for gap in gaps])
    assert abs(errors.mean()) < 0.15
    # Larger than for independent tokens, by the factor 1.5.
    assert 0.55 < errors.std() < 0.9
    assert np.mean(np.abs(errors) < 1) > 0.68
    assert np.mean(np.abs(errors) < 2) > 0.95


def test_the_error_covers_the_truth_where_neighbours_share_a_disturbance() -> None:
    errors = []
    for seed in range(300):
        random, comparison, drift = np.random.default_rng(seed), Comparison(), 0.0
        for token in range(64):
            drift = 0.5 * drift + math.sqrt(0.75) * 0.08 * random.normal()
            comparison.add("rival" if token // 8 % 2 else "reference", math.exp(drift), 0.0)
        gap = gap_of(comparison)
        errors.append(gap.share / gap.error)
    assert np.mean(np.abs(errors) < 1) > 0.55
    assert np.mean(np.abs(errors) < 2) > 0.88


@pytest.mark.parametrize("way", ["rival", "reference"])
def test_a_disturbed_token_hardly_changes_the_gap(way: str) -> None:
    calm, disturbed = compared(1.0, tokens=64), compared(1.0, tokens=64)
    disturbed.add(way, 100 * calm.seconds(way), 40.0)
    # As it is, the token would change the gap by 150 %.
    assert abs(gap_of(disturbed).share - gap_of(calm).share) < 0.03


def test_a_disturbed_token_makes_the_gap_less_sure() -> None:
    calm, disturbed = compared(1.0), compared(1.0)
    disturbed.add("rival", 100 * calm.seconds("rival"), 40.0)
    assert gap_of(disturbed).error > 1.3 * gap_of(calm).error


def test_more_tokens_make_the_gap_surer() -> None:
    few, many = (gap_of(compared(0.9, tokens=tokens)).error for tokens in (8, 64))
    assert many == pytest.approx(few * math.sqrt(8 / 64), rel=0.35)


def test_a_few_equal_tokens_are_not_taken_to_be_exact() -> None:
    comparison = Comparison()
    for way in ("reference", "rival"):
        for _ in range(3):
            comparison.add(way, 1.0, 10.0)
    assert gap_of(comparison).share == 0
    assert gap_of(comparison).error > 0.05


def test_there_is_no_gap_without_tokens_of_both() -> None:
    comparison = Comparison()
    assert comparison.gap("rival", "reference") is None
    comparison.add("rival", 1.0, 1.0)
    assert comparison.gap("rival", "reference") is None
    assert comparison.gap("reference", "rival") is None
    assert comparison.gap("rival", "rival") is None
    comparison.add("reference", 1.0, 1.0)
    assert comparison.gap("rival", "reference") is not None


def test_tokens_and_seconds_are_counted_by_way() -> None:
    comparison = Comparison()
    assert (comparison.tokens("one"), comparison.seconds("one")) == (0, 0.0)
    for seconds in (1.0, 2.0):
        comparison.add("one", seconds, 1.0)
    comparison.add("other", 3.0, 1.0)
    assert (comparison.tokens("one"), comparison.seconds("one")) == (2, 1.5)
    assert (comparison.tokens("other"), comparison.seconds("other")) == (1, 3.0)


def test_a_token_is_expected_to_take_longer_where_it_is_harder() -> None:
    comparison = compared(1.2, tokens=64, noise=0.02)
    for hardness in (20.0, 40.0, 60.0):
        expected = 0.05 * (1 + 0.02 * hardness)
        assert comparison.expected("reference", hardness) == pytest.approx(expected, rel=0.06)
    assert comparison.expected("reference", -1e6) > 0


def test_easier_tokens_that_take_longer_give_no_negative_slope() -> None:
    comparison = Comparison()
    for hardness, seconds in ((1.0, 4.0), (2.0, 3.0), (3.0, 2.0), (4.0, 1.0)):
        comparison.add("one", seconds, hardness)
    assert comparison.expected("one", 1.0) == comparison.expected("one", 4.0) == 2.5


def test_sure_means_so_many_errors() -> None:
    gap = Gap(-0.1, 0.04)
    assert gap.surely_below(0.0, 2.0)
    assert not gap.surely_below(0.0, 3.0)
    assert gap.surely_above(-0.2, 2.0)
    assert not gap.surely_above(-0.2, 3.0)
