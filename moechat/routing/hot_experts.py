"""Which experts a model uses most, over all its layers: the first content of a near tier."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from moechat.routing.statistics import RoutingStatistics

# Experts with smaller shares of the tokens are not worth a page that a prompt would have to take back.
_LEAST_SHARE = 0.01


def expert_shares(statistics: RoutingStatistics) -> npt.NDArray[np.float64]:
    """Shares of the tokens that chose each expert, float64 ``[layers, experts]``."""
    return statistics.activations / max(1, statistics.tokens)


def hottest_first(shares: npt.NDArray[np.float64]) -> npt.NDArray[np.int32]:
    """Experts by share, int32 ``[n, 2]`` of layer and expert; those that are hardly ever chosen are left out.

    Args:
        shares: float64 ``[layers, experts]``.
    """
    order = np.argsort(-shares, axis=None, kind="stable")
    order = order[shares.ravel()[order] >= _LEAST_SHARE]
    layers, experts = np.unravel_index(order, shares.shape)
    return np.ascontiguousarray(np.stack([layers, experts], axis=1), dtype=np.int32)
