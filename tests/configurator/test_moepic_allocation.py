"""Algorithm 1: a run computed by hand, and a second implementation, line by line and without arrays."""

from __future__ import annotations

import numpy as np
import pytest
from configurator_support import curves, realistic

from moechat.configurator.allocate import moepic_targets
from moechat.configurator.costs import Costs
from moechat.configurator.curves import RoutingCurves
from moechat.configurator.exposure import PaperModel
from moechat.configurator.moepic import vram_allocation
from moechat.configurator.rounding import filled, rounded_down
from moechat.configurator.systems import CacheSettings
from moechat.configurator.targets import pages_of

# K = 1, T_load = 1, T_exp = 0.5, no windows: T = max(0, (1 - m) - 0.5·m).
TWO_LAYERS = curves([[0.9, 1.0], [0.5, 1.0]])
NO_WINDOWS = PaperModel(Costs(attention=0.0, moe=0.5, head=0.0, load=1.0), 1)


def test_moves_while_the_sum_falls():
    # V = (1, 1): m = (0.9, 0.5), T = (0, 0.25). Steps of 0.25:
    # 1. Layer 2 with 1.25: two experts, θ = 0.625: m = 0.625, T = 0.0625: gains 0.1875.
    #    Layer 1 with 0.75: one expert: m = 0.675, T = 0: loses nothing. Sum 0.0625: kept.
    # 2. Layer 2 with 1.5: m = 0.75, T = 0: gains 0.0625. Layer 1 with 0.5: m = 0.45, T = 0.325. Rolled back.
    found = vram_allocation(TWO_LAYERS, NO_WINDOWS, 2.0, zeta=0.125)
    assert found.volumes == pytest.approx([0.75, 1.25])
    assert found.experts.tolist() == [1, 2]
    assert found.theta == pytest.approx([0.75, 0.625])
    assert found.exposed == pytest.approx([0.0, 0.0625])
    assert found.moves == 1


def test_move_that_does_not_help_is_rolled_back():
    # Steps of 0.5: layer 2 gains 0.25, layer 1 loses 0.325.
    found = vram_allocation(TWO_LAYERS, NO_WINDOWS, 2.0, zeta=0.25)
    assert found.volumes == pytest.approx([1.0, 1.0])
    assert found.moves == 0


def test_layer_has_no_more_than_all_its_experts_and_no_less_than_nothing():
    found = vram_allocation(curves([[0.5, 1.0], [1.0, 1.0]]), NO_WINDOWS, 3.0, zeta=0.25)
    # Layer 1 takes 0.5 once (T: m = 0.75 → 1); the next 0.25·3 would be more than 2 experts.
    assert (found.volumes <= 2).all()
    assert (found.volumes >= 0).all()
    assert found.volumes.sum() == pytest.approx(3.0)


def test_more_memory_than_experts_and_none_at_all():
    full = vram_allocation(TWO_LAYERS, NO_WINDOWS, 100.0)
    assert full.volumes.tolist() == [2.0, 2.0]
    assert full.exposed.tolist() == [0.0, 0.0]
    empty = vram_allocation(TWO_LAYERS, NO_WINDOWS, 0.0)
    assert empty.experts.tolist() == [0, 0]
    assert empty.exposed.tolist() == [1.0, 1.0]
    assert empty.theta.tolist() == [0.0, 0.0]


