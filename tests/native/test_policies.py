"""Keys of the eviction policies, against hand-computed examples, direct formulas and a simulated cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moechat import _native
from moechat._native import EvictionPolicy
from moechat.configurator.systems import Policy

NAMES = tuple(_native.policy_names())
NEVER = -1e300


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def access(policy: EvictionPolicy, layer: int, *experts: int) -> None:
    """One token that chooses these experts."""
    policy.access(layer, ints(*experts), np.ones(len(experts), np.int32))


def order(policy: EvictionPolicy, layer: int = 0) -> list[int]:
    """Experts in order of eviction, equal keys by number."""
    return [int(expert) for expert in np.argsort(policy.keys(layer), kind="stable")]


def future_of(tokens: Sequence[Sequence[int]]) -> np.ndarray:
    """One layer's future from the experts of each token."""
    width = max(map(len, tokens))
    rows = [[*experts, *[-1] * (width - len(experts))] for experts in tokens]
    return np.array(rows, np.int32)[:, None, :]


def make(name: str, trace: Sequence[Sequence[int]], experts: int) -> EvictionPolicy:
    ranks = np.linspace(0.0, 1.0, experts)[None, :] if name == "static" else None
    return EvictionPolicy(
        name, 1, experts, omega=8.0, ranks=ranks, future=future_of(trace) if name == "belady" else None
    )


def test_every_policy_is_known_by_name() -> None:
    assert set(NAMES) == set(get_args(Policy))
    for name in NAMES:
        policy = make(name, [[0]], 3)
        assert (policy.name, policy.layers, policy.experts) == (name, 1, 3)
        assert policy.keys(0).shape == (3,)


def test_lcp_keeps_frequent_experts_until_they_have_been_idle_for_long() -> None:
    policy = EvictionPolicy("lcp", 1, 3, omega=2.0, rho=0.25)
    access(policy, 0, 0)  # clock 1
    access(policy, 0, 0)  # 2
    access(policy, 0, 1)  # 3
    # Expert 0: 2 uses, idle for 1 token: 2 * 0.25 ** 0.5 = 1. Expert 1: 1 use, idle for 0: 1.
    keys = policy.keys(0)
    assert keys[0] == pytest.approx(keys[1])
    assert keys[2] == NEVER
    access(policy, 0, 2)  # 4: 2 * 0.25 ** 1 = 0.5, 0.25 ** 0.5 = 0.5, 1
    assert order(policy)[2] == 2
    access(policy, 0, 1)  # 5: 2 * 0.25 ** 1.5 = 0.25, 2, 0.25 ** 0.5 = 0.5
    assert order(policy) == [0, 2, 1]
    assert np.diff(policy.keys(0)[[0, 2, 1]]) == pytest.approx(np.log([2.0, 4.0]))


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=3, unique=True), min_size=1, max_size=60),
    st.floats(0.5, 200.0),
    st.floats(0.05, 0.95),
)
def test_lcp_ranks_as_the_published_formula_does(trace: list[list[int]], omega: float, rho: float) -> None:
    policy = EvictionPolicy("lcp", 1, 7, omega=omega, rho=rho)
    uses, last = np.zeros(7), np.zeros(7)
    for clock, experts in enumerate(trace, 1):
        access(policy, 0, *experts)
        uses[experts] += 1
        last[experts] = clock
        used = np.flatnonzero(uses)
        log_priority = np.log(uses[used]) + (clock - last[used]) / omega * np.log(rho)
        keys = policy.keys(0)
        assert np.isfinite(keys).all()
        # The key is the logarithm of the priority up to a term that all experts share.
        np.testing.assert_allclose(
            keys[used] - keys[used[0]], log_priority - log_priority[0], rtol=1e-9, atol=1e-9
        )
        assert (keys[uses == 0] == NEVER).all()


def test_lru_orders_by_last_use() -> None:
    policy = EvictionPolicy("lru", 1, 4)
    for expert in (2, 0, 1, 2):
        access(policy, 0, expert)
    assert order(policy) == [3, 0, 1, 2]
    assert list(policy.keys(0)[[0, 1, 2]]) == [2.0, 3.0, 4.0]


def test_lru_ranks_experts_of_more_tokens_in_a_pass_as_more_recent() -> None:
    policy = EvictionPolicy("lru", 1, 4)
    access(policy, 0, 3)
    policy.access(0, ints(0, 1, 2), ints(2, 10, 1), pass_tokens=10)
    assert order(policy) == [3, 2, 0, 1]
    assert policy.keys(0)[1] == 11.0
    access(policy, 0, 2)
    assert order(policy) == [3, 0, 1, 2]


