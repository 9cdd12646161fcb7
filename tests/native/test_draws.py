"""Drawn routing and rankings: the distributions that they are said to have, and refused input."""

from __future__ import annotations

import os
import signal
import threading
from itertools import permutations

import numpy as np
import pytest

from moechat import _native

WEIGHTS = np.array([[8.0, 4.0, 2.0, 1.0, 1.0]])


def pair_chances(weights: np.ndarray) -> dict[tuple[int, int], float]:
    """Probability of each ordered pair that is drawn without replacement."""
    share = weights / weights.sum()
    return {(i, j): share[i] * share[j] / (1 - share[i]) for i, j in permutations(range(len(weights)), 2)}


def assert_frequencies(drawn: np.ndarray, chances: dict[tuple[int, int], float]) -> None:
    pairs, counts = np.unique(drawn, axis=0, return_counts=True)
    seen = {tuple(pair): count / len(drawn) for pair, count in zip(pairs.tolist(), counts, strict=True)}
    for pair, chance in chances.items():
        error = 5 * np.sqrt(chance * (1 - chance) / len(drawn))
        assert seen.get(pair, 0.0) == pytest.approx(chance, abs=error), pair


def places(experts: np.ndarray, number: int) -> np.ndarray:
    """Places in the order of last use of experts ``[tokens, k]``; -1 before all have been seen."""
    order: list[int] = []
    found = np.full(experts.shape, -1)
    for token, chosen in enumerate(experts.tolist()):
        if len(order) == number:
            found[token] = [order.index(expert) for expert in chosen]
        front = [each for each in order if each in chosen]
        front += [each for each in chosen if each not in front]
        order = front + [each for each in order if each not in chosen]
    return found


def test_places_of_last_use_are_drawn_without_replacement_by_weight() -> None:
    drawn = _native.draw_routing(WEIGHTS, 2, 60_000, 3)[:, 0]
    seen = places(drawn, 5)
    assert_frequencies(seen[seen[:, 0] >= 0], pair_chances(WEIGHTS[0]))


@pytest.mark.parametrize("heavy", [1e6, 1e15])
def test_what_hardly_weighs_anything_is_still_drawn_when_the_rest_is_taken(heavy: float) -> None:
    weights = np.array([[heavy, 1.0, 3.0]])
    drawn = _native.draw_routing(weights, 2, 40_000, 1)[:, 0]
    seen = places(drawn, 3)
    seen = seen[seen[:, 0] >= 0]
    assert (seen.min(axis=1) == 0).mean() > 0.99
    assert (seen == 2).any(axis=1).mean() == pytest.approx(0.75, abs=0.02)


def test_more_tokens_begin_with_the_same_ones_and_layers_are_independent() -> None:
    weights = np.tile(WEIGHTS, (3, 1))
    short, long = (_native.draw_routing(weights, 2, tokens, 7) for tokens in (10, 500))
    assert np.array_equal(short, long[:10])
    assert not np.array_equal(long[:, 0], long[:, 1])
    assert not np.array_equal(long, _native.draw_routing(weights, 2, 500, 8))
    assert _native.draw_routing(weights, 5, 0, 0).shape == (0, 3, 5)
    everyone = _native.draw_routing(weights, 5, 20, 0)
    assert (np.sort(everyone, axis=-1) == np.arange(5)).all()


def rankings(
    tokens: int,
    right: list[float],
    width: int,
    weights: list[float] | None = None,
    popularity: np.ndarray = WEIGHTS,
    first_token: int = 0,
) -> np.ndarray:
    """Rankings ``[tokens, width]`` of one layer whose tokens all chose experts 0 and 1 of five."""
    chosen = np.tile(np.array([[[0, 1]]], dtype=np.int32), (tokens, 1, 1))
    given = None if weights is None else np.tile(np.array([[weights]], dtype=np.float32), (tokens, 1, 1))
    table = np.array([right], dtype=np.float64)
    return _native.draw_rankings(chosen, given, table, popularity, width, 5, 0, first_token)[:, 0]


def test_wrong_experts_are_drawn_without_replacement_by_popularity() -> None:
    drawn = rankings(60_000, [0.0, 0.0, 0.0, 1.0, 1.0], 2)
    chances = pair_chances(WEIGHTS[0, 2:])
    assert_frequencies(drawn, {(i + 2, j + 2): chance for (i, j), chance in chances.items()})


