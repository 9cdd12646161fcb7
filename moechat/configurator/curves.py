"""What a layer's cache and prefetches bring near before its router has spoken: m of MoEpic, equation 11.

Amounts are in experts: half of an expert's blocks are 0.5. Times are in loads, that is multiples of
``T_load``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from moechat.configurator.systems import CacheSettings
from moechat.routing.statistics import RoutingStatistics

Floats = npt.NDArray[np.float64]
# What is rarer never happens: divided by it, numbers overflow.
_CERTAIN = 1e-9


@dataclass(frozen=True)
class RoutingCurves:
    """``H``, ``P`` and ``PH`` as a plan uses them: what the settings do not fetch ahead is left out.

    Attributes:
        top_k: K, at most the experts of a layer.
        hit: ``H(C)``: float64 ``[layers, experts + 1]``, 0 at 0 and 1 at all experts.
        accuracy: ``P(y)``: float64 ``[layers, depth]``; depth is the most experts fetched ahead.
        cached: ``PH(y, C)``: float64 ``[layers, depth, experts + 1]``.
    """

    top_k: int
    hit: Floats
    accuracy: Floats
    cached: Floats

    @property
    def layers(self) -> int:
        """Expert layers."""
        return len(self.hit)

    @property
    def experts(self) -> int:
        """Experts of a layer."""
        return int(self.hit.shape[1]) - 1

    @property
    def depth(self) -> int:
        """Most experts fetched ahead for a layer."""
        return int(self.accuracy.shape[1])

    @classmethod
    def of(cls, statistics: RoutingStatistics, settings: CacheSettings, top_k: int) -> RoutingCurves:
        """Curves of what was counted.

        A layer without counts has ``H(C) = C / N``, as if experts were chosen at random, and no prediction.
        ``whole-layer`` fetches experts in order of their numbers: each is needed with K / N, each is cached
        with C / N. ``perfect`` has P = 1 for the K experts that will be needed, cached as others are. Limits
        by ``prefetch_bytes`` and windows longer than a layer (``lookahead``) are not modelled.

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
        most = min(k if settings.prefetch_experts is None else settings.prefetch_experts, experts)
        if settings.prefetch == "next-router":
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
        # Counts of a foreign or damaged file may be inconsistent; shares are shares all the same.
        return cls(k, np.clip(hit, 0, 1), np.clip(accuracy, 0, 1), np.clip(cached, 0, 1))

    @cached_property
    def _outcomes(self) -> tuple[Floats, Floats, Floats]:
        shares, weights = two_outcomes(self.hit, self.top_k)
        return shares, weights, cached_at(self.cached, self.hit[:, None], shares[:, :, None])

    def loaded(self, layer: int, experts: int, theta: float, window: float) -> float:
        """``m`` of one layer for C experts, θ of each, and a prefetch window in loads; see :func:`amount`."""
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
        """``H``, chances and ``PH`` by outcome.

        Args:
            averages: Tell tokens with few hits from those with many, see :func:`two_outcomes`; otherwise
                there is one outcome, the mean.

        Returns:
            Float64 ``[outcomes, layers, experts + 1]``, the same, and ``[outcomes, layers, depth, experts +
            1]``.
        """
        if averages:
            return self._outcomes
        return self.hit[None], np.ones_like(self.hit)[None], self.cached[None]

    def amounts(
        self, layer: int, experts: npt.NDArray[np.int64], theta: Floats, window: Floats, averages: bool
    ) -> tuple[Floats, Floats]:
        """The same for several C, θ and windows, each ``[n]``, of one layer, by outcome.

        Args:
            layer: Which.
            experts: C.
            theta: θ.
            window: Loads.
            averages: As in :meth:`by_outcome`.

        Returns:
            Chances and m, each ``[outcomes, n]``.
        """
        shares, weights, cached = (part[:, layer] for part in self.by_outcome(averages))
        sizes = prefetch_sizes(cached[..., experts].transpose(1, 0, 2), theta)
        accuracy = self.accuracy[layer, :, None, None]
        return weights[:, experts], amount(self.top_k, shares[:, experts], accuracy, sizes, theta, window)


def two_outcomes(hit: Floats, top_k: int) -> tuple[Floats, Floats]:
    """A token with few hits and one with many, which stand for all tokens.

    If each of the K activated experts hits with H, independently, the hits are binomial. Two shares of hits
    with two weights give the same mean, variance and skewness (Gauss's quadrature, whose nodes lie in
    [0, 1]); for K = 1 they are 0 and 1 with 1 - H and H.

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
    """``PH(y, C)`` of tokens with this share of hits; on average over two outcomes it is ``PH`` itself.

    Where more of the activated experts are cached, more of the predicted ones are: all by the same factor,
    or, where predicted ones are cached more often than activated ones, as much of what is not cached.
    """
    up = np.divide(cached, hit, out=np.zeros(np.broadcast(cached, hit).shape), where=hit > _CERTAIN)
    down = np.divide(1 - cached, 1 - hit, out=np.zeros(up.shape), where=hit < 1 - _CERTAIN)
    return np.clip(cached + (share - hit) * np.minimum(up, down), 0.0, 1.0)


def amount(top_k: int, hit: Floats, accuracy: Floats, sizes: Floats, theta: Floats, window: Floats) -> Floats:
    """``m``: activated experts, in experts, expected near when the router has spoken (equations 10 and 11).

    ``m = K·H·θ + Σ_y part_y·P(y)``: prefetches come one after the other while the window lasts; the last one
    may be a part, for a block is enough to be of use. At most K.

    Args:
        top_k: K.
        hit: ``H(C)``; all shapes here broadcast to one, S.
        accuracy: ``P(y)``: ``[depth, ...]``, each of ``depth`` as S.
        sizes: :func:`prefetch_sizes`: ``[depth, ...]``; likewise.
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
    """``1 − PH(y, C)·θ``: the loads that a prefetch takes, and what it brings (equations 9 and 10).

    Args:
        cached: ``PH(y, C)``.
        theta: θ; broadcasts with it.
    """
    sizes = np.multiply(cached, theta)
    return np.subtract(1.0, sizes, out=sizes)
