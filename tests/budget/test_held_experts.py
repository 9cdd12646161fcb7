"""Which experts the host's memory holds behind a GPU."""

from __future__ import annotations

import numpy as np
import pytest

from moechat.budget.held_experts import HOST_BYTES, choose_experts, experts_held


def test_as_many_experts_are_held_as_fit_beside_the_process() -> None:
    assert experts_held(HOST_BYTES + 10 * 100, 16, 100) == 10
    assert experts_held(HOST_BYTES + 10 * 100 - 1, 16, 100) == 9
    assert experts_held(HOST_BYTES + 99 * 100, 16, 100) == 16
    assert experts_held(1 << 20, 16, 100) == 0
    # A process that is larger already leaves less, a smaller one will grow.
    assert experts_held(HOST_BYTES + 1000, 16, 100, HOST_BYTES + 500) == 5
    assert experts_held(HOST_BYTES + 1000, 16, 100, 1) == 10


def test_without_statistics_layers_hold_equally_many() -> None:
    held = choose_experts(4, 8, 18, None)
    assert [layer.tolist() for layer in held] == [[0, 1, 2, 3, 4]] * 2 + [[0, 1, 2, 3]] * 2


@pytest.mark.parametrize("count", [0, 1, 7, 31, 32])
def test_the_most_activated_experts_of_all_layers_are_held(count: int) -> None:
    rng = np.random.default_rng(count)
    activations = rng.permutation(32).reshape(4, 8).astype(np.int64)
    held = choose_experts(4, 8, count, activations)
    assert all(layer.dtype == np.int32 and (np.diff(layer) > 0).all() for layer in held)
    chosen = np.concatenate([activations[layer, experts] for layer, experts in enumerate(held)])
    assert sorted(chosen) == list(range(32 - count, 32))
