"""The sub-problem of one layer and the chain of layers, against values computed by hand."""

from __future__ import annotations

import numpy as np
import pytest
from configurator_support import curves

from moechat.configurator.costs import Costs
from moechat.configurator.expert_split import expert_split, solve, split_ratio
from moechat.configurator.exposure import PaperModel


def test_split_ratio_is_the_share_of_each_expert_and_at_most_one():
    assert split_ratio(np.array([3.0]), np.array([2.0, 3.0, 4.0, 12.0])).tolist() == [1.0, 1.0, 0.75, 0.25]


def solved(layer_curves, volume, window, split=None):
    experts, loaded = solve(layer_curves, 0, np.array([volume]), np.array([window]), 2.0, split)
    return int(experts[0]), pytest.approx(float(loaded[0]))


def test_best_number_of_experts_depends_on_the_window():
    # K = 1, N = 2, P = (1). One expert whole: m = 0.3, and 1 - 0.3 = 0.7 loads bring 0.7 more.
    # Two halves: m = 0.5, and 1 - 1·0.5 = 0.5 loads bring 0.5 more. T_load = 2.
    layer = curves([[0.3, 1.0]], [[1.0]], [[[0.3, 1.0]]])
    assert solved(layer, 1.0, 0.0) == (2, 0.5)
    assert solved(layer, 1.0, 0.4) == (2, 0.7)
    assert solved(layer, 1.0, 1.0) == (2, 1.0)
    assert solved(layer, 1.0, 1.4) == (1, 1.0)  # both are complete: the smaller C
    skewed = curves([[0.7, 1.0]], [[1.0]], [[[0.7, 1.0]]])
    assert solved(skewed, 1.0, 0.0) == (1, 0.7)
    assert solved(skewed, 1.0, 0.2) == (1, 0.8)
    assert solved(skewed, 1.0, 0.6) == (1, 1.0)


def test_without_memory_only_prefetches_remain():
    layer = curves([[0.3, 1.0]], [[0.8]], [[[0.3, 1.0]]])
    assert solved(layer, 0.0, 1.0) == (0, 0.5 * 0.8)


def test_given_split_decides_the_number():
    # θ = 0.5: three halves are 1.5 experts; four would be 2.
    layer = curves([[0.4, 0.7, 0.9, 1.0]])
    assert solved(layer, 1.5, 0.0, split=0.5) == (3, 0.45)
    assert solved(layer, 0.4, 0.0, split=0.5) == (0, 0.0)


def test_each_layer_passes_its_window_to_the_next():
    # K = 1, T_load = 2, T_moe = 1, T_att = 0.2, T_head = 0.4; every layer keeps one expert of two, P = (0.5),
    # PH(1, 1) = 0.
    layer = curves([[0.6, 1.0]] * 3, [[0.5]] * 3, [[[0.0, 1.0]]] * 3)
    model = PaperModel(Costs(attention=0.2, moe=1.0, head=0.4, load=2.0), 1)
    split = expert_split(layer, model, np.array([[1.0, 1.0, 0.0]]))
    # Layer 1: W = 0.6, 0.3 loads; C = 1: m = 0.6 + 0.3·0.5 = 0.75; C = 2, θ = 0.5: the prefetch takes 0.5
    # loads: m = 0.5 + 0.15. hide 0.75, miss 0.5: T = 0, W = 1 - 0.5 + 0.2 = 0.7.
    # Layer 2: 0.35 loads: m = 0.6 + 0.175 = 0.775; hide 0.775, miss 0.45; W = 0.75.
    # Layer 3, nothing kept: 0.375 loads: m = 0.1875; hide 0.1875, miss 1.625: T = 1.4375.
    assert split.experts.tolist() == [[1, 1, 0]]
    assert split.windows[0] == pytest.approx([0.6, 0.7, 0.75])
    assert split.loaded[0] == pytest.approx([0.75, 0.775, 0.1875])
    assert split.exposed[0] == pytest.approx([0.0, 0.0, 1.4375])


def test_variants_do_not_disturb_each_other():
    layer = curves([[0.5, 0.8, 1.0]] * 4, [[0.7]] * 4, [[[0.4, 0.7, 1.0]]] * 4)
    model = PaperModel(Costs(0.1, 0.5, 0.2, load=0.6), 1)
    volumes = np.random.default_rng(0).uniform(0, 3, (5, 4))
    together = expert_split(layer, model, volumes)
    for i, one in enumerate(volumes):
        alone = expert_split(layer, model, one[None])
        assert (alone.exposed[0] == together.exposed[i]).all()
        assert (alone.experts[0] == together.experts[i]).all()
