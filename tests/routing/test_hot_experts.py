"""Which experts stay in the long run."""

from __future__ import annotations

import numpy as np

from moechat.routing.hot_experts import long_run, shares_of_tokens


def test_shares_count_every_choice_of_every_layer() -> None:
    chosen = np.array([[[0, 1], [3, 2]], [[1, 2], [3, 0]], [[1, 0], [3, 2]], [[1, 3], [1, 2]]], np.int32)
    assert shares_of_tokens(chosen, 4).tolist() == [[0.5, 1, 0.25, 0.25], [0.25, 0.25, 0.75, 0.75]]


def test_the_most_used_experts_of_all_layers_stay_and_the_least_used_make_way_first() -> None:
    shares = np.array([[0.5, 0.9, 0.001, 0.3], [0.2, 0.0, 0.8, 0.4]])
    hot, cold = long_run(shares, 3)
    assert hot.tolist() == [[0, 1], [1, 2], [0, 0]]
    assert cold.tolist() == [[1, 1], [0, 2], [1, 0], [0, 3], [1, 3]]
    assert hot.dtype == cold.dtype == np.int32


def test_experts_that_are_hardly_ever_chosen_are_worth_no_page() -> None:
    hot, cold = long_run(np.array([[0.5, 0.001, 0.0]]), 3)
    assert hot.tolist() == [[0, 0]]
    assert cold.tolist() == [[0, 2], [0, 1]]
