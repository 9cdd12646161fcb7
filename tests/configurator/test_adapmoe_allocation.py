"""AdapMoE's expected loads against its published formula, and the division against all divisions."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from configurator_support import curves, drawn

from moechat.configurator.curves import RoutingCurves
from moechat.configurator.dynamic import expected_loads, fewest_loads
from moechat.configurator.systems import CacheSettings


def test_expected_loads_by_hand():
    # N = 8, K = 2, H = C / N, β = 0.8; with 3 cached: both missing 5·4/56, of which 2 - 0.8 are loaded on
    # demand; one missing 2·5·3/56, 1 - 0.8: 20/56·1.2 + 30/56·0.2 = 30/56.
    even = np.arange(1, 9) / 8
    loads = expected_loads(curves([even], [[0.9, 0.7]], top_k=2))
    assert loads[0, 3] == pytest.approx(30 / 56)
    # Nothing cached: 2 - 0.8. Seven: one missing with 2·1·7/56 = 0.25. All: none.
    assert loads[0, [0, 7, 8]] == pytest.approx([1.2, 0.25 * 0.2, 0.0])


def test_without_prefetches_loads_are_misses():
    loads = expected_loads(curves([[0.6, 0.9, 1.0]], top_k=2))
    assert loads[0] == pytest.approx([2.0, 0.8, 0.2, 0.0])


@pytest.mark.parametrize("concave", [True, False])
@pytest.mark.parametrize("seed", range(8))
def test_fewest_of_all_divisions(seed, concave):
    found = RoutingCurves.of(drawn(seed, 4, 5, 2, concave=concave), CacheSettings(), 2)
    loads = expected_loads(found)
    for experts in (0, 1, 3, 7, 12, 19, 20):
        targets = fewest_loads(found, 3, experts * 3 + 2, 1.0)
        assert targets[:, 0].sum() == experts
        assert (targets[:, 1] == 3).all()
        best = min(
            sum(loads[i, c] for i, c in enumerate(counts))
            for counts in product(range(6), repeat=4)
            if sum(counts) <= experts
        )
        assert sum(loads[i, c] for i, c in enumerate(targets[:, 0])) == pytest.approx(best, abs=1e-12)


def test_badly_predicted_layers_get_more():
    even = np.tile(np.arange(1, 9) / 8, (2, 1))
    targets = fewest_loads(curves(even, [[0.9], [0.2]], top_k=1), 4, 8 * 4, 1.0)
    assert targets[1, 0] > targets[0, 0]