def test_lfu_orders_by_uses_and_then_by_last_use() -> None:
    policy = EvictionPolicy("lfu", 1, 4)
    for expert in (0, 0, 1, 2, 2, 1, 0):
        access(policy, 0, expert)
    assert order(policy) == [3, 2, 1, 0]  # 0, 2, 2 and 3 uses; expert 1 was used after expert 2
    policy.access(0, ints(3), ints(4), pass_tokens=4)
    assert order(policy) == [2, 1, 0, 3]


@pytest.mark.parametrize("gamma", [0.5, 0.9, 1.0])
def test_discounted_counts_are_those_of_the_definition(gamma: float) -> None:
    policy = EvictionPolicy("discount", 1, 5, gamma=gamma)
    counts = np.zeros(5)
    rng = np.random.default_rng(3)
    for clock in range(1, 200):
        experts = rng.choice(4, 2, replace=False)
        access(policy, 0, *experts)
        counts *= gamma
        counts[experts] += 1
        used = np.flatnonzero(counts)
        keys = policy.keys(0)
        np.testing.assert_allclose(np.exp(keys[used] + clock * np.log(gamma)), counts[used], rtol=1e-9)
    assert policy.keys(0)[4] == NEVER


def test_a_long_pass_adds_discounted_counts_spread_over_its_tokens() -> None:
    gamma, tokens = 0.8, 6
    policy = EvictionPolicy("discount", 1, 2, gamma=gamma)
    policy.access(0, ints(0, 1), ints(6, 3), pass_tokens=tokens)
    counts = np.exp(policy.keys(0) + tokens * np.log(gamma))
    assert counts[0] == pytest.approx(sum(gamma**i for i in range(tokens)))
    assert counts[1] == pytest.approx(counts[0] / 2)


def test_two_level_lru_evicts_unpredicted_experts_first() -> None:
    policy = EvictionPolicy("two_level_lru", 1, 5)
    for expert in (0, 1, 2, 3):
        access(policy, 0, expert)
    assert order(policy) == [4, 0, 1, 2, 3]
    policy.predict(0, ints(4, 0))  # high: 3 (just used), 0 and 4; low: 1 and 2
    assert order(policy) == [1, 2, 4, 0, 3]
    policy.predict(0, ints(1))  # a new prediction takes the place of the old one
    assert order(policy) == [4, 0, 2, 1, 3]
    access(policy, 0, 2)  # ... which ends with the access that it was made for
    assert order(policy) == [4, 0, 1, 3, 2]


def test_two_level_lru_keeps_used_experts_high_for_the_last_layers_only() -> None:
    policy = EvictionPolicy("two_level_lru", 4, 3, high_span=2)

    def high() -> list[int]:
        return [layer for layer in range(4) if policy.keys(layer)[1] > 1e9]

    seen = []
    for turn in range(8):
        access(policy, turn % 4, 1)
        seen.append(high())
    # Layers 0 and 1 are out of reach of a prediction two layers ahead: they keep theirs for a whole pass.
    assert seen == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 3], [0, 1], [0, 1, 2], [0, 1, 2, 3]]


def test_two_level_lru_follows_the_reach_of_predictions() -> None:
    policy = EvictionPolicy("two_level_lru", 4, 2)
    for layer in range(4):
        access(policy, layer, 1)
    assert all(policy.keys(layer)[1] > 1e9 for layer in range(4))  # a whole pass
    policy.reach(3, 1)
    assert [layer for layer in range(4) if policy.keys(layer)[1] > 1e9] == [0, 3]
    before = [policy.keys(layer)[1] for layer in range(4)]
    access(policy, 0, 1)  # a layer whose experts had become low: the last use is kept
    assert policy.keys(1)[1] == before[1] == 0.5 + 0.5


def test_request_counts_of_the_worked_example() -> None:
    policy = EvictionPolicy("request", 3, 4)
    for _ in range(3):
        access(policy, 0, 0)
    for _ in range(4):
        access(policy, 2, 2)
    # 3 * 1 against 4 * 1/3: the expert of the last layer goes, though it was used more often.
    assert policy.keys(2)[2] < policy.keys(0)[0]
    assert policy.keys(0)[0] == pytest.approx(3)
    assert policy.keys(2)[2] == pytest.approx(4 / 3)
    plain = EvictionPolicy("request", 3, 4, layer_factor=False)
    for _ in range(3):
        access(plain, 0, 0)
    for _ in range(4):
        access(plain, 2, 2)
    assert plain.keys(2)[2] > plain.keys(0)[0]


