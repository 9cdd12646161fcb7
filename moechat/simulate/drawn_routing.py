"""Routing drawn from statistics, for simulations of a model whose routing was counted but not recorded."""

from __future__ import annotations

import numpy as np

from moechat.routing.statistics import RoutingStatistics
from moechat.routing.trace import Trace


def draw_routing(statistics: RoutingStatistics, tokens: int, *, seed: int = 0) -> Trace:
    """Draw a trace in which recently used experts return as often as in the statistics.

    Every layer keeps its experts in order of their last use. A token takes ``top_k`` places of that order,
    with the probabilities of the ranks in the statistics, and moves their experts to the front. So the share
    of activations that hit with C cached experts is ``H(C)`` of the statistics under LRU, and about that
    under their own policy. Layers are independent of each other.

    Args:
        statistics: Counts, or the defaults of a family.
        tokens: Tokens to draw, at least 1.
        seed: Random seed.
    """
    generator = np.random.default_rng(seed)
    layers, experts = statistics.activations.shape
    # A rank that was never counted still occurs now and then.
    likely = np.log(statistics.ranks + 0.5).astype(np.float32)
    order = np.argsort(generator.random((layers, experts)), axis=1)
    chosen = np.empty((tokens, layers, statistics.top_k), dtype=np.int32)
    for token in range(tokens):
        drawn = likely + generator.gumbel(size=likely.shape)
        taken = np.argpartition(drawn, -statistics.top_k, axis=1)[:, -statistics.top_k :]
        chosen[token] = np.take_along_axis(order, taken, axis=1)
        waits = np.ones(order.shape, dtype=bool)
        np.put_along_axis(waits, taken, False, axis=1)
        order = np.take_along_axis(order, np.argsort(waits, axis=1, kind="stable"), axis=1)
    return Trace(chosen, np.array([0, tokens], dtype=np.int64), experts)
