"""Prediction by the next layer's own router (MoEpic, section 3.2; Eliseev and Mazur, 2023, section 3.2)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch


class RankingRouter(Protocol):
    """A layer's router; :func:`moechat.models.router_search.find_routers` finds them, and says more about
    them.

    Attributes:
        weight: float32 ``[experts, hidden]``, contiguous.
        bias: float32 ``[experts]`` added to the product, or ``None``.
        scoring: ``none``, ``sigmoid`` or ``softmax``: applied before the correction.
        correction: float32 ``[experts]`` added after it, or ``None``.
    """

    @property
    def weight(self) -> torch.Tensor: ...
    @property
    def bias(self) -> torch.Tensor | None: ...
    @property
    def scoring(self) -> str: ...
    @property
    def correction(self) -> torch.Tensor | None: ...


class NextRouterPredictor:
    """Applies the next layer's router to the input of this layer's experts, as the residual stream changes
    little.

    Layer 0 is predicted from the input of the last layer's experts for the previous token.

    Args:
        routers: One per expert layer, in order; ``None`` for a layer that is not predicted.
    """

    def __init__(self, routers: Sequence[RankingRouter | None]) -> None:
        self._layers = len(routers)
        experts = max((len(router.weight) for router in routers if router is not None), default=0)
        # Not an inference tensor, so that it can be written inside and outside of inference mode.
        with torch.inference_mode(False):
            self._buffer = torch.empty(experts, dtype=torch.float32)
        self._scores = self._buffer.numpy()
        self._rankings = [None if router is None else self._ranking(router) for router in routers]

    def scores(self, ordinal: int, ahead: int, hidden: torch.Tensor) -> npt.NDArray[np.float32] | None:
        """See :meth:`moechat.predict.Predictor.scores`."""
        ranking = self._rankings[(ordinal + ahead) % self._layers]
        if ranking is None:
            return None
        ranking(hidden[0])
        return self._scores

    def _ranking(self, router: RankingRouter) -> Callable[[torch.Tensor], object]:
        """Create a function that writes a layer's scores into the buffer.

        Softmax and sigmoid keep the order, so they are computed only if a correction is added after them.
        """
        buffer = self._buffer
        product: Callable[[torch.Tensor], object]
        if router.bias is None:
            product = partial(torch.mv, router.weight, out=buffer)
        else:
            product = partial(torch.addmv, router.bias, router.weight, out=buffer)
        correction, scoring = router.correction, router.scoring
        if correction is None:
            return product

        def corrected(hidden: torch.Tensor) -> None:
            product(hidden)
            if scoring == "sigmoid":
                torch.sigmoid(buffer, out=buffer)
            elif scoring == "softmax":
                torch.softmax(buffer, 0, out=buffer)
            torch.add(buffer, correction, out=buffer)

        return corrected