def test_request_counts_decoded_tokens_of_the_running_request_only() -> None:
    policy = EvictionPolicy("request", 1, 4)
    policy.access(0, ints(3), ints(40), pass_tokens=50)  # a prompt counts as use, not as activations
    access(policy, 0, 0)
    access(policy, 0, 0)
    access(policy, 0, 1)
    assert order(policy) == [2, 3, 1, 0]
    policy.begin_request()
    assert order(policy) == [2, 3, 0, 1]  # by the last use alone
    assert policy.keys(0).max() < 0.5
    access(policy, 0, 2)
    assert order(policy) == [3, 0, 1, 2]


def test_request_raises_what_is_expected_until_the_layer_has_chosen() -> None:
    policy = EvictionPolicy("request", 2, 4)
    access(policy, 0, 0)
    access(policy, 1, 1)
    policy.predict_ahead(ints(1, 1, 0), ints(2, 3, 3))
    assert order(policy, 1) == [0, 1, 2, 3]
    assert policy.keys(1)[2] > 1e9 < policy.keys(1)[3]
    policy.predict_ahead(ints(1), ints(3))  # expert 2 is no longer named, nor layer 0
    assert policy.keys(1)[2] < 1 > policy.keys(0)[3]
    access(policy, 1, 0)  # ruled out
    assert policy.keys(1).max() < 2


def test_map_multiplies_uses_and_the_share_that_was_found() -> None:
    policy = EvictionPolicy("map", 1, 3)
    for expert, uses in ((0, 9), (1, 3)):
        for _ in range(uses):
            access(policy, 0, expert)
    assert order(policy) == [2, 1, 0]  # no map: by uses
    policy.predict_ahead(ints(0, 0), ints(1, 2), np.array([0.5, 0.25], np.float32))
    keys = policy.keys(0)
    assert keys[0] == pytest.approx(1e-3 * 10, rel=1e-6)
    assert keys[1] == pytest.approx((0.5 + 1e-3) * 4, rel=1e-6)
    assert keys[2] == pytest.approx((0.25 + 1e-3) * 1, rel=1e-6)
    access(policy, 0, 2)
    assert policy.keys(0)[2] == pytest.approx(
        (0.25 + 1e-3) * 2, rel=1e-6
    )  # the share stays until the next map
    policy.predict_ahead(ints(0), ints(0), np.array([1.0], np.float32))
    assert order(policy) == [2, 1, 0]


@pytest.mark.parametrize("name", ["discount", "lfu"])
def test_counts_may_begin_anew_with_each_request(name: str) -> None:
    policy = EvictionPolicy(name, 1, 3, gamma=1.0, per_request=True)
    lasting = EvictionPolicy(name, 1, 3, gamma=1.0)
    for each in (policy, lasting):
        for expert in (0, 0, 0, 1):
            access(each, 0, expert)
        each.begin_request()
        access(each, 0, 1)
    assert order(policy) == [0, 2, 1]
    assert order(lasting)[-1] == 0


def test_what_a_request_is_expected_to_use_counts_as_used_once() -> None:
    policy = EvictionPolicy("discount", 1, 4, gamma=1.0, per_request=True)
    access(policy, 0, 0)
    policy.begin_request()
    policy.predict_ahead(ints(0, 0), ints(2, 3))
    access(policy, 0, 1)
    access(policy, 0, 1)
    assert policy.keys(0)[2] == policy.keys(0)[3] == 0  # log 1
    assert order(policy) == [0, 2, 3, 1]


def test_predictions_leave_other_policies_alone() -> None:
    for name in set(NAMES) - {"two_level_lru", "request"}:
        policy = make(name, [[0], [1]], 3)
        access(policy, 0, 0)
        before = policy.keys(0)
        policy.predict(0, ints(2, 1))
        assert (policy.keys(0) == before).all()


def test_static_ranks_never_change() -> None:
    ranks = np.array([[0.5, -1.0, 2.0], [3.0, 2.0, 1.0]])
    policy = EvictionPolicy("static", 2, 3, ranks=ranks)
    access(policy, 0, 1)
    assert (policy.keys(0) == ranks[0]).all()
    assert order(policy, 1) == [2, 1, 0]


def test_belady_evicts_the_expert_with_the_farthest_next_use() -> None:
    policy = EvictionPolicy("belady", 1, 4, future=future_of([[0], [1], [2], [0], [1]]))
    assert list(policy.keys(0)) == [0.0, -1.0, -2.0, NEVER]
    access(policy, 0, 0)
    assert list(policy.keys(0)) == [-3.0, -1.0, -2.0, NEVER]
    policy.access(0, ints(1, 2), ints(1, 1), pass_tokens=2)
    assert list(policy.keys(0)) == [-3.0, -4.0, NEVER, NEVER]
    for _ in range(3):  # beyond the end of the future
        access(policy, 0, 0)
    assert list(policy.keys(0)) == [NEVER] * 4


