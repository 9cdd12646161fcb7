"""Drawn predictions: as accurate as requested, most certain first, and the same for the same seed."""

from __future__ import annotations

import numpy as np
import pytest

from moechat.configurator.warm_start import default_statistics
from moechat.routing.drawn_predictions import draw_rankings, rank_accuracy
from moechat.routing.trace import Trace
from moechat.simulate.shared_draws import drawn_rankings, drawn_routing

TOKENS, LAYERS, EXPERTS, K = 1500, 3, 24, 4
# The demo model's layers 2 to 7 (scripts/bench/predictions): accuracy, and how often each rank is right.
DEMO = {
    (2, 0.778): (0.95, 0.606, 0.209, 0.096, 0.052),
    (4, 0.783): (0.987, 0.881, 0.727, 0.538, 0.321, 0.199, 0.124, 0.086),
    (6, 0.814): (0.996, 0.957, 0.898, 0.808, 0.696, 0.532, 0.39, 0.263),
}


def made(weights: bool = False, experts: int = EXPERTS, k: int = K) -> Trace:
    """Experts of falling popularity, with weights that fall by place."""
    generator = np.random.default_rng(3)
    keys = -0.1 * np.arange(experts) + generator.gumbel(size=(TOKENS, LAYERS, experts))
    chosen = np.argsort(-keys, axis=-1)[..., :k].astype(np.int32)
    shares = np.broadcast_to(0.5 ** np.arange(1, k + 1), chosen.shape).astype(np.float16)
    return Trace(chosen, np.array([0, TOKENS]), experts, shares if weights else None)


def right_by_rank(trace: Trace, rankings: np.ndarray) -> np.ndarray:
    """Share of right experts: ``[layers, ranks]``."""
    return (rankings[..., :, None] == trace.experts[..., None, :]).any(axis=-1).mean(axis=0)


def found(trace: Trace, rankings: np.ndarray) -> np.ndarray:
    """Which chosen experts are in the top k: ``[tokens, layers, k]``."""
    return (trace.experts[..., :, None] == rankings[..., None, : trace.top_k]).any(axis=-1)


@pytest.mark.parametrize("weights", [False, True])
def test_each_layer_is_as_accurate_as_requested_and_right_ranks_come_first(weights: bool) -> None:
    trace, accuracy = made(weights), np.array([0.4, 0.7, 0.9])
    drawn = draw_rankings(trace, accuracy, width=2 * K)[0]
    error = 4 * np.sqrt(accuracy * (1 - accuracy) / (TOKENS * K))
    assert (np.abs(found(trace, drawn).mean(axis=(0, 2)) - accuracy) < error).all()
    right = right_by_rank(trace, drawn)
    assert (np.diff(right, axis=1) < 0.01).all()
    assert right == pytest.approx(rank_accuracy(accuracy, EXPERTS, K)[:, : 2 * K], abs=0.05)


@pytest.mark.parametrize("key", DEMO)
def test_ranks_are_right_as_often_as_those_of_a_real_router(key: tuple[int, float]) -> None:
    (k, accuracy), measured = key, DEMO[key]
    expected = rank_accuracy(np.array([accuracy]), 16, k)[0]
    assert expected[: len(measured)] == pytest.approx(measured, abs=0.06)


@pytest.mark.parametrize(("experts", "k"), [(8, 2), (16, 1), (128, 8), (512, 10), (6, 5)])
def test_probabilities_of_ranks_keep_both_sums(experts: int, k: int) -> None:
    accuracy = np.linspace(0, 1, 41)
    expected = rank_accuracy(accuracy, experts, k)
    assert expected.min() >= 0
    assert expected.max() <= 1
    better = accuracy >= k / experts
    assert (np.diff(expected[better], axis=1) < 1e-9).all()
    assert expected[:, :k].sum(axis=1) == pytest.approx(accuracy * k, rel=0.01)
    possible = accuracy * k >= 2 * k - experts  # else the other ranks are too few
    assert expected[possible].sum(axis=1) == pytest.approx(k, rel=0.01)


def test_experts_with_large_weights_are_found_most_often_and_ranked_first() -> None:
    trace, accuracy = made(weights=True), np.full(LAYERS, 0.7)
    drawn = draw_rankings(trace, accuracy, width=K)[0]
    by_place = found(trace, drawn).mean(axis=(0, 1))
    assert (np.diff(by_place) < -0.03).all()
    assert by_place.mean() == pytest.approx(0.7, abs=0.01)
    first = (drawn[..., 0] == trace.experts[..., 0]).mean()
    assert first > 2 * (drawn[..., 0] == trace.experts[..., 1]).mean()
    # Without weights, places make no difference.
    alike = made()
    places = found(alike, draw_rankings(alike, accuracy, width=K)[0]).mean(axis=(0, 1))
    assert places == pytest.approx(np.full(K, 0.7), abs=0.03)


def test_certain_and_impossible_predictions_are_exact() -> None:
    trace = made()
    assert found(trace, draw_rankings(trace, np.ones(LAYERS), width=K)[0]).all()
    wide = draw_rankings(trace, np.zeros(LAYERS), width=EXPERTS)[0]
    assert not found(trace, wide).any()
    assert (np.sort(wide, axis=-1) == np.arange(EXPERTS)).all()
    # Only one expert of five is not chosen.
    few = made(experts=5, k=4)
    assert (found(few, draw_rankings(few, np.zeros(LAYERS), width=4)[0]).sum(axis=-1) == 3).all()
    everyone = made(experts=4, k=4)
    assert found(everyone, draw_rankings(everyone, np.zeros(LAYERS), width=4)[0]).all()


@pytest.mark.parametrize("width", [1, K, K + 3, EXPERTS])
def test_a_seed_gives_the_same_draws_at_every_width_and_lookahead(width: int) -> None:
    trace, accuracy = made(weights=True), np.full(LAYERS, 0.6)
    usual = draw_rankings(trace, accuracy, width=K, lookahead=3, seed=5)
    other = draw_rankings(trace, accuracy, width=width, lookahead=2, seed=5)
    assert other.shape == (2, TOKENS, LAYERS, width)
    shared = min(width, K)
    assert np.array_equal(other[..., :shared], usual[:2, ..., :shared])
    assert (np.diff(np.sort(other, axis=-1), axis=-1) > 0).all()  # none twice
    assert not np.array_equal(usual, draw_rankings(trace, accuracy, width=K, lookahead=3, seed=6))
    assert not np.array_equal(usual[0], usual[1])


def test_given_probabilities_of_ranks_are_followed() -> None:
    trace = made()
    given = np.array([[0.2, 0.9, 0.5, 0.4, 0.3, 0.2]]).repeat(LAYERS, axis=0)
    drawn = draw_rankings(trace, given, width=10, lookahead=2)
    right = right_by_rank(trace, drawn[0]).mean(axis=0)
    assert right[:6] == pytest.approx(given[0], abs=0.03)
    # The rest of the sum 4 goes to the 18 other ranks.
    assert right[6:] == pytest.approx(np.full(4, 1.5 / 18), abs=0.02)
    assert right_by_rank(trace, drawn[1]).mean(axis=0)[:4] == pytest.approx(0.85 * given[0, :4], abs=0.03)


def test_draws_for_statistics_are_right_at_each_rank_as_often_as_counted() -> None:
    statistics = default_statistics("gpt_oss", 6, 32, 4)
    trace = drawn_routing(statistics, 1500)
    right = right_by_rank(trace, drawn_rankings(statistics, trace, width=8, lookahead=1)[0])
    assert right == pytest.approx(statistics.prediction_accuracy, abs=0.06)
