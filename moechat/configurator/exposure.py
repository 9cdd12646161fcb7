"""Exposed load time of a layer, and its window for the prefetches of the next layer.

Two models: :class:`PaperModel` has MoEpic's equations 5 to 7 unchanged, :class:`EngineModel` describes this
engine. Both depend only on K, the times, and m, the activated experts in the near tier when the router is
done.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from moechat.configurator.costs import Costs
from moechat.configurator.systems import COMPUTED_FAR, CacheSettings

Floats = npt.NDArray[np.float64]
# Replace 0 and infinity, which would lead to NaN.
_INSTANT, _NEVER = 1e-15, 1e15


class LayerModel(Protocol):
    """Times of a layer by m."""

    @property
    def costs(self) -> Costs: ...
    @property
    def top_k(self) -> int: ...
    @property
    def averages(self) -> bool:
        """Whether times are averaged over tokens with few and many hits, instead of taken at the mean m."""
        ...

    def times(self, loaded: Floats) -> tuple[Floats, Floats]:
        """Exposed seconds of a layer and prefetch window of the next layer, by m (any shape)."""
        ...


def first_window(costs: Costs) -> float:
    """``W_1 = T_head + T_att`` (section 3.4.1): the first layer is predicted from the previous token.

    A lower bound: the engine can start a little earlier, during the last layer.
    """
    return costs.head + costs.attention


@dataclass(frozen=True)
class PaperModel:
    """MoEpic, equations 5 to 7, with m for α + βθ and K − m for β(1 − θ) + γ (end of section 3.4.2).

    Missing experts are computed after all have arrived.
    """

    costs: Costs
    top_k: int

    @property
    def averages(self) -> bool:
        """``False``: the paper's equations use the mean m."""
        return False

    def times(self, loaded: Floats) -> tuple[Floats, Floats]:
        """``T = max(0, T_miss − T_hide)`` and ``W = T_moe − min(T_hide, T_miss) + T_att``."""
        costs = self.costs
        hide = loaded * (costs.moe / self.top_k)  # 5
        miss = (self.top_k - loaded) * costs.load
        exposed = np.maximum(miss - hide, 0.0)  # 6
        window = costs.moe - np.minimum(hide, miss) + costs.attention  # 7
        return exposed, window


@dataclass(frozen=True)
class EngineModel:
    """Times of this engine, which computes missing blocks as they arrive or in the far tier.

    With ``r = K − m`` missing experts, ``T_exp = T_moe / K`` and ``l = latency·min(1, r)`` (r below 1 is the
    probability that anything is missing), the last missing block is done at

    - ``fetch``: ``l + r·max(T_load, T_exp) + g·min(T_load, T_exp)``: a two-stage pipeline with a grain g of
      one block, or one expert with ``whole_experts``, but at most r;
    - ``compute``: ``r·T_far``, while the near tier computes its own experts;
    - ``both``: the minimum of these two and of sharing, with the sum of the rates measured together:
      ``t = (r + l / T_load') / (1 / T_load' + 1 / T_far')``, and one more grain for blocks from the link.

    Meanwhile the near tier computes, so ``exposed = max(0, done − T_moe)``. The layer takes ``T_moe +
    exposed``. The part of that in which the link is not busy with demands, plus the next layer's ``T_att``,
    is the window of the next layer's prefetches. If the far tier cannot compute (``compute_far`` is
    infinite), everything is fetched.

    The mean of exposed times exceeds the exposed time of the mean: an expert that is cached every second
    time, and otherwise needs two windows to arrive, is not on time on average. So the times are averaged over
    two outcomes of m (:func:`moechat.configurator.curves.two_outcomes`). Splitting helps because it reduces
    the variance of the missing experts.

    Attributes:
        costs: Costs of the machine and the model.
        top_k: K.
        miss: ``fetch``, ``compute`` or ``both``.
        grain: Part of an expert computed at a time: ``1 / B`` or 1.
    """

    costs: Costs
    top_k: int
    miss: str
    grain: float

    @property
    def averages(self) -> bool:
        """``True``; see above."""
        return True

    @classmethod
    def of(cls, settings: CacheSettings, costs: Costs, top_k: int, blocks: int) -> EngineModel:
        """The model for given settings."""
        miss = settings.miss if costs.far_computes else "fetch"
        return cls(costs, top_k, miss, 1.0 if settings.whole_experts else 1.0 / blocks)

    def times(self, loaded: Floats) -> tuple[Floats, Floats]:
        """See :class:`EngineModel`."""
        costs = self.costs
        missing = np.maximum(self.top_k - loaded, 0.0)
        if self.miss in COMPUTED_FAR:
            done, busy = missing * costs.compute_far, np.zeros_like(missing)
        else:
            compute = costs.moe / self.top_k
            latency = min(costs.latency, _NEVER) * np.minimum(missing, 1.0)
            slow, quick = max(costs.load, compute), min(costs.load, compute)
            done = latency + missing * slow + np.minimum(missing, self.grain) * quick
            busy = latency + missing * costs.load
            if self.miss == "both":
                done, busy = self._shared(missing, latency, compute, done, busy)
        exposed = np.maximum(done - costs.moe, 0.0)
        return exposed, np.maximum(costs.moe + exposed - busy, 0.0) + costs.attention

    def _shared(
        self, missing: Floats, latency: Floats, compute: float, done: Floats, busy: Floats
    ) -> tuple[Floats, Floats]:
        """Minimum of the link alone (given), the far tier alone, and both."""
        link = min(max(self.costs.both_loads, _INSTANT), _NEVER)
        far = min(max(self.costs.both_computes, _INSTANT), _NEVER)
        drained = (missing + latency / link) / (1 / link + 1 / far)
        shares = drained > latency  # else the far tier is done before the first block arrives
        fetched = np.maximum(drained - latency, 0.0) / link
        together = np.where(shares, drained + np.minimum(fetched, self.grain) * compute, missing * far)
        quicker = together < done
        done = np.where(quicker, together, done)
        busy = np.where(quicker, np.where(shares, drained, 0.0), busy)
        alone = missing * self.costs.compute_far
        quicker = alone < done
        return np.where(quicker, alone, done), np.where(quicker, 0.0, busy)
