"""The curve m against values computed by hand, and the effect of settings on statistics."""

from __future__ import annotations

import numpy as np
import pytest
from configurator_support import curves, drawn, statistics
from hypothesis import given
from hypothesis import strategies as st

from moechat.configurator.curves import (
    RoutingCurves,
    amount,
    cached_at,
    prefetch_sizes,
    two_outcomes,
)
from moechat.configurator.systems import CacheSettings
from moechat.routing.statistics import RoutingStatistics

# K = 2, N = 4. With C = 2 and θ = 0.5 prefetches take 1 - 0.8·0.5 = 0.6, 1 - 0.4·0.5 = 0.8,
# 1 - 0.1·0.5 = 0.95 loads (equation 9) and bring 0.6·0.9 = 0.54, 0.8·0.5 = 0.4, 0.95·0.2 = 0.19 activated
# experts (equation 10).
LAYER = curves(
    [[0.4, 0.6, 0.9, 1.0]],
    [[0.9, 0.5, 0.2]],
    [[[0.5, 0.8, 0.9, 1.0], [0.3, 0.4, 0.6, 1.0], [0.1, 0.1, 0.5, 1.0]]],
    top_k=2,
)


@pytest.mark.parametrize(
    ("window", "loaded"),
    [
        (0.0, 0.6),  # 2 · 0.6 · 0.5
        (0.6, 0.6 + 0.54),
        (1.0, 0.6 + 0.54 + 0.4 * 0.5),  # the second one is half done
        (1.4, 0.6 + 0.54 + 0.4),
        (9.9, 0.6 + 0.54 + 0.4 + 0.19),
    ],
)
def test_equations_9_to_11(window, loaded):
    assert LAYER.loaded(0, 2, 0.5, window) == pytest.approx(loaded)


def test_never_more_than_k_are_loaded():
    # 2 · 0.9 + 0.1 · 0.9 + 0.4 · 0.5 + 0.5 · 0.2 = 2.19
    assert LAYER.loaded(0, 3, 1.0, 9.0) == 2.0


def test_nothing_cached_is_prefetched_whole():
    assert LAYER.loaded(0, 0, 0.0, 1.5) == pytest.approx(0.9 + 0.5 * 0.5)


def test_arrays_equal_the_results_of_single_layers():
    counted = RoutingCurves.of(drawn(1, 5, 8, 3), CacheSettings(), 3)
    theta = np.linspace(0.1, 1, 8)
    found = amount(
        3,
        counted.hit[:, 1:],
        counted.accuracy.T[:, :, None],
        prefetch_sizes(counted.cached.transpose(1, 0, 2)[:, :, 1:], theta),
        theta,
        np.array([0.0, 0.4, 1.0, 2.3, 50.0])[:, None],
    )
    for layer, window in enumerate((0.0, 0.4, 1.0, 2.3, 50.0)):
        for place, share in enumerate(theta.tolist()):
            assert found[layer, place] == pytest.approx(counted.loaded(layer, place + 1, share, window))


def test_prefetches_are_those_that_the_settings_allow():
    counted = drawn(2, 3, 8, 2, depth=5)
    assert RoutingCurves.of(counted, CacheSettings(), 2).depth == 2
    assert RoutingCurves.of(counted, CacheSettings(prefetch_experts=4), 2).depth == 4
    assert RoutingCurves.of(counted, CacheSettings(prefetch_experts=8), 2).depth == 5  # as many as counted
    assert RoutingCurves.of(counted, CacheSettings(prefetch="none"), 2).depth == 0
    layer = RoutingCurves.of(counted, CacheSettings(prefetch="whole-layer"), 2)
    assert layer.accuracy == pytest.approx(np.full((3, 8), 0.25))
    perfect = RoutingCurves.of(counted, CacheSettings(prefetch="perfect"), 2)
    assert perfect.accuracy.tolist() == [[1.0, 1.0]] * 3
    assert (perfect.cached == perfect.hit[:, None, :]).all()
    # All that is needed and not cached comes in K·(1 - H) loads.
    assert perfect.loaded(0, 3, 1.0, 2 * (1 - perfect.hit[0, 3])) == pytest.approx(2.0)


def test_without_counts_experts_are_random_and_nothing_is_predicted():
    nothing = np.zeros((2, 4), dtype=np.int64)
    empty = RoutingStatistics(
        "lcp", 2, 0, np.zeros(2, np.int64), nothing, nothing, nothing[:, :2], np.zeros((2, 2, 4), np.int64)
    )
    found = RoutingCurves.of(empty, CacheSettings(), 2)
    assert found.hit.tolist() == [[0, 0.25, 0.5, 0.75, 1]] * 2
    assert found.loaded(1, 2, 1.0, 100.0) == 1.0


def test_one_layer_without_counts_does_not_disturb_the_others():
    counted = statistics([[0.7, 1.0], [0.7, 1.0]])
    counted.ranks[0] = 0
    assert RoutingCurves.of(counted, CacheSettings(), 1).hit.tolist() == [[0, 0.5, 1], [0, 0.7, 1]]


def test_top_k_above_the_number_of_experts_is_limited():
    assert RoutingCurves.of(drawn(0, 1, 3, 1), CacheSettings(), 9).top_k == 3
    with pytest.raises(ValueError, match="top_k is 0"):
        RoutingCurves.of(drawn(0, 1, 3, 1), CacheSettings(), 0)


def test_two_outcomes_by_hand():
    # K = 1: a miss with 0.3, a hit with 0.7.
    shares, weights = two_outcomes(np.array([0.7]), 1)
    assert shares[:, 0] == pytest.approx([0.0, 1.0])
    assert weights[:, 0] == pytest.approx([0.3, 0.7])
    # K = 4, H = 0.5: symmetric; half the hits and half of that spread: sqrt(0.25 / 4) = 0.25.
    shares, weights = two_outcomes(np.array([0.5]), 4)
    assert shares[:, 0] == pytest.approx([0.25, 0.75])
    assert weights[:, 0] == pytest.approx([0.5, 0.5])


@given(st.floats(0, 1), st.integers(1, 16))
def test_two_outcomes_have_the_moments_of_the_binomial(hit, top_k):
    shares, weights = two_outcomes(np.array([hit]), top_k)
    assert ((shares >= 0) & (shares <= 1)).all()
    assert weights.sum() == pytest.approx(1.0)
    assert (weights >= 0).all()
    mean, variance = hit, hit * (1 - hit) / top_k
    assert (weights * shares).sum() == pytest.approx(mean, abs=1e-9)
    assert (weights * (shares - mean) ** 2).sum() == pytest.approx(variance, abs=1e-9)
    third = variance / top_k * (1 - 2 * hit)
    assert (weights * (shares - mean) ** 3).sum() == pytest.approx(third, abs=1e-9)


@given(st.floats(0, 1), st.floats(0, 1), st.integers(1, 16))
def test_predicted_experts_are_cached_as_often_as_before_on_average(hit, cached, top_k):
    hits, cache = np.array([hit]), np.array([cached])
    shares, weights = two_outcomes(hits, top_k)
    found = cached_at(cache, hits, shares)
    assert ((found >= 0) & (found <= 1)).all()
    if 1e-9 < hit < 1 - 1e-9:
        assert (weights * found).sum() == pytest.approx(cached, abs=1e-6)
