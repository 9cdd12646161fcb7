"""Guarantees of every allocation method, and comparisons of our method with the others."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from configurator_support import any_costs, any_settings, drawn, realistic, statistics
from hypothesis import example, given, settings
from hypothesis import strategies as st

from moechat.configurator.allocate import allocate, moepic_targets
from moechat.configurator.brute_force import best_allocation
from moechat.configurator.costs import Costs
from moechat.configurator.curves import RoutingCurves
from moechat.configurator.dynamic import fewest_loads
from moechat.configurator.exposure import EngineModel, PaperModel
from moechat.configurator.hybrid import Search, minimise
from moechat.configurator.systems import SYSTEMS, CacheSettings
from moechat.configurator.targets import evaluate, pages_of
from moechat.configurator.uniform import same_for_all

METHODS = ["uniform", "auto", "moepic", "dp", "model", "layers"]
AUTO = SYSTEMS["auto"]
LINK_BOUND = Costs(attention=2e-4, moe=4e-4, head=1e-3, load=5e-4, latency=2e-5)


def settings_for(method, base=AUTO):
    return replace(base, allocation=method, split=None if method in ("auto", "moepic") else 1.0)


def counted(allocation):
    return pages_of(allocation.targets)


small = st.tuples(
    st.integers(0, 1 << 30), st.integers(1, 3), st.integers(1, 4), st.integers(1, 3), st.booleans()
)


@settings(max_examples=60, deadline=None)
@given(small, any_costs, any_settings, st.floats(0, 1.2), st.sampled_from(METHODS))
def test_targets_fit_and_results_are_finite(shape, costs, wanted, share, method):
    seed, layers, experts, blocks, concave = shape
    top_k = 1 + seed % experts
    pages = int(share * layers * experts * blocks)
    found = allocate(
        settings_for(method, wanted),
        drawn(seed, layers, experts, top_k, concave=concave),
        costs,
        blocks=blocks,
        pages=pages,
        top_k=top_k,
    )
    assert found.method == method
    assert found.targets.dtype == np.int32
    assert counted(found) <= pages
    assert ((found.targets[:, 0] >= 0) & (found.targets[:, 0] <= experts)).all()
    assert ((found.targets[:, 1] >= 1) & (found.targets[:, 1] <= blocks)).all()
    assert np.isfinite(found.exposed).all()
    assert (found.exposed >= 0).all()
    assert ((found.loaded >= 0) & (found.loaded <= top_k)).all()


@settings(max_examples=60, deadline=None)
@given(small, any_costs, any_settings, st.floats(0, 1))
@example(  # only a smaller part of more experts hides everything, in both layers at once
    (1, 2, 2, 3, False),
    Costs(attention=1.5763e-05, moe=1e-05, head=1e-05, load=1.5763e-05, latency=0.0, compute_far=0.001953125),
    CacheSettings(policy="lcp", split=None, allocation="auto", prefetch="perfect", miss="compute"),
    0.5,
)
def test_our_method_stays_close_to_brute_force(shape, costs, wanted, share):
    seed, layers, experts, blocks, concave = shape
    top_k = 1 + seed % experts
    pages = int(share * layers * experts * blocks)
    known = drawn(seed, layers, experts, top_k, concave=concave)
    ours = allocate(wanted, known, costs, blocks=blocks, pages=pages, top_k=top_k)
    curves = RoutingCurves.of(known, wanted, top_k)
    model = EngineModel.of(wanted, costs, top_k, blocks)
    _, best = best_allocation(curves, model, blocks, pages)
    nothing = evaluate(np.tile(np.array([[0, 1]], np.int32), (layers, 1)), curves, model, blocks).total
    assert ours.exposed_total >= best - 1e-12
    # Relative to the exposed time without a cache; almost always the difference is 0 (next test).
    assert ours.exposed_total - best <= 0.05 * nothing + 1e-12


def test_our_method_is_usually_optimal():
    exact = 0
    for seed in range(120):
        rng = np.random.default_rng(seed)
        layers, experts, blocks = rng.integers(2, 4), int(rng.integers(2, 5)), int(rng.integers(1, 4))
        top_k = int(rng.integers(1, experts + 1))
        known = drawn(seed, layers, experts, top_k, concave=bool(seed % 2))
        costs = Costs(*10 ** rng.uniform(-5, -3, 3), load=10 ** rng.uniform(-5, -2.5), latency=1e-5)
        pages = int(rng.integers(1, layers * experts * blocks))
        ours = allocate(AUTO, known, costs, blocks=blocks, pages=pages, top_k=top_k)
        curves = RoutingCurves.of(known, AUTO, top_k)
        model = EngineModel.of(AUTO, costs, top_k, blocks)
        _, best = best_allocation(curves, model, blocks, pages)
        exact += ours.exposed_total <= best * (1 + 1e-6) + 1e-12
    assert exact >= 117


@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 1 << 30),
    any_costs,
    any_settings,
    st.floats(0, 1),
    st.sampled_from([(6, 16, 5), (9, 8, 24)]),
)
def test_our_method_is_never_worse_than_the_others(seed, costs, wanted, share, shape):
    layers, experts, blocks = shape
    known = realistic(seed, layers, experts, 3, tokens=400)
    pages = int(share * layers * experts * blocks)
    ours = allocate(wanted, known, costs, blocks=blocks, pages=pages, top_k=3)
    for method in ("uniform", "moepic", "dp"):
        other = allocate(settings_for(method, wanted), known, costs, blocks=blocks, pages=pages, top_k=3)
        assert ours.exposed_total <= other.exposed_total * (1 + 1e-9) + 1e-15, method
    half = allocate(
        replace(wanted, allocation="uniform", split=0.5), known, costs, blocks=blocks, pages=pages, top_k=3
    )
    assert ours.exposed_total <= half.exposed_total * (1 + 1e-9) + 1e-15


@pytest.mark.parametrize("seed", range(3))
def test_search_is_never_worse_under_the_paper_times_either(seed):
    known = realistic(seed, 8, 16, 2)
    curves = RoutingCurves.of(known, CacheSettings(), 2)
    model = PaperModel(replace(LINK_BOUND, load=1.5e-3), 2)
    starts = [
        same_for_all(8, 16, 6, 200, 0.5),
        fewest_loads(curves, 6, 200, 1.0),
        moepic_targets(curves, model.costs, 6, 200)[0],
    ]
    _, found, _ = minimise(Search(curves, model, 6, 200, None), starts)
    assert found.total < min(evaluate(start, curves, model, 6).total for start in starts)


@pytest.mark.parametrize("miss", ["fetch", "both"])
@pytest.mark.parametrize("seed", range(3))
def test_more_pages_never_expose_more(seed, miss):
    known = realistic(seed, 8, 16, 2)
    costs = replace(LINK_BOUND, compute_far=9e-4)
    everything = 8 * 16 * 6
    totals = np.array(
        [
            allocate(replace(AUTO, miss=miss), known, costs, blocks=6, pages=pages, top_k=2).exposed_total
            for pages in range(0, everything + 40, 40)
        ]
    )
    # No search is exact: to a thousandth of what is exposed without a cache.
    assert (np.diff(totals) <= 1e-3 * totals[0]).all()
    assert totals[-1] == 0.0


def test_whole_experts_are_best_where_nothing_overlaps():
    known = realistic(0, 6, 16, 2)
    wanted = replace(AUTO, prefetch="none", miss="fetch")
    costs = Costs(attention=0.0, moe=1e-9, head=0.0, load=1e-3)
    found = allocate(wanted, known, costs, blocks=8, pages=6 * 5 * 8, top_k=2)
    partly = (found.targets[:, 1] < 8) & (found.targets[:, 0] > 0)
    assert partly.sum() <= 1  # what is left over may make one of them larger or smaller
    halves = allocate(replace(wanted, split=0.5), known, costs, blocks=8, pages=6 * 5 * 8, top_k=2)
    assert found.exposed_total < halves.exposed_total


def test_split_experts_are_best_where_prefetches_bring_the_rest():
    # Experts are chosen at random, and known exactly beforehand; in the window half of an expert comes.
    even = np.tile(np.arange(1, 9) / 8, (4, 1))
    known = statistics(even, np.ones((4, 1)), np.tile(even[:, None, :], (1, 1, 1)), top_k=1)
    costs = Costs(attention=0.5e-3, moe=1e-9, head=0.0, load=1e-3)
    found = allocate(replace(AUTO, miss="fetch"), known, costs, blocks=4, pages=4 * 8 * 2, top_k=1)
    assert found.targets.tolist() == [[8, 2]] * 4
    assert found.exposed_total == pytest.approx(0.0, abs=1e-8)


def test_a_layer_may_get_nothing_and_another_everything():
    # Layer 1 is known beforehand and comes in time; layer 2 is not.
    even = np.tile(np.arange(1, 5) / 4, (2, 1))
    known = statistics(even, [[1.0], [0.0]], np.tile(even[:, None, :], (1, 1, 1)), top_k=1)
    costs = Costs(attention=1e-3, moe=1e-9, head=0.0, load=1e-3)
    found = allocate(replace(AUTO, miss="fetch"), known, costs, blocks=2, pages=8, top_k=1)
    assert found.targets[1].tolist() == [4, 2]
    assert found.targets[0, 0] == 0
    assert found.exposed_total == pytest.approx(0.0, abs=1e-8)


@pytest.mark.parametrize("method", METHODS)
def test_no_pages_and_all_pages(method):
    known = realistic(0, 4, 8, 2)
    empty = allocate(settings_for(method), known, LINK_BOUND, blocks=5, pages=0, top_k=2)
    assert counted(empty) == 0
    assert (empty.exposed > 0).any()
    for pages in (4 * 8 * 5, 4 * 8 * 5 + 1000):
        full = allocate(settings_for(method), known, LINK_BOUND, blocks=5, pages=pages, top_k=2)
        assert full.exposed_total == 0.0
        assert full.loaded == pytest.approx(np.full(4, 2.0))
        assert counted(full) == 4 * 8 * 5


@pytest.mark.parametrize("method", METHODS)
def test_every_expert_at_every_token_in_one_layer(method):
    known = statistics([[0.5, 1.0]], [[1.0, 1.0]], [[[0.5, 1.0], [0.5, 1.0]]], top_k=2)
    found = allocate(settings_for(method), known, LINK_BOUND, blocks=4, pages=5, top_k=2)
    assert counted(found) >= 4
    assert counted(found) <= 5


@pytest.mark.parametrize("method", METHODS)
def test_without_counts_all_layers_are_alike(method):
    known = drawn(0, 4, 8, 2)
    empty = replace(
        known,
        tokens=0,
        predicted=known.predicted * 0,
        activations=known.activations * 0,
        ranks=known.ranks * 0,
        hits_of_prediction=known.hits_of_prediction * 0,
        ranks_of_prediction=known.ranks_of_prediction * 0,
    )
    found = allocate(settings_for(method), empty, LINK_BOUND, blocks=5, pages=80, top_k=2)
    assert counted(found) == 80
    # A page is a page then: half of all, however it is divided.
    assert found.loaded.sum() == pytest.approx(4 * 2 * 0.5)


@pytest.mark.parametrize("method", ["auto", "moepic"])
@pytest.mark.parametrize("split", [0.25, 0.5, 1.0])
def test_given_split_is_kept(method, split):
    known = realistic(1, 6, 12, 2)
    found = allocate(
        replace(settings_for(method), split=split), known, LINK_BOUND, blocks=8, pages=130, top_k=2
    )
    kept = found.targets[found.targets[:, 0] > 0, 1]
    assert (kept == split * 8).all()
    assert 130 - counted(found) < split * 8


@pytest.mark.parametrize("share", [0.05, 0.3, 0.8])
def test_our_method_leaves_almost_no_page_unused(share):
    known = realistic(1, 6, 12, 2)
    pages = int(6 * 12 * 8 * share)
    found = allocate(AUTO, known, LINK_BOUND, blocks=8, pages=pages, top_k=2)
    assert pages - counted(found) <= 4


def test_very_many_options_fill_the_budget_and_are_no_worse_than_other_methods():
    known = realistic(2, 20, 128, 8, tokens=1000)
    pages = 20 * 128 * 64 // 5
    found = allocate(AUTO, known, LINK_BOUND, blocks=64, pages=pages, top_k=8)
    assert counted(found) <= pages
    assert pages - counted(found) < 64
    for method in ("moepic", "dp"):
        other = allocate(settings_for(method), known, LINK_BOUND, blocks=64, pages=pages, top_k=8)
        assert found.exposed_total <= other.exposed_total


def test_impossible_requests():
    known = realistic(1, 2, 4, 1)
    for blocks, pages in ((0, 5), (4, -1)):
        with pytest.raises(ValueError, match=f"{blocks} blocks, {pages} pages"):
            allocate(AUTO, known, LINK_BOUND, blocks=blocks, pages=pages, top_k=1)


def test_brute_force_refuses_cases_that_take_too_long():
    curves = RoutingCurves.of(realistic(0, 8, 16, 2), CacheSettings(), 2)
    with pytest.raises(ValueError, match="129 options in 8 layers are too many"):
        best_allocation(curves, PaperModel(LINK_BOUND, 2), 8, 100)
