"""What is loaded while the program waits, and in place of what."""

from __future__ import annotations

import numpy as np

from moechat.offload.preload import into_free_pages, most_used, of_targets

SHARES = np.array([[0.5, 0.9, 0.1], [0.2, 0.6, 0.8]])


def test_free_pages_get_the_most_used_experts_and_nothing_makes_way() -> None:
    order = into_free_pages(SHARES)
    assert order.experts[:3].tolist() == [[0, 1], [1, 2], [1, 1]]
    assert order.replaceable is None


def test_the_most_used_take_all_the_room() -> None:
    order = most_used(SHARES, 2)
    assert order.experts.tolist() == [[0, 1], [1, 2]]
    assert order.replaceable is not None
    assert order.replaceable.tolist() == [[0, 2], [1, 0], [0, 0], [1, 1]]


def test_targets_get_the_highest_keys_of_each_layer_best_first() -> None:
    keys = np.array([[3.0, 1.0, 2.0, 0.0], [0.0, 5.0, 4.0, 6.0]])
    order = of_targets(keys, np.array([[1, 2], [3, 1]], np.int32))
    assert order.experts.tolist() == [[0, 0], [1, 3], [1, 1], [1, 2]]
    assert order.replaceable is not None
    assert order.replaceable.tolist() == [[1, 0], [0, 3], [0, 1], [0, 2]]
    assert order.to_targets
