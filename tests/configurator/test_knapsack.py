from __future__ import annotations

from itertools import product

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from moechat.configurator.knapsack import choose


@st.composite
def problems(draw):
    layers, options = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    sizes = np.concatenate(
        [[0], np.cumsum(draw(st.lists(st.integers(1, 9), min_size=options, max_size=options)))]
    )
    drops = draw(
        st.lists(
            st.lists(st.sampled_from([0.0, 0.1, 1.0, 2.5, 7.0]), min_size=options, max_size=options),
            min_size=layers,
            max_size=layers,
        )
    )
    costs = 30.0 - np.concatenate([np.zeros((layers, 1)), np.cumsum(drops, axis=1)], axis=1)
    return costs, sizes.astype(np.int64), draw(st.integers(0, int(sizes[-1]) * layers + 2))


def least(costs, sizes, budget):
    return min(
        sum(costs[i, o] for i, o in enumerate(picks))
        for picks in product(range(len(sizes)), repeat=len(costs))
        if sum(sizes[o] for o in picks) <= budget
    )


@settings(max_examples=80, deadline=None)
@given(problems())
def test_exact(problem):
    costs, sizes, budget = problem
    found = choose(costs, sizes, budget)
    assert sizes[found.picks].sum() <= budget
    assert abs(costs[np.arange(len(costs)), found.picks].sum() - found.cost) < 1e-9
    assert abs(found.cost - least(costs, sizes, budget)) < 1e-9


@settings(max_examples=60, deadline=None)
@given(problems())
def test_without_dynamic_programming_the_bound_holds(problem):
    costs, sizes, budget = problem
    found = choose(costs, sizes, budget, work=0)
    best = least(costs, sizes, budget)
    assert sizes[found.picks].sum() <= budget
    assert found.bound <= best + 1e-9 <= found.cost + 2e-9


def test_dynamic_programming_finds_solutions_that_no_price_gives():
    # Two layers, budget 5. At any price they take 0, or 4 and 4; the best is 2 and 3.
    sizes = np.array([0, 2, 3, 4])
    costs = np.array([[10.0, 6.0, 5.9, 1.0], [10.0, 9.9, 4.0, 1.0]])
    found = choose(costs, sizes, 5)
    assert sizes[found.picks].tolist() == [2, 3]
    assert found.cost == found.bound == 10.0
