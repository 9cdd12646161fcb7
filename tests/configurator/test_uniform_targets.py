from __future__ import annotations

import numpy as np
import pytest

from moechat.configurator.systems import CacheSettings
from moechat.configurator.transit_reserve import uniform_targets
from moechat.configurator.uniform import first_layers, kept_blocks, most_popular, same_for_all
from moechat.geometry import ExpertGeometry


@pytest.mark.parametrize(("split", "blocks"), [(1.0, 8), (0.5, 4), (0.55, 4), (0.001, 1)])
def test_blocks_of_a_split(split, blocks):
    assert kept_blocks(split, 8) == blocks


def test_same_number_for_all_to_within_one():
    assert same_for_all(3, 4, 2, 15, 1.0).tolist() == [[3, 2], [2, 2], [2, 2]]
    assert same_for_all(3, 4, 2, 5, 0.5).tolist() == [[2, 1], [2, 1], [1, 1]]
    assert same_for_all(3, 4, 2, 1, 1.0)[:, 0].tolist() == [0, 0, 0]


def test_remaining_pages_enlarge_the_share():
    # θ = 0.5 of 4 blocks: 3 experts take 6 pages a layer. 3 more make it 3 blocks of 4 in one layer.
    assert same_for_all(2, 3, 4, 20, 0.5).tolist() == [[3, 3], [3, 3]]
    assert same_for_all(2, 3, 4, 21, 0.5).tolist() == [[3, 4], [3, 3]]
    assert same_for_all(2, 3, 4, 24, 0.5).tolist() == [[3, 4], [3, 4]]
    assert same_for_all(2, 3, 4, 1000, 0.5).tolist() == [[3, 4], [3, 4]]


def test_transfers_in_flight_have_a_reserve_and_layers_share_the_rest_equally():
    geometry = ExpertGeometry(hidden_size=64, intermediate_size=4 * 64, num_experts=3, bits=4)
    settings = CacheSettings(split=0.5, prefetch_experts=0)
    # Two experts a token: up to 8 pages, of which half are reserved. Of 19, 15 are left: 2 blocks of each
    # of 3 experts take 12.
    targets, reserve = uniform_targets(geometry, 2, 19, 2, settings, far_computes=False)
    assert (targets.tolist(), reserve) == ([[3, 3], [3, 2]], 4)
    targets, reserve = uniform_targets(geometry, 2, 7, 2, settings, far_computes=False)  # at most half
    assert (targets.tolist(), reserve) == ([[1, 2], [1, 2]], 3)
    targets, reserve = uniform_targets(geometry, 2, 26, 2, settings, far_computes=False)  # what is over
    assert (targets.tolist(), reserve) == ([[3, 4], [3, 4]], 2)


def test_nothing_is_reserved_where_nothing_moves():
    geometry = ExpertGeometry(hidden_size=64, intermediate_size=4 * 64, num_experts=3, bits=4)
    still = CacheSettings(miss="compute", prefetch="none")

    def reserve(settings, *, far_computes):
        return uniform_targets(geometry, 2, 19, 2, settings, far_computes=far_computes)[1]

    assert reserve(still, far_computes=True) == 1
    assert reserve(still, far_computes=False) == 4  # all that is missing is fetched
    assert reserve(CacheSettings(miss="both", prefetch="none"), far_computes=True) == 4


def test_first_layers_are_full():
    assert first_layers(3, 4, 2, 13, 1.0).tolist() == [[4, 2], [2, 2], [0, 2]]
    assert first_layers(3, 4, 2, 1000, 1.0)[:, 0].tolist() == [4, 4, 4]


def test_popular_experts_of_the_whole_model():
    counts = np.array([[5, 1, 9, 0], [4, 4, 4, 4], [0, 0, 0, 8]])
    # 9, 8, 5, then the first two of layer 2
    assert most_popular(counts, 2, 11, 1.0).tolist() == [[2, 2], [2, 2], [1, 2]]
    assert most_popular(counts, 2, 1000, 1.0)[:, 0].tolist() == [4, 4, 4]


def test_equally_popular_experts_are_taken_in_turn():
    assert most_popular(np.zeros((4, 8), np.int64), 1, 10, 1.0)[:, 0].tolist() == [3, 3, 2, 2]
