"""Counts of a runner while it computes equal the counts of the same routing as a trace."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moechat import _native
from moechat.routing import RoutingCounter, RoutingStatistics, rankings

LAYERS, EXPERTS, TOP_K, HIDDEN = 3, 24, 2, 64


def runner_of(policy: str, top_k: int = TOP_K) -> _native.ExpertRunner:
    layout = _native.BlockLayout(HIDDEN, 64, 4)
    ranks = -np.tile(np.arange(EXPERTS, dtype=np.float64), (LAYERS, 1)) if policy == "static" else None
    records = [np.zeros((EXPERTS, 1, layout.record_bytes), np.uint8) for _ in range(LAYERS)]
    return _native.ExpertRunner(
        layout,
        _native.Gate(),
        layers=LAYERS,
        experts=EXPERTS,
        pages=LAYERS * 6 + 4,
        targets=np.tile(np.array([6, 1], np.int32), (LAYERS, 1)),
        reserve=4,
        policy=_native.EvictionPolicy(policy, LAYERS, EXPERTS, ranks=ranks),
        link=_native.sim_link(records),
        top_k=top_k,
    )


def run_layer(runner: _native.ExpertRunner, layer: int, index: npt.NDArray[np.int32]) -> None:
    begin(runner, layer, index)
    x = np.zeros((len(index), HIDDEN), np.float32)
    runner.finish(x, np.empty_like(x))


def begin(runner: _native.ExpertRunner, layer: int, index: npt.NDArray[np.int32]) -> None:
    runner.begin(layer, index.astype(np.int64), np.ones(index.shape, np.float32))


def counts_of(runner: _native.ExpertRunner, policy: str) -> RoutingStatistics:
    return RoutingStatistics(policy, TOP_K, *runner.routing_counts())


def assert_same(one: RoutingStatistics, other: RoutingStatistics) -> None:
    for name in ("tokens", "predicted", "activations", "ranks", "hits_of_prediction", "ranks_of_prediction"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name), err_msg=name)


@pytest.mark.parametrize("policy", ["blend", "lru", "two_level_lru"])
def test_a_runner_counts_routing_while_it_decodes(policy: str) -> None:
    generator = np.random.default_rng(1)
    tokens = 80
    taste = np.cumsum(generator.normal(size=(tokens, LAYERS, EXPERTS)), axis=0) * 0.3
    chosen = np.argsort(-taste, axis=-1)[..., :TOP_K].astype(np.int32)
    scores = (taste + generator.normal(size=taste.shape)).astype(np.float32)
    runner = runner_of(policy)
    # A prompt of seven tokens; nothing is predicted for its layers, but for the first one of the next token.
    prompt = generator.integers(0, EXPERTS, size=(7, LAYERS, TOP_K)).astype(np.int32)
    for layer in range(LAYERS):
        begin(runner, layer, prompt[:, layer])
        if layer == LAYERS - 1:
            runner.prefetch(0, scores[0, 0], TOP_K, None)
        runner.finish(np.zeros((7, HIDDEN), np.float32), np.empty((7, HIDDEN), np.float32))
    for token in range(tokens):
        for layer in range(LAYERS):
            begin(runner, layer, chosen[token, layer][None])
            ahead = token * LAYERS + layer + 1
            if ahead < tokens * LAYERS:
                runner.prefetch(ahead % LAYERS, scores[divmod(ahead, LAYERS)], TOP_K, None)
                # P(y) does not cover predictions farther ahead.
                runner.prefetch((ahead + 1) % LAYERS, -scores[0, 0], TOP_K, None, later=True)
            runner.finish(np.zeros((1, HIDDEN), np.float32), np.empty((1, HIDDEN), np.float32))
    counter = RoutingCounter(_native.EvictionPolicy(policy, LAYERS, EXPERTS), TOP_K)
    counter.feed(np.concatenate([prompt, chosen]), passes=np.array([7] + [1] * tokens))
    without = counter.snapshot()
    seen = counts_of(runner, policy)
    assert seen.tokens == tokens
    assert seen.predicted.tolist() == [tokens] * LAYERS
    assert seen.depth == 16
    np.testing.assert_array_equal(seen.activations, without.activations)
    if policy == "two_level_lru":
        return  # its keys depend on what was predicted farther ahead, too
    counter = RoutingCounter(_native.EvictionPolicy(policy, LAYERS, EXPERTS), TOP_K)
    best = rankings(scores, 16)
    counter.feed(
        np.concatenate([prompt, chosen]),
        np.concatenate([np.zeros((7, LAYERS, 16), np.int32), best]),
        np.array([7] + [1] * tokens),
    )
    assert_same(seen, counter.snapshot())


def test_a_prediction_is_counted_at_its_access() -> None:
    runner = runner_of("lru")
    scores = np.arange(EXPERTS, dtype=np.float32)
    one = np.array([[EXPERTS - 1, EXPERTS - 3]], np.int32)
    run_layer(runner, 0, one)
    runner.prefetch(1, -scores, TOP_K, None)
    runner.prefetch(1, scores, TOP_K, None)  # the later one counts
    run_layer(runner, 1, one)
    seen = counts_of(runner, "lru")
    assert seen.predicted.tolist() == [0, 1, 0]
    assert seen.hits_of_prediction[1, :4].tolist() == [1, 0, 1, 0]
    run_layer(runner, 1, one)  # not predicted
    runner.prefetch(2, None, EXPERTS, None)  # a whole layer is no ranking
    run_layer(runner, 2, one)
    runner.prefetch(0, scores, TOP_K, None)
    run_layer(runner, 0, np.repeat(one, 2, axis=0))  # a prompt uses the prediction up
    run_layer(runner, 0, one)
    assert counts_of(runner, "lru").predicted.tolist() == [0, 1, 0]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.sampled_from([0.0, -0.0, float("nan"), float("inf"), float("-inf")]), st.floats(width=32)
        ),
        min_size=EXPERTS,
        max_size=EXPERTS,
    )
)
def test_scores_of_any_kind_are_ranked_as_they_would_be_fetched(scores: list[float]) -> None:
    runner = runner_of("static")  # expert e has rank e, so the ranks of a prediction say what it was
    runner.prefetch(1, np.array(scores, np.float32), TOP_K, None)
    run_layer(runner, 1, np.array([[0, 1]], np.int32))
    seen = counts_of(runner, "static")
    assert (seen.ranks_of_prediction[1].sum(axis=1) == 1).all()
    order = seen.ranks_of_prediction[1].argmax(axis=1)
    assert order.tolist() == rankings(np.array(scores, np.float32), seen.depth).tolist()
    runner.close()


def test_counts_are_copies_and_can_be_reset() -> None:
    runner = runner_of("lru")
    run_layer(runner, 0, np.array([[1, 2]], np.int32))
    before = counts_of(runner, "lru")
    run_layer(runner, 0, np.array([[1, 2]], np.int32))
    assert before.activations[0, 1] == 1
    assert counts_of(runner, "lru").activations[0, 1] == 2
    runner.reset_stats()
    assert counts_of(runner, "lru").tokens == 2
    runner.reset_routing_counts()
    assert_same(counts_of(runner, "lru"), RoutingStatistics.zero("lru", LAYERS, EXPERTS, TOP_K))
    run_layer(runner, 0, np.array([[1, 2]], np.int32))
    # The policy keeps its state: both were used last.
    assert counts_of(runner, "lru").ranks[0, :2].tolist() == [1, 1]


def test_experts_outside_the_layer_and_dropped_layers() -> None:
    runner = runner_of("lru")
    run_layer(runner, 0, np.array([[-1, EXPERTS]], np.int32))
    seen = counts_of(runner, "lru")
    assert (seen.tokens, seen.activations.sum()) == (1, 0)
    begin(runner, 1, np.array([[3, 4]], np.int32))
    runner.abort()
    assert counts_of(runner, "lru").activations[1].sum() == 2


def test_top_k_must_be_positive() -> None:
    with pytest.raises(ValueError, match="top_k"):
        runner_of("lru", top_k=0)
