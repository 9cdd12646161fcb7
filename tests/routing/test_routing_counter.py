"""Counts of ranks, hits and predictions equal those of a plain model and of a real cache."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moechat import _native
from moechat.errors import UsageError
from moechat.routing import RoutingCounter, RoutingStatistics, Trace, rankings, statistics_of_trace

POLICIES = [name for name in _native.policy_names() if name != "belady"]  # which needs the future


def policy_of(name: str, layers: int, experts: int) -> _native.EvictionPolicy:
    ranks = np.tile(np.arange(experts) % 3.0, (layers, 1)) if name == "static" else None
    return _native.EvictionPolicy(name, layers, experts, ranks=ranks)


@dataclass
class Model:
    """The counter in plain Python, with a separate cache for every number of experts."""

    policy: _native.EvictionPolicy
    top_k: int

    def __post_init__(self) -> None:
        layers, experts = self.policy.layers, self.policy.experts
        self.statistics = RoutingStatistics.zero(self.policy.name, layers, experts, self.top_k)
        self.seen = [0] * layers
        self.cached: list[list[set[int]]] = [[] for _ in range(layers)]

    def begin(self, layer: int) -> None:
        """Before its first access a layer holds the experts with the highest keys."""
        if not self.cached[layer]:
            everything = set(range(self.policy.experts))
            self.cached[layer] = [self.best(layer, everything, size) for size in range(len(everything) + 1)]

    def best(self, layer: int, among: set[int], count: int) -> set[int]:
        keys = self.policy.keys(layer)
        return set(sorted(among, key=lambda expert: (keys[expert], expert), reverse=True)[:count])

    def rank(self, layer: int, expert: int) -> int:
        return sum(expert not in cached for cached in self.cached[layer]) - 1

    def run(
        self,
        experts: npt.NDArray[np.int32],
        predictions: npt.NDArray[np.int32] | None,
        passes: list[int],
    ) -> None:
        token = 0
        for size in passes:
            for layer in range(self.policy.layers):
                chosen, tokens = np.unique(experts[token : token + size, layer], return_counts=True)
                if size == 1:
                    ranked = None if predictions is None else predictions[token, layer]
                    self.count(layer, chosen, ranked)
                self.begin(layer)
                self.policy.access(layer, chosen, tokens.astype(np.int32), size)
                for count, cached in enumerate(self.cached[layer]):
                    self.cached[layer][count] = self.best(layer, cached | set(chosen.tolist()), count)
            token += size

    def count(self, layer: int, chosen: npt.NDArray[np.int32], ranked: npt.NDArray[np.int32] | None) -> None:
        counts = self.statistics
        self.seen[layer] += 1
        if ranked is not None:
            self.policy.predict(layer, np.ascontiguousarray(ranked[: self.top_k]))
            counts.predicted[layer] += 1
        self.begin(layer)
        if ranked is not None:
            for place, expert in enumerate(ranked[: counts.depth]):
                counts.hits_of_prediction[layer, place] += expert in chosen
                counts.ranks_of_prediction[layer, place, self.rank(layer, int(expert))] += 1
        for expert in chosen:
            counts.activations[layer, expert] += 1
            counts.ranks[layer, self.rank(layer, int(expert))] += 1


def assert_same(one: RoutingStatistics, other: RoutingStatistics) -> None:
    for name in ("predicted", "activations", "ranks", "hits_of_prediction", "ranks_of_prediction"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name), err_msg=name)


@st.composite
def routings(draw: st.DrawFn) -> tuple[int, npt.NDArray[np.int32], npt.NDArray[np.int32] | None, list[int]]:
    experts = draw(st.integers(1, 40))
    top_k = draw(st.integers(1, min(5, experts)))
    layers = draw(st.integers(1, 3))
    passes = draw(st.lists(st.sampled_from([1, 1, 1, 1, 2, 5]), min_size=1, max_size=25))
    generator = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    # A few popular experts, so that there are both hits and ties.
    weights = generator.gumbel(size=(sum(passes), layers, experts)) + 2 * (np.arange(experts) % 4 == 0)
    chosen = np.argsort(-weights, axis=-1)[..., :top_k].astype(np.int32)
    predictions = None
    if draw(st.booleans()):
        width = draw(st.integers(1, experts))
        noisy = weights + generator.gumbel(size=weights.shape)
        predictions = np.argsort(-noisy, axis=-1)[..., :width].astype(np.int32)
    return experts, chosen, predictions, passes


@settings(max_examples=150, deadline=None)
@given(routing=routings(), name=st.sampled_from(POLICIES))
def test_counts_equal_those_of_a_reference_in_python(
    routing: tuple[int, npt.NDArray[np.int32], npt.NDArray[np.int32] | None, list[int]], name: str
) -> None:
    experts, chosen, predictions, passes = routing
    layers, top_k = chosen.shape[1:]
    model = Model(policy_of(name, layers, experts), top_k)
    model.run(chosen, predictions, passes)
    counter = RoutingCounter(policy_of(name, layers, experts), top_k)
    cut = passes[: len(passes) // 2]
    tokens = sum(cut)
    for part, sizes in ((slice(None, tokens), cut), (slice(tokens, None), passes[len(cut) :])):
        counter.feed(
            chosen[part], None if predictions is None else predictions[part], np.array(sizes, np.int64)
        )
    counted = counter.snapshot()
    assert_same(counted, model.statistics)
    assert counted.tokens == max(model.seen)
    assert counted.policy == name
    assert counted.top_k == top_k


def test_ranks_by_hand() -> None:
    # LRU over four experts. Equal keys (never used, or used by one token): the higher number comes first.
    chosen = np.array([[[0, 1]], [[1, 2]], [[0, 3]]], np.int32)
    ranked = np.array([[[1, 0]], [[3, 1]], [[0, 3]]], np.int32)
    counter = RoutingCounter(_native.EvictionPolicy("lru", 1, 4), 2)
    counter.feed(chosen, ranked)
    seen = counter.snapshot()
    # Orders before the accesses: 3 2 1 0, then 1 0 3 2, then 2 1 0 3.
    assert seen.ranks.tolist() == [[1, 0, 2, 3]]
    assert seen.activations.tolist() == [[2, 2, 1, 1]]
    assert seen.predicted.tolist() == [3]
    assert seen.depth == 4
    assert seen.hits_of_prediction.tolist() == [[2, 3, 0, 0]]
    # Place 0: expert 1 at rank 2, expert 3 at rank 2, expert 0 at rank 2; place 1: ranks 3, 0, 3.
    assert seen.ranks_of_prediction[0, :2].tolist() == [[0, 0, 3, 0], [1, 0, 0, 2]]
    assert seen.hit_rate.tolist() == [[0, 1 / 6, 1 / 6, 3 / 6, 1]]
    assert seen.prediction_accuracy[0, :2].tolist() == pytest.approx([2 / 3, 1])
    assert seen.prediction_hit_rate[0, 1].tolist() == pytest.approx([0, 1 / 3, 1 / 3, 1 / 3, 1])


def local_trace(tokens: int, layers: int, experts: int, top_k: int, seed: int = 0) -> Trace:
    """Routing with favourites that change slowly, so that caches hit; it begins with every expert once."""
    generator = np.random.default_rng(seed)
    drift = np.cumsum(generator.normal(size=(tokens, layers, experts)), axis=0) * 0.15
    chosen = np.argsort(-(drift + generator.gumbel(size=drift.shape)), axis=-1)[..., :top_k]
    first = np.arange(experts).reshape(-1, 1, top_k).repeat(layers, axis=1)
    whole = np.concatenate([first, chosen]).astype(np.int32)
    return Trace(whole, np.array([0, len(whole)]), experts)


def hits_of_cache(policy: str, trace: Trace, cached: int, skip: int) -> float:
    """Share of activations of experts that a real cache of ``cached`` whole experts a layer holds."""
    cache = _native.SplitExpertCache(
        trace.layers,
        trace.num_experts,
        1,
        trace.layers * cached + trace.top_k,
        4096,
        _native.EvictionPolicy(policy, trace.layers, trace.num_experts),
        np.tile(np.array([cached, 1], np.int32), (trace.layers, 1)),
        trace.top_k,
    )
    hits = 0
    for token, rows in enumerate(trace.experts):
        for layer, row in enumerate(rows):
            chosen = np.sort(row)
            if token >= skip:
                # Other resident blocks are surplus, which a layer at work may lose at any time.
                hits += sum(cache.is_protected(layer, int(expert)) for expert in chosen)
            cache.access(layer, chosen)
            plan = cache.plan(layer, chosen)
            for page, *_ in cache.commit(plan):
                assert page is not None
                cache.landed(page)
            for expert in chosen:
                cache.release(layer, int(expert))
    return hits / trace.experts[skip:].size


@pytest.mark.parametrize("cached", [4, 7, 12, 16])
@pytest.mark.parametrize(
    ("policy", "tolerance"), [("lru", 0.0), ("lcp", 0.003), ("lfu", 0.003), ("blend", 0.0), ("forecast", 0.0)]
)
def test_one_count_gives_the_hit_rate_of_every_cache_size(policy: str, tolerance: float, cached: int) -> None:
    # Exact, except that of two used experts with equal keys a cache keeps the earlier one.
    trace = local_trace(400, 2, 16, 4)
    counter = RoutingCounter(_native.EvictionPolicy(policy, 2, 16), 4)
    counter.feed(trace.experts[:4])
    counter.reset()
    counter.feed(trace.experts[4:])
    expected = counter.snapshot().hit_rate[:, cached].mean()
    assert expected > 0.3
    assert hits_of_cache(policy, trace, cached, 4) == pytest.approx(expected, abs=tolerance + 1e-12)


def test_a_trace_is_counted_by_name_or_by_settings() -> None:
    from moechat.configurator.systems import CacheSettings

    trace = local_trace(50, 3, 12, 3)
    named = statistics_of_trace(trace, "lcp", omega=4, rho=0.5)
    assert_same(named, statistics_of_trace(trace, CacheSettings(policy="lcp", omega=4, rho=0.5)))
    assert (named.ranks != statistics_of_trace(trace, "lcp").ranks).any()
    assert named.tokens == trace.tokens
    assert not named.predicted.any()
    np.testing.assert_array_equal(named.activations, trace.counts())
    assert statistics_of_trace(trace, "static", tokens=7).tokens == 7


def test_belady_is_the_bound() -> None:
    trace = local_trace(300, 2, 16, 4)
    best = statistics_of_trace(trace, "belady").hit_rate
    for policy in ("lru", "lfu", "lcp", "blend", "forecast"):
        hits = statistics_of_trace(trace, policy).hit_rate
        # Before the first access the cache holds the experts with the highest initial keys: few activations.
        assert (best >= hits - 16 / trace.experts[:, 0].size).all()
    assert 0.05 < (best - hits)[:, 8].mean() < 0.5


def test_wrong_requests_are_refused() -> None:
    trace = local_trace(5, 1, 4, 2)
    with pytest.raises(UsageError, match="it must be one of"):
        statistics_of_trace(trace, "fifo")
    with pytest.raises(UsageError, match="tokens is 0"):
        statistics_of_trace(trace, tokens=0)


def test_perfect_predictions_are_always_right() -> None:
    trace = local_trace(60, 2, 8, 2)
    seen = statistics_of_trace(trace, "lru", predictions=trace.experts)
    assert seen.prediction_accuracy[:, :2].tolist() == [[1, 1], [1, 1]]
    assert seen.hits_of_prediction[:, 2:].sum() == 0
    np.testing.assert_array_equal(seen.ranks_of_prediction.sum(axis=1), seen.ranks)


@given(
    st.lists(
        st.lists(
            st.sampled_from([0.0, 1.0, -2.5, float("inf"), float("-inf"), float("nan")]),
            min_size=5,
            max_size=5,
        ),
        min_size=1,
        max_size=4,
    ),
    st.integers(1, 8),
)
def test_rankings_are_in_the_order_of_the_runner(rows: list[list[float]], depth: int) -> None:
    scores = np.array(rows, np.float32)
    best = rankings(scores, depth)
    for row, order in zip(rows, best, strict=True):
        plain = [float("-inf") if np.isnan(value) else value for value in row]
        assert order.tolist() == sorted(range(5), key=lambda expert: (-plain[expert], expert))[:depth]


def test_wrong_arrays_are_refused() -> None:
    counter = RoutingCounter(_native.EvictionPolicy("lru", 2, 4), 2)
    good = np.zeros((3, 2, 1), np.int32)
    with pytest.raises(ValueError, match=r"must be \[tokens, 2, n\]"):
        counter.feed(good[:, :1])
    with pytest.raises(ValueError, match="names expert 4 in layer 1"):
        counter.feed(np.array([[[0], [4]]]))
    with pytest.raises(ValueError, match="names expert -1"):
        counter.feed(good, good - 1)
    with pytest.raises(ValueError, match="predictions are for 2 tokens"):
        counter.feed(good, good[:2])
    for passes in ([1, 1], [4], [0, 3], [2, 2]):
        with pytest.raises(ValueError, match="add up to the tokens"):
            counter.feed(good, passes=np.array(passes))
    with pytest.raises(ValueError, match="top_k"):
        RoutingCounter(_native.EvictionPolicy("lru", 2, 4), 0)
    # After a refusal the counter still works.
    counter.reset()
    counter.feed(good)
    assert counter.snapshot().ranks.sum() == 6


@pytest.mark.parametrize(
    ("experts", "top_k", "depth"), [(8, 2, 8), (64, 2, 16), (64, 6, 24), (128, 8, 32), (512, 32, 64)]
)
def test_depth_of_a_prediction(experts: int, top_k: int, depth: int) -> None:
    assert RoutingStatistics.zero("lru", 1, experts, top_k).depth == depth
    assert RoutingCounter(_native.EvictionPolicy("lru", 1, experts), top_k).depth == depth


def test_counting_leaves_other_threads_running() -> None:
    trace = local_trace(6000, 8, 64, 4)

    def longest_pause() -> float:
        """The longest that this thread stood still while another one counted, as a share of that time."""
        counter = RoutingCounter(_native.EvictionPolicy("blend", 8, 64), 4)
        took = [0.0]

        def count() -> None:
            started = time.perf_counter()
            counter.feed(trace.experts)
            took[0] = time.perf_counter() - started

        thread = threading.Thread(target=count)
        pauses, last = [0.0], time.perf_counter()
        thread.start()
        while thread.is_alive():
            now = time.perf_counter()
            pauses.append(now - last)
            last = now
        thread.join()
        assert counter.snapshot().tokens == trace.tokens
        return max(pauses) / took[0]

    # With the GIL held it would be all of it, every time; on a busy machine it may be so once.
    assert any(longest_pause() < 0.8 for _ in range(5))
