"""Measuring: misses of a hard cache against a plain dictionary, and entropies."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moechat.tune.measure import Measurement, capacities_of, entropy_bits, hard_misses


def slow_misses(chosen: list[list[int]], capacity: int, gamma: float) -> int:
    """Exact counts as fractions of powers: an expert's uses, by age."""
    uses: dict[int, list[int]] = {}
    misses = 0
    for token, request in enumerate(chosen):

        def count(expert: int, token: int = token) -> float:
            return sum(gamma ** (token - 1 - t) for t in uses[expert])

        held = sorted(uses, key=lambda expert: (-count(expert), expert))[:capacity]
        misses += sum(expert not in held for expert in request)
        for expert in request:
            uses.setdefault(expert, []).append(token)
    return misses


@settings(deadline=None, max_examples=80)
@given(
    seed=st.integers(0, 999),
    tokens=st.integers(1, 25),
    gamma=st.sampled_from([0.5, 1.0]),  # exact in floating point
    capacity=st.integers(1, 8),
)
def test_misses_are_those_of_a_plain_cache(seed: int, tokens: int, gamma: float, capacity: int) -> None:
    rng = np.random.default_rng(seed)
    chosen = np.stack([[rng.permutation(8)[:2] for _ in range(tokens)] for _ in range(3)])
    expected = sum(slow_misses(layer.tolist(), capacity, gamma) for layer in chosen)
    assert hard_misses(chosen, 8, [capacity], gamma).tolist() == [expected]


def test_a_cache_for_all_experts_misses_each_of_them_once() -> None:
    chosen = np.array([[[0, 1], [2, 3], [0, 3], [1, 2]]])
    assert hard_misses(chosen, 4, [4, 2], 0.9).tolist() == [4, 7]


def test_an_expert_used_long_ago_stays_ahead_of_an_unused_one() -> None:
    chosen = np.array([[[0]] + [[1]] * 400 + [[0]]])
    assert hard_misses(chosen, 4, [2], 0.1).tolist() == [2]


def test_entropies_are_those_of_shares() -> None:
    counts = np.array([[1, 1, 1, 1], [5, 0, 0, 0], [0, 0, 0, 0], [2, 2, 0, 0]], float)
    assert entropy_bits(counts).tolist() == pytest.approx([2, 0, 0, 1])


def test_a_measurement_survives_json() -> None:
    import json

    found = Measurement(3.5, {4: 1.25, 8: 0.5}, 2.0, 3.0)
    assert Measurement.of_facts(json.loads(json.dumps(found.facts()))) == found


def test_capacities_are_a_quarter_and_a_half() -> None:
    assert capacities_of(16) == (4, 8)
    assert capacities_of(2) == (1,)
