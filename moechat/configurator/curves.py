"""The activated experts that cache and prefetches have brought near before the router is done: m of MoEpic,
equation 11.

Amounts are in experts: half of an expert's blocks are 0.5. Times are in loads, multiples of ``T_load``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from moechat.configurator.systems import CacheSettings
from moechat.routing.statistics import RoutingStatistics

Floats = npt.NDArray[np.float64]
# Smaller probabilities count as 0, as divisions by them overflow.
_CERTAIN = 1e-9


@dataclass(frozen=True)
class RoutingCurves:
    """``H``, ``P`` and ``PH`` for a plan, limited to the experts that the settings prefetch.

    Attributes:
        top_k: K, at most the number of experts.
        hit: ``H(C)``: float64 ``[layers, experts + 1]``, from 0 at C = 0 to 1 at all experts.
        accuracy: ``P(y)``: float64 ``[layers, depth]``; depth is the most experts prefetched.
        cached: ``PH(y, C)``: float64 ``[layers, depth, experts + 1]``.
    """

    top_k: int
    hit: Floats
    accuracy: Floats
    cached: Floats

    @property
    def layers(self) -> int:
        """Number of expert layers."""
        return len(self.hit)

    @property
    def experts(self) -> int:
        """Experts per layer."""
        return int(self.hit.shape[1]) - 1

    @property
    def depth(self) -> int:
        """Most experts prefetched for a layer."""
        return int(self.accuracy.shape[1])

    @classmethod
    def of(cls, statistics: RoutingStatistics, settings: CacheSettings, top_k: int) -> RoutingCurves:
        """Curves from counts.

        A layer without counts has ``H(C) = C / N``, as for random routing, and no prediction. ``whole-layer``
        fetches experts in order of their indices: each is needed with probability K / N and cached with
        C / N. ``perfect`` has P = 1 for the K needed experts, cached like others. Limits by
        ``prefetch_bytes`` and windows longer than a layer (``lookahead``) are not modelled.

        Raises:
            ValueError: ``top_k`` is below 1.
        """
        if top_k < 1:
            raise ValueError(f"top_k is {top_k}; it must be at least 1")
        layers, experts = statistics.layers, statistics.experts
        k = min(top_k, experts)
        evenly = np.arange(experts + 1) / experts
        counted = statistics.ranks.sum(axis=1) > 0
        hit = np.where(counted[:, None], statistics.hit_rate, evenly)
        hit[:, -1] = 1.0
        most = min(settings.ranked_experts(k), experts)
        if settings.predicts:
            depth = min(most, statistics.depth)
            accuracy = statistics.prediction_accuracy[:, :depth]
            cached = statistics.prediction_hit_rate[:, :depth]
        elif settings.prefetch == "perfect":
            depth = min(most, k)
            accuracy = np.ones((layers, depth))
            cached = np.broadcast_to(hit[:, None, :], (layers, depth, experts + 1))
        elif settings.prefetch == "whole-layer":
            accuracy = np.full((layers, experts), k / experts)
            cached = np.broadcast_to(evenly, (layers, experts, experts + 1))
        else:
            accuracy = np.empty((layers, 0))
            cached = np.empty((layers, 0, experts + 1))
        # Counts from a damaged file may be inconsistent, so shares are clipped.
        return cls(k, np.clip(hit, 0, 1), np.clip(accuracy, 0, 1), np.clip(cached, 0, 1))

    @cached_property
    def _outcomes(self) -> tuple[Floats, Floats, Floats]:
        shares, weights = two_outcomes(self.hit, self.top_k)
        return shares, weights, cached_at(self.cached, self.hit[:, None], shares[:, :, None])

    def loaded(self, layer: int, experts: int, theta: float, window: float) -> float:
        """``m`` of one layer for C experts, a share θ of each, and a prefetch window in loads;
        :func:`amount`.
        """
        total, left = self.top_k * float(self.hit[layer, experts]) * theta, window
        for share, right in zip(
            self.cached[layer, :, experts].tolist(), self.accuracy[layer].tolist(), strict=True
        ):
            if left <= 0:
                break
            part = min(1.0 - share * theta, left)
            total += part * right
            left -= part
        return float(min(total, self.top_k))

    def by_outcome(self, averages: bool) -> tuple[Floats, Floats, Floats]:
        """``H``, probabilities and ``PH`` by outcome.

        Args:
            averages: Distinguish tokens with few and many hits, see :func:`two_outcomes`; ``False``: one
                outcome, the mean.

        Returns:
            float64 ``[outcomes, layers, experts + 1]`` twice, and ``[outcomes, layers, depth, experts + 1]``.
        """
        if averages:
            return self._outcomes
        return self.hit[None], np.ones_like(self.hit)[None], self.cached[None]

    def amounts(
        self, layer: int, experts: npt.NDArray[np.int64], theta: Floats, window: Floats, averages: bool
    ) -> tuple[Floats, Floats]:
        """``m`` of one layer for several C, θ and windows, by outcome.

        Args:
            layer: Index of the layer.
            experts: C, ``[n]``.
            theta: θ, ``[n]``.
            window: Windows in loads, ``[n]``.
            averages: As in :meth:`by_outcome`.

        Returns:
            Probabilities and m, each ``[outcomes, n]``.
        """
        shares, weights, cached = (part[:, layer] for part in self.by_outcome(averages))
        sizes = prefetch_sizes(cached[..., experts].transpose(1, 0, 2), theta)
        accuracy = self.accuracy[layer, :, None, None]
        return weights[:, experts], amount(self.top_k, shares[:, experts], accuracy, sizes, theta, window)


def two_outcomes(hit: Floats, top_k: int) -> tuple[Floats, Floats]:
    """Approximate the distribution of hits by a token with few and one with many hits.

    If each of the K activated experts hits with probability H, independently, the number of hits is binomial.
    Two shares of hits with two weights have the same mean, variance and skewness (Gaussian quadrature, with
    nodes in [0, 1]); for K = 1 they are 0 and 1 with weights 1 - H and H.

    Args:
        hit: ``H``, any shape.
        top_k: K.

    Returns:
        Shares and weights, each ``[2, ...]``, few hits first.
    """
    spread = np.sqrt(hit * (1 - hit) / top_k)
    spread[spread < _CERTAIN] = 0.0
    skewness = np.divide(1 - 2 * hit, spread * top_k, out=np.zeros_like(hit), where=spread > 0)
    root = np.sqrt(skewness**2 + 4)
    shares = np.stack([hit + spread * (skewness - root) / 2, hit + spread * (skewness + root) / 2])
    many = (1 - skewness / root) / 2
    return np.clip(shares, 0.0, 1.0), np.stack([1 - many, many])


def cached_at(cached: Floats, hit: Floats, share: Floats) -> Floats:
    """``PH(y, C)`` of tokens with this share of hits; its mean over the two outcomes is ``PH``.

    If more of the activated experts are cached, so are more of the predicted ones: by the same factor or, if
    predicted experts are cached more often than activated ones, with the complement reduced by the same
    factor.
    """
    up = np.divide(cached, hit, out=np.zeros(np.broadcast(cached, hit).shape), where=hit > _CERTAIN)
    down = np.divide(1 - cached, 1 - hit, out=np.zeros(up.shape), where=hit < 1 - _CERTAIN)
    return np.clip(cached + (share - hit) * np.minimum(up, down), 0.0, 1.0)


def amount(top_k: int, hit: Floats, accuracy: Floats, sizes: Floats, theta: Floats, window: Floats) -> Floats:
    """``m``: activated experts expected in the near tier when the router is done (equations 10 and 11).

    ``m = K·H·θ + Σ_y part_y·P(y)``, at most K: prefetches arrive one at a time within the window; the last
    one may be partial, as single blocks are useful too.

    Args:
        top_k: K.
        hit: ``H(C)``; its shape and those below broadcast to a shape S.
        accuracy: ``P(y)``: ``[depth, *S]``.
        sizes: :func:`prefetch_sizes`: ``[depth, *S]``.
        theta: θ.
        window: W / T_load.

    Returns:
        float64, S.
    """
    total = np.asarray(top_k * hit * theta)
    left = np.array(np.broadcast_to(window, total.shape), dtype=total.dtype)
    part = np.empty_like(total)
    for size, share in zip(sizes, accuracy, strict=True):
        np.minimum(size, left, out=part)
        left -= part
        part *= share
        total += part
        if not left.any():
            break
    return np.minimum(total, top_k, out=total)


def prefetch_sizes(cached: Floats, theta: Floats) -> Floats:
    """``1 − PH(y, C)·θ``: duration of a prefetch in loads, and the experts it brings (equations 9 and 10).

    Args:
        cached: ``PH(y, C)``.
        theta: θ; broadcast with ``cached``.
    """
    sizes = np.multiply(cached, theta)
    return np.subtract(1.0, sizes, out=sizes)