def test_belady_follows_the_future_whatever_is_accessed() -> None:
    policy = EvictionPolicy("belady", 1, 3, future=future_of([[0, 1], [2], [1]]))
    access(policy, 0, 2)
    assert list(policy.keys(0)) == [NEVER, -2.0, -1.0]


def test_layers_have_clocks_of_their_own() -> None:
    policy = EvictionPolicy("lru", 2, 2)
    for _ in range(3):
        access(policy, 0, 1)
    access(policy, 1, 0)
    assert list(policy.keys(0)) == [NEVER, 3.0]
    assert list(policy.keys(1)) == [1.0, NEVER]


def hits_of(name: str, trace: Sequence[int], experts: int, room: int) -> int:
    """Hits of a cache of ``room`` experts that admits all and evicts the lowest key."""
    policy = make(name, [[expert] for expert in trace], experts)
    cached: set[int] = set()
    hits = 0
    for expert in trace:
        hits += expert in cached
        access(policy, 0, expert)
        if expert not in cached and len(cached) == room:
            keys = policy.keys(0)
            cached.remove(min(cached, key=lambda one: (keys[one], one)))
        cached.add(expert)
    return hits


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(0, 7), min_size=1, max_size=120), st.integers(1, 6))
def test_belady_has_at_least_the_hits_of_every_other_policy(trace: list[int], room: int) -> None:
    bound = hits_of("belady", trace, 8, room)
    for name in NAMES:
        assert hits_of(name, trace, 8, room) <= bound


@pytest.mark.parametrize("name", NAMES)
def test_reset_forgets_and_keys_stay_finite(name: str) -> None:
    rng = np.random.default_rng(5)
    trace = [list(rng.choice(6, 2, replace=False)) for _ in range(50)]
    policy = make(name, trace, 6)
    fresh = policy.keys(0)
    seen = []
    for _ in range(2):
        for experts in trace:
            policy.predict(0, ints(*experts[::-1]))
            access(policy, 0, *experts)
            assert np.isfinite(policy.keys(0)).all()
        seen.append(policy.keys(0))
        policy.reset()
        assert (policy.keys(0) == fresh).all()
    assert (seen[0] == seen[1]).all()


@pytest.mark.parametrize(
    ("values", "names"),
    [
        ({"omega": 1e-300, "rho": 1e-300}, "lcp"),
        ({"omega": 1e300, "rho": 1.0}, "lcp"),
        ({"gamma": 1e-300}, "discount"),
        ({"gamma": 1.0 - 1e-16}, "discount"),
    ],
)
def test_extreme_settings_give_finite_keys(values: dict[str, float], names: str) -> None:
    policy = EvictionPolicy(names, 1, 2, **values)
    for tokens in (1, 1, 1_000_000, 1):
        policy.access(0, ints(0), ints(tokens), pass_tokens=tokens)
        assert np.isfinite(policy.keys(0)).all()
    access(policy, 0, 1)
    assert np.isfinite(policy.keys(0)).all()


@pytest.mark.parametrize(
    ("name", "values", "field"),
    [
        ("random", {}, "name is 'random'"),
        ("lcp", {"layers": 0}, "layers is 0"),
        ("lcp", {"experts": 0}, "experts is 0"),
        ("lcp", {"omega": 0.0}, "omega"),
        ("lcp", {"omega": float("nan")}, "omega"),
        ("lcp", {"rho": 0.0}, "rho"),
        ("lcp", {"rho": 1.5}, "rho"),
        ("discount", {"gamma": 0.0}, "gamma"),
        ("static", {}, "ranks has 0 values"),
        ("static", {"ranks": np.zeros((2, 2))}, "ranks"),
        ("static", {"ranks": np.full((1, 2), np.inf)}, "ranks"),
        ("belady", {}, "future has 0 values"),
        ("belady", {"future": np.full((1, 1, 1), 2, np.int32)}, "expert 2"),
        ("belady", {"future": np.zeros((1, 2, 1), np.int32)}, "future has shape"),
    ],
)
def test_impossible_settings_are_refused_by_name(name: str, values: dict[str, object], field: str) -> None:
    arguments = {"layers": 1, "experts": 2} | values
    with pytest.raises(ValueError, match=field):
        EvictionPolicy(name, **arguments)


def test_impossible_accesses_are_refused() -> None:
    policy = EvictionPolicy("lru", 1, 2)
    with pytest.raises(IndexError, match="expert is 2"):
        access(policy, 0, 2)
    with pytest.raises(IndexError, match="layer is 1"):
        access(policy, 1, 0)
    with pytest.raises(ValueError, match="tokens holds 0"):
        policy.access(0, ints(0), ints(0))
    with pytest.raises(ValueError, match="dtype int64"):
        policy.access(0, np.array([0]), ints(1))
    assert (policy.keys(0) == NEVER).all()