def algorithm_1(found, costs, budget, zeta):
    """A second implementation, directly from the paper."""
    layers, experts, k = found.layers, found.experts, found.top_k

    def expert_split(volumes):
        window, exposed = costs.head + costs.attention, []
        for i in range(layers):
            best = -1.0
            for c in range(1, experts + 1):
                theta = min(1.0, volumes[i] / c)
                m, left = k * found.hit[i, c] * theta, window
                for y in range(found.depth):
                    size = 1 - found.cached[i, y, c] * theta
                    part = min(size, left / costs.load)
                    m, left = m + part * found.accuracy[i, y], left - part * costs.load
                best = max(best, min(m, k))
            hide, miss = best * costs.moe / k, (k - best) * costs.load
            exposed.append(max(0.0, miss - hide))
            window = costs.moe - min(hide, miss) + costs.attention
        return exposed

    volumes = [budget / layers] * layers
    step = zeta * budget
    moves = 0
    while True:
        t1 = expert_split(volumes)
        t2 = expert_split([min(v + step, experts) for v in volumes])
        t3 = expert_split([max(v - step, 0.0) for v in volumes])
        takers = [i for i in range(layers) if volumes[i] + step <= experts * (1 + 1e-12)]
        i1 = max(takers, key=lambda i: t1[i] - t2[i])
        givers = [i for i in range(layers) if i != i1 and volumes[i] - step >= -1e-12 * experts]
        i2 = min(givers, key=lambda i: t3[i] - t1[i])
        moved = list(volumes)
        moved[i1], moved[i2] = moved[i1] + step, max(moved[i2] - step, 0.0)
        if sum(expert_split(moved)) - sum(t1) >= 0:
            return volumes, t1, moves
        volumes, moves = moved, moves + 1


def random_costs(seed):
    rng = np.random.default_rng(seed)
    return Costs(*rng.uniform(0.1, 1.0, 3), load=rng.uniform(0.3, 1.5))


@pytest.mark.parametrize("seed", range(6))
def test_allocation_equals_an_independent_implementation(seed):
    found = RoutingCurves.of(realistic(seed, 5, 12, 3), CacheSettings(), 3)
    costs = random_costs(seed)
    volumes, exposed, moves = algorithm_1(found, costs, 6.0, 0.01)
    ours = vram_allocation(found, PaperModel(costs, 3), 6.0)
    assert ours.volumes == pytest.approx(volumes)
    assert ours.exposed == pytest.approx(exposed)
    assert ours.moves == moves


def test_the_compared_runs_move_pages():
    curves_of = [RoutingCurves.of(realistic(i, 5, 12, 3), CacheSettings(), 3) for i in range(6)]
    moves = [algorithm_1(found, random_costs(i), 6.0, 0.01)[2] for i, found in enumerate(curves_of)]
    assert sum(moves) > 10


def test_rounding_down_never_exceeds_a_volume():
    # 1.3 experts of 10 blocks: 13 pages, 2 experts with 6 blocks. 0.25: 2 pages, not one for each of 4.
    volumes, experts = np.array([1.3, 0.25, 3.0, 0.0]), np.array([2, 4, 3, 0])
    targets = rounded_down(volumes, experts, 10, 100)
    assert targets.tolist() == [[2, 6], [2, 1], [3, 10], [0, 1]]


def test_filling_takes_the_best_step_first():
    # K = 1, 2 blocks. Left: 1 page. Layer 1 (θ = 0.5 of 1): the other block brings 0.9·0.5 = 0.45, one more
    # expert 0.05; layer 2: 0.25 and 0.25.
    layers = curves([[0.9, 1.0], [0.5, 1.0]])
    start = np.array([[1, 1], [1, 1]], dtype=np.int32)
    assert filled(start, layers, np.zeros(2), 2, 3).tolist() == [[1, 2], [1, 1]]
    assert filled(start, layers, np.zeros(2), 2, 8).tolist() == [[2, 2], [2, 2]]


@pytest.mark.parametrize("share", [0.01, 0.1, 0.33, 0.77, 1.0])
def test_less_than_an_expert_is_left(share):
    found = RoutingCurves.of(realistic(3, 6, 16, 4), CacheSettings(), 4)
    pages = int(6 * 16 * 7 * share)
    targets, _ = moepic_targets(found, Costs(1e-4, 3e-4, 1e-3, load=4e-4), 7, pages)
    assert 0 <= pages - pages_of(targets) < 7
