"""Our own allocation: experts and split of every layer, so that the exposed time of this engine is least.

Where MoEpic moves one hundredth of the memory at a time and stops at the first move that does not help, every
option of every layer, C experts with b blocks each, is looked at here, whole experts and none at all among
them, and one option a layer is chosen under the budget (:mod:`moechat.configurator.knapsack`). Windows link
the layers, each being what the layer before leaves; so the choice is made for the windows of the last
choice, and evaluated with its own, a few times over.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from moechat.configurator.curves import (
    Floats,
    RoutingCurves,
    amount,
    cached_at,
    prefetch_sizes,
    two_outcomes,
)
from moechat.configurator.exposure import LayerModel
from moechat.configurator.knapsack import Ints, choose
from moechat.configurator.targets import Evaluation, Targets, evaluate, evaluate_all
from moechat.configurator.uniform import kept_blocks

_ROUNDS = 6
# A round that gains less than this share is the last one.
_GAIN = 1e-3
# Steps of the dynamic programming of one round: about 10 ms.
_WORK = 2e6
# Options of all layers together that are looked at: one evaluation of them is about 2 ms.
_MOST_PAIRS = 30_000
# What a missing expert weighs besides its exposed time, in loads: it decides between options whose exposed
# time is the same, 0 above all, and is too small to decide anything else.
_TIE = 1e-4


@dataclass(frozen=True)
class Options:
    """What a layer can be given, by pages.

    Attributes:
        experts: C, int64 ``[pairs]``; the first pair is (0, 1).
        blocks: b, int64 ``[pairs]``.
        sizes: int64 ``[sizes]``: the different numbers of pages, ascending from 0.
        starts: int64 ``[sizes]``: first pair of each; pairs are in ascending order of pages.
    """

    experts: Ints
    blocks: Ints
    sizes: Ints
    starts: Ints

    @classmethod
    def of(cls, experts: int, blocks: int, budget: int, split: float | None, most: int = 1 << 30) -> Options:
        """All pairs within the budget; with a split given, those with its number of blocks.

        Where there are more than ``most``, an even spread of C and of b, both ends among them.
        """
        kept = np.arange(1, blocks + 1) if split is None else np.array([kept_blocks(split, blocks)])
        numbers = np.arange(1, experts + 1)
        if len(numbers) * len(kept) > most:
            thinner = math.sqrt(most / (len(numbers) * len(kept)))
            numbers, kept = _spread(numbers, thinner), _spread(kept, thinner)
        counts, kept = np.repeat(numbers, len(kept)), np.tile(kept, len(numbers))
        fits = counts * kept <= budget
        counts = np.concatenate([[0], counts[fits]]).astype(np.int64)
        kept = np.concatenate([[1], kept[fits]]).astype(np.int64)
        pages = counts * kept
        # Of the same pages, whole experts come first, and win where all else is equal.
        order = np.lexsort((counts, pages))
        sizes, starts = np.unique(pages[order], return_index=True)
        return cls(counts[order], kept[order], sizes, starts)


class Search:
    """Options of all layers of one problem.

    Args:
        curves: Routing.
        model: Times of a layer.
        blocks: B.
        pages: Budget.
        split: θ where it is given.
    """

    def __init__(
        self, curves: RoutingCurves, model: LayerModel, blocks: int, pages: int, split: float | None
    ) -> None:
        self.curves, self.model, self.blocks, self.pages = curves, model, blocks, pages
        self.options = Options.of(curves.experts, blocks, pages, split, _MOST_PAIRS // curves.layers)
        theta, counts = self.options.blocks / blocks, self.options.experts
        hit = curves.hit
        shares, weights = (
            two_outcomes(hit, curves.top_k) if model.averages else (hit[None], np.ones((1, 1, 1)))
        )
        # All of these [outcomes, layers, pairs], with places in front of them where there are any.
        cached = cached_at(curves.cached.transpose(1, 0, 2)[:, None], hit, shares)
        self._theta = theta.astype(np.float32)
        self._weights = np.broadcast_to(weights, shares.shape)[..., counts]
        self._hit = shares.astype(np.float32)[..., counts]
        self._accuracy = curves.accuracy.astype(np.float32).T[:, None, :, None]
        self._sizes = prefetch_sizes(cached.astype(np.float32)[..., counts], self._theta)

    def evaluate(self, targets: Targets) -> Evaluation:
        """Targets under this problem's model."""
        return evaluate(targets, self.curves, self.model, self.blocks)

    def improve(self, windows: Floats, prices: Floats) -> Targets:
        """The best targets if the layers had these windows, and a longer window were worth its price.

        Args:
            windows: Seconds, ``[layers]``.
            prices: Of each layer's window, see :class:`moechat.configurator.targets.Evaluation`.
        """
        options = self.options
        reach = windows[:, None] / self.model.costs.load
        loaded = amount(self.curves.top_k, self._hit, self._accuracy, self._sizes, self._theta, reach)
        exposed, left = self.model.times(loaded.astype(np.float64))
        exposed -= np.append(prices[1:], 0.0)[:, None] * left
        exposed += (self.curves.top_k - loaded) * (_TIE * self.model.costs.load)
        costs = (exposed * self._weights).sum(axis=0)
        least = np.minimum.reduceat(costs, options.starts, axis=1)
        choice = choose(np.minimum.accumulate(least, axis=1), options.sizes, self.pages, work=_WORK)
        return self._targets(costs, choice.picks)

    def _targets(self, costs: Floats, picks: Ints) -> Targets:
        """The cheapest pair of at most the pages of each pick."""
        targets = np.empty((len(picks), 2), dtype=np.int32)
        ends = np.append(self.options.starts[1:], len(self.options.experts))[picks]
        for layer, end in enumerate(ends.tolist()):
            pair = int(costs[layer, :end].argmin())
            targets[layer] = self.options.experts[pair], self.options.blocks[pair]
        return targets


def _spread(values: Ints, share: float) -> Ints:
    """About that share of the values, evenly, the first and the last among them."""
    count = max(2, round(len(values) * share))
    return values[
        np.unique(np.linspace(0, len(values) - 1, min(count, len(values))).round().astype(np.int64))
    ]


def minimise(search: Search, starts: Sequence[Targets]) -> tuple[Targets, Evaluation, int]:
    """The best targets found, never worse than any of ``starts``.

    Args:
        search: The problem.
        starts: At least one allocation within the budget; the search goes on from the windows of the best.

    Returns:
        Targets, what they come to, and how many choices were made.
    """
    every = evaluate_all(starts, search.curves, search.model, search.blocks)
    first = min(range(len(starts)), key=lambda i: every[i].score)
    best, at, step = (starts[first], every[first]), every[first], 1.0
    rounds = 0
    while rounds < _ROUNDS and best[1].total > 0:
        rounds += 1
        targets = search.improve(at.windows, at.prices)
        found = search.evaluate(targets)
        if found.score < best[1].score:
            gained = 1 - found.total / best[1].total
            best, at = (targets, found), found
            if gained < _GAIN:
                break
        else:
            # Too far: towards what was found, but less of it.
            step /= 2
            at = replace(
                best[1],
                windows=(1 - step) * best[1].windows + step * found.windows,
                prices=(1 - step) * best[1].prices + step * found.prices,
            )
    return *best, rounds
