"""Which experts a model uses most, over all its layers: the first content of a near tier."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from moechat.routing.statistics import RoutingStatistics

# Experts with smaller shares of the tokens are not worth a page that a prompt would have to take back.
_LEAST_SHARE = 0.01
# Counted tokens from which an order is worth following.
LEAST_TOKENS = 100


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


def shares_of_tokens(experts: npt.NDArray[np.integer], num_experts: int) -> npt.NDArray[np.float64]:
    """Shares of the tokens that chose each expert, float64 ``[layers, num_experts]``.

    Args:
        experts: ``[tokens, layers, top_k]``: the choices of one token at least.
        num_experts: Experts of a layer.
    """
    tokens, layers, _ = experts.shape
    spots = experts + num_experts * np.arange(layers)[:, None]
    counts = np.bincount(spots.ravel(), minlength=layers * num_experts)
    return np.asarray(counts.reshape(layers, num_experts) / tokens)


def long_run(
    shares: npt.NDArray[np.float64], room: int
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """The experts that stay in the long run, and those that make way for them.

    Args:
        shares: float64 ``[layers, experts]``.
        room: Experts that there are pages for.

    Returns:
        int32 ``[n, 2]`` of layer and expert: the most used, hottest first, ``room`` at most; and all others,
        coldest first.
    """
    hot = hottest_first(shares)[:room]
    left = np.ones(shares.shape, dtype=bool)
    left[hot[:, 0], hot[:, 1]] = False
    layers, experts = np.nonzero(left)
    order = np.argsort(shares[layers, experts], kind="stable")
    cold = np.stack([layers[order], experts[order]], axis=1)
    return np.ascontiguousarray(hot), np.ascontiguousarray(cold, dtype=np.int32)
