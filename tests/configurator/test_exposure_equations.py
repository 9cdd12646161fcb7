"""Every equation of a layer's times against numbers worked out by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from moechat.configurator.costs import Costs
from moechat.configurator.exposure import EngineModel, PaperModel, first_window
from moechat.configurator.systems import CacheSettings

# K = 4, so T_exp = 8 / 4 = 2.
COSTS = Costs(attention=1.0, moe=8.0, head=5.0, load=3.0)
SLOW_START = replace(COSTS, latency=0.5)
FAR = replace(SLOW_START, compute_far=4.0, load_together=4.0, compute_together=4.0)


def times(model, loaded):
    exposed, window = model.times(np.array([float(loaded)]))
    return exposed[0], window[0]


def test_first_window_is_head_and_attention():
    assert first_window(COSTS) == 6.0  # 5 + 1


@pytest.mark.parametrize(
    ("loaded", "exposed", "window"),
    [
        # hide = 2.5 · 2 = 5, miss = 1.5 · 3 = 4.5; max(0, 4.5 - 5) = 0; 8 - 4.5 + 1
        (2.5, 0.0, 4.5),
        # hide = 1 · 2 = 2, miss = 3 · 3 = 9; 9 - 2; 8 - 2 + 1
        (1.0, 7.0, 7.0),
        # hide = 0, miss = 12; all of it is exposed; 8 - 0 + 1
        (0.0, 12.0, 9.0),
        # hide = 8, miss = 0
        (4.0, 0.0, 9.0),
    ],
)
def test_equations_5_to_7(loaded, exposed, window):
    assert times(PaperModel(COSTS, 4), loaded) == pytest.approx((exposed, window))


@pytest.mark.parametrize(
    ("loaded", "exposed", "window"),
    [
        # 3 missing: 0.5 + 3·3 + 0.1·2 = 9.7, the link busy for 9.5; the layer takes 9.7
        (1.0, 1.7, 9.7 - 9.5 + 1),
        # Half an expert missing, half the latency: 0.25 + 1.5 + 0.1·2 = 1.95 < 8; the link busy for 1.75
        (3.5, 0.0, 8 - 1.75 + 1),
        # A twentieth missing: the grain is not more than that: 0.025 + 0.15 + 0.05·2 < 8
        (3.95, 0.0, 8 - 0.175 + 1),
        # Everything there
        (4.0, 0.0, 9.0),
    ],
)
def test_fetched_blocks_are_computed_as_they_arrive(loaded, exposed, window):
    model = EngineModel(SLOW_START, 4, "fetch", 0.1)
    assert times(model, loaded) == pytest.approx((exposed, window))


def test_whole_experts_are_computed_after_all_of_them():
    # 0.5 + 3·3 + 1·2 = 11.5
    assert times(EngineModel(SLOW_START, 4, "fetch", 1.0), 1) == pytest.approx((3.5, 11.5 - 9.5 + 1))


def test_link_faster_than_compute_costs_its_first_block():
    # 4 missing, each loaded in 1 and computed in 2: 0.5 + 4·2 + 0.1·1 = 8.6, the link busy for 4.5
    model = EngineModel(replace(SLOW_START, load=1.0), 4, "fetch", 0.1)
    assert times(model, 0) == pytest.approx((0.6, 8.6 - 4.5 + 1))


def test_far_tier_computes_and_leaves_the_link_free():
    # 3 missing · 4 = 12
    assert times(EngineModel(FAR, 4, "compute", 0.1), 1) == pytest.approx((4.0, 12.0 + 1))


def test_link_and_far_tier_share_at_the_rates_measured_together():
    # 4 missing: t = (4 + 0.5/4) / (1/4 + 1/4) = 8.25; last block 0.1·2: 8.45, the link busy for 8.25.
    # Alone the link takes 0.5 + 12 + 0.2, the far tier 16.
    assert times(EngineModel(FAR, 4, "both", 0.1), 0) == pytest.approx((0.45, 8.45 - 8.25 + 1))


def test_sharing_is_left_where_one_of_the_two_alone_is_quicker():
    # Together 10 times slower: the link alone takes 0.5 + 9 + 0.2 = 9.7.
    crowded = replace(FAR, load_together=40.0, compute_together=40.0)
    assert times(EngineModel(crowded, 4, "both", 0.1), 1) == pytest.approx((1.7, 9.7 - 9.5 + 1))
    # And with a far tier that needs 3 an expert: 9.
    quick = replace(crowded, compute_far=3.0)
    assert times(EngineModel(quick, 4, "both", 0.1), 1) == pytest.approx((1.0, 9.0 + 1))


def test_far_tier_alone_where_the_first_block_comes_too_late():
    # 1 missing, latency 100: the far tier has done it after 4, and the link did nothing.
    late = replace(FAR, latency=100.0)
    assert times(EngineModel(late, 4, "both", 0.1), 3) == pytest.approx((0.0, 8.0 + 1))


@pytest.mark.parametrize("miss", ["fetch", "compute", "both"])
def test_far_tier_that_cannot_compute_leaves_fetching(miss):
    settings = CacheSettings(miss=miss)
    assert EngineModel.of(settings, SLOW_START, 4, 10) == EngineModel(SLOW_START, 4, "fetch", 0.1)


@pytest.mark.parametrize("miss", ["fetch", "compute", "both"])
@pytest.mark.parametrize("far", [0.0, 0.1, 4.0])
def test_more_loaded_never_exposes_more(miss, far):
    costs = Costs(0.3, 2.0, 0.1, load=0.7, latency=0.05, compute_far=far, load_together=1.1)
    exposed, window = EngineModel(costs, 4, miss, 0.1).times(np.linspace(0, 4, 401))
    assert (np.diff(exposed) <= 1e-12).all()
    assert (window >= 0.3).all()
    assert np.isfinite(exposed).all()


def test_infinite_rate_together_is_no_rate():
    costs = replace(FAR, load_together=math.inf, compute_together=math.inf)
    # The better one alone remains: 0.5 + 3·3 + 0.2 against 12.
    assert times(EngineModel(costs, 4, "both", 0.1), 1) == pytest.approx((1.7, 1.2))
