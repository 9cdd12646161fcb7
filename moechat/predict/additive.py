"""Prediction by a router, corrected by what its predictions have missed (ExpertFlow, section 3.2.3).

ExpertFlow fits a random forest to what the pre-gate leaves over, which costs milliseconds a layer in Python.
Here the correction is a table, the mean of (chosen - predicted) for each distance, layer and expert, learned
while tokens are decoded.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from moechat.predict.next_router import NextRouterPredictor, RankingRouter

# Weight of the newest token in the mean.
_NEWEST = 0.02
_LEAST = np.float32(1e-9)


class AdditivePredictor:
    """A router's distribution plus a learned correction.

    Args:
        routers: As for :class:`~moechat.predict.next_router.NextRouterPredictor`.
        experts: Experts of a layer.
        depth: Most layers ahead.
    """

    def __init__(self, routers: Sequence[RankingRouter | None], experts: int, depth: int) -> None:
        self._inner = NextRouterPredictor(routers)
        self._layers = len(routers)
        self._missed = np.zeros((depth, self._layers, experts), dtype=np.float32)
        self._pending: dict[int, tuple[int, npt.NDArray[np.float32]]] = {}

    def scores(self, ordinal: int, ahead: int, hidden: torch.Tensor) -> npt.NDArray[np.float32] | None:
        """See :meth:`moechat.predict.Predictor.scores`."""
        found = self._inner.scores(ordinal, ahead, hidden)
        if found is None or ahead > len(self._missed):
            return found
        target = (ordinal + ahead) % self._layers
        shares = np.exp(found - found.max())
        shares /= shares.sum()
        self._pending[target] = (ahead, shares)
        # Logarithms: whoever asks takes scores for those of a softmax.
        corrected: npt.NDArray[np.float32] = np.log(
            np.maximum(shares + self._missed[ahead - 1, target], _LEAST)
        )
        return corrected

    def observe(self, ordinal: int, chosen: npt.NDArray[np.int64]) -> None:
        """A router has chosen: learn from the prediction of its layer, if there was one.

        Args:
            ordinal: Expert layer.
            chosen: ``[k]``.
        """
        made = self._pending.pop(ordinal, None)
        if made is None:
            return
        ahead, shares = made
        missed = self._missed[ahead - 1, ordinal]
        error = -shares
        error[chosen] += np.float32(1 / max(1, len(chosen)))
        missed += np.float32(_NEWEST) * (error - missed)
