"""Routing drawn from statistics, for simulations of a model whose routing was counted but not recorded."""

from __future__ import annotations

import numpy as np

from moechat import _native
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
    # A rank that was never counted still occurs now and then.
    likely = np.ascontiguousarray(statistics.ranks + 0.5, dtype=np.float64)
    chosen = _native.draw_routing(likely, statistics.top_k, tokens, seed)
    return Trace(chosen, np.array([0, tokens], dtype=np.int64), statistics.activations.shape[1])