def test_right_experts_come_by_weight_squared() -> None:
    drawn = rankings(60_000, [1.0] * 5, 2, weights=[3.0, 1.0])
    assert (np.sort(drawn, axis=1) == [0, 1]).all()
    assert (drawn[:, 0] == 0).mean() == pytest.approx(0.9, abs=0.006)


def test_ranks_are_right_with_their_probabilities_and_all_chosen_experts_are_ranked() -> None:
    drawn = rankings(60_000, [0.7, 0.2, 0.5, 0.25, 0.5], 5)
    assert (np.sort(drawn, axis=1) == np.arange(5)).all()
    right = np.isin(drawn, [0, 1])
    assert right.sum(axis=1).tolist() == [2] * 60_000
    assert right[:, :2].mean(axis=0) == pytest.approx([0.7, 0.2], abs=0.01)
    # Beyond rank k the table has the chance of each chosen expert that is left. At rank 3 it is 0.5, so
    # one of two is certain.
    left = 2 - right[:, :2].sum(axis=1)
    assert right[left == 1, 2].mean() == pytest.approx(0.5, abs=0.01)
    assert right[left == 2, 2].all()
    # At rank 4 it is 0.25.
    late = right[(left == 1) & ~right[:, 2]]
    assert late[:, 3].mean() == pytest.approx(0.25, abs=0.015)


def test_rows_depend_on_their_number_in_the_whole_trace_alone() -> None:
    right = [0.5, 0.5, 0.5, 0.5, 0.5]
    whole = rankings(300, right, 5)
    assert np.array_equal(whole[100:], rankings(200, right, 5, first_token=100))
    assert np.array_equal(whole[:, :3], rankings(300, right, 3))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weights": WEIGHTS.astype(np.float32)}, "dtype"),
        ({"weights": -WEIGHTS}, "weights must be positive"),
        ({"weights": WEIGHTS * np.nan}, "weights must be positive"),
        ({"weights": WEIGHTS * np.inf}, "weights must be positive"),
        ({"weights": WEIGHTS[0]}, r"\[layers, experts\]"),
        ({"weights": WEIGHTS[:, :0]}, r"\[layers, experts\]"),
        ({"top_k": 0}, "top_k is 0; it must be 1 to 5"),
        ({"top_k": 6}, "top_k is 6"),
        ({"tokens": -1}, "negative"),
    ],
)
def test_wrong_weights_and_counts_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _native.draw_routing(**({"weights": WEIGHTS, "top_k": 2, "tokens": 3, "seed": 0} | change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"experts": np.zeros((4, 1, 2), dtype=np.int32)}, "twice"),
        ({"experts": np.array([[[0, 5]]], dtype=np.int32)}, "expert 5; there are 5"),
        ({"experts": np.array([[[0, -1]]], dtype=np.int32)}, "expert -1"),
        ({"experts": np.zeros((1, 2, 1), dtype=np.int32)}, "shape"),
        ({"experts": np.zeros((1, 1, 6), dtype=np.int32)}, "at most 5"),
        ({"weights": np.zeros((1, 1, 2), dtype=np.float32)}, "weights must be positive"),
        ({"weights": np.ones((1, 1, 3), dtype=np.float32)}, "weights has shape"),
        ({"right": np.ones((1, 4))}, "right has shape"),
        ({"popularity": 0 * WEIGHTS}, "popularity must be positive"),
        ({"width": 0}, "width is 0; it must be 1 to 5"),
        ({"width": 6}, "width is 6"),
        ({"first_token": -1}, "negative"),
    ],
)
def test_wrong_inputs_of_rankings_are_refused(change: dict[str, object], message: str) -> None:
    inputs = {
        "experts": np.array([[[0, 1]]], dtype=np.int32),
        "weights": None,
        "right": np.ones((1, 5)),
        "popularity": WEIGHTS,
        "width": 2,
        "seed": 0,
        "stream": 0,
        "first_token": 0,
    }
    with pytest.raises(ValueError, match=message):
        _native.draw_rankings(**(inputs | change))


def test_a_long_drawing_ends_at_ctrl_c() -> None:
    timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            _native.draw_routing(np.ones((32, 512)), 1, 1_000_000, 0)
    finally:
        timer.join()
