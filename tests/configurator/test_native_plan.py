"""The native loops equal the Python modules, whose equations have their own tests."""

from __future__ import annotations

import numpy as np
import pytest
from configurator_support import any_costs, drawn, realistic
from hypothesis import given, settings
from hypothesis import strategies as st

from moechat.configurator.costs import Costs
from moechat.configurator.curves import RoutingCurves
from moechat.configurator.expert_split import expert_split
from moechat.configurator.exposure import EngineModel, PaperModel, first_window
from moechat.configurator.native import native_plan
from moechat.configurator.systems import CacheSettings
from moechat.configurator.targets import evaluate, outcomes

BLOCKS = 5
models = st.tuples(
    any_costs, st.sampled_from(["paper", "fetch", "compute", "both"]), st.sampled_from([1.0, 1 / BLOCKS])
)


def model_of(drawn_model, top_k):
    costs, miss, grain = drawn_model
    if miss == "paper":
        return PaperModel(costs, top_k)
    if not np.isfinite(costs.compute_far):
        miss = "fetch"
    return EngineModel(costs, top_k, miss, grain)


def curves_of(seed, layers, experts, top_k):
    return RoutingCurves.of(drawn(seed, layers, experts, top_k), CacheSettings(), top_k)


@settings(max_examples=120, deadline=None)
@given(st.integers(0, 1 << 30), models)
def test_evaluation(seed, drawn_model):
    curves = curves_of(seed, 4, 6, 3)
    model = model_of(drawn_model, 3)
    rng = np.random.default_rng(seed)
    targets = np.stack([rng.integers(0, 7, 4), rng.integers(1, BLOCKS + 1, 4)], axis=1).astype(np.int32)
    found = evaluate(targets, curves, model, BLOCKS)
    window = np.array([first_window(model.costs)])
    for layer in range(4):
        assert found.windows[layer] == pytest.approx(window[0])
        loaded, exposed, window = outcomes(layer, targets[layer : layer + 1], window, curves, model, BLOCKS)
        assert found.loaded[layer] == pytest.approx(loaded[0])
        assert found.exposed[layer] == pytest.approx(exposed[0], abs=1e-15)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1 << 30), models)
def test_costs_of_options(seed, drawn_model):
    curves = curves_of(seed, 3, 5, 2)
    model = model_of(drawn_model, 2)
    rng = np.random.default_rng(seed)
    experts, kept = np.arange(6), rng.integers(1, BLOCKS + 1, 6)
    windows, prices = rng.uniform(0, 2e-3, 3), rng.uniform(0, 1, 3)
    theta = np.where(experts > 0, kept / BLOCKS, 0.0)
    costs = native_plan(curves, model).option_costs(experts, theta, windows, prices, 1e-6)
    pairs = np.stack([experts, kept], axis=1)
    for layer in range(3):
        loaded, exposed, left = outcomes(layer, pairs, np.full(6, windows[layer]), curves, model, BLOCKS)
        price = prices[layer + 1] if layer < 2 else 0.0
        assert costs[layer] == pytest.approx(exposed - price * left + 1e-6 * (2 - loaded), abs=1e-12)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1 << 30), any_costs, st.one_of(st.none(), st.sampled_from([0.2, 0.5, 1.0])))
def test_expert_split(seed, costs, split):
    curves = curves_of(seed, 4, 6, 3)
    model = PaperModel(costs, 3)
    volumes = np.random.default_rng(seed).uniform(0, 6, (3, 4))
    python = expert_split(curves, model, volumes, split)
    native = native_plan(curves, model).split(volumes, -1.0 if split is None else split)
    assert (native[0] == python.experts).all()
    for ours, theirs in zip(native[1:], (python.loaded, python.exposed, python.windows), strict=True):
        assert ours == pytest.approx(theirs, abs=1e-15)


def test_price_of_a_window_is_what_a_longer_one_saves():
    # Layers that wait for their link: a longer window of layer 2 saves there and after it.
    curves = RoutingCurves.of(realistic(0, 4, 8, 2), CacheSettings(), 2)
    model = PaperModel(Costs(1e-4, 2e-4, 0.0, load=1e-3), 2)
    targets = np.tile(np.array([[2, BLOCKS]], np.int32), (4, 1))
    found = evaluate(targets, curves, model, BLOCKS)
    window, total = np.array([found.windows[2] + 1e-6]), 0.0
    for layer in (2, 3):
        _, exposed, window = outcomes(layer, targets[layer : layer + 1], window, curves, model, BLOCKS)
        total += float(exposed[0])
    saved = found.exposed[2:].sum() - total
    assert saved > 0
    assert found.prices[2] == pytest.approx(saved / 1e-6, rel=1e-3)


def test_arrays_that_do_not_fit_are_refused():
    plan = native_plan(curves_of(0, 3, 5, 2), PaperModel(Costs(1e-4, 1e-4, 1e-4, load=1e-3), 2))
    counts, theta = np.zeros((1, 3), np.int64), np.zeros((1, 3))
    with pytest.raises(ValueError, match=r"experts has shape \[1, 2\]"):
        plan.evaluate(counts[:, :2].copy(), theta[:, :2].copy(), 0.1)
    with pytest.raises(ValueError, match="theta has shape"):
        plan.evaluate(counts, theta[:, :2].copy(), 0.1)
    with pytest.raises(ValueError, match="experts holds 6; it must be 0 to 5"):
        plan.evaluate(counts + 6, theta, 0.1)
    with pytest.raises(ValueError, match="experts holds -1"):
        plan.option_costs(np.array([-1]), np.array([0.5]), np.zeros(3), np.zeros(3), 0.0)
    with pytest.raises(ValueError, match="more is 0"):
        plan.evaluate(counts, theta, 0.0)
    with pytest.raises(ValueError, match="windows has shape"):
        plan.option_costs(np.array([1]), np.array([0.5]), np.zeros(2), np.zeros(3), 0.0)
    with pytest.raises(ValueError, match="volumes has shape"):
        plan.split(np.zeros((1, 4)), -1.0)
