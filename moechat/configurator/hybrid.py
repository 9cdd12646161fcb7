"""Our own allocation: experts and split of every layer, so that the exposed time of this engine is least.

Where MoEpic moves one hundredth of the memory at a time and stops at the first move that does not help, every
option of every layer, C experts with b blocks each, is looked at here, whole experts and none at all among
them, and one option a layer is chosen under the budget (:mod:`moechat.configurator.knapsack`).

Windows link the layers, each being what the layer before leaves. So the choice is made for the windows of
the last one, with a price on what an option leaves to those behind it (the derivative of their exposed time),
then evaluated with its own windows, a few times over; where that overshoots, half the way is tried. In the
end single layers and pairs of them are changed a little, each change with all that follows from it
(:mod:`moechat.configurator.polish`). It begins with what the other methods find, and never ends worse.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from moechat.configurator.curves import Floats, RoutingCurves
from moechat.configurator.exposure import LayerModel
from moechat.configurator.knapsack import Ints, choose
from moechat.configurator.native import native_plan
from moechat.configurator.polish import polished
from moechat.configurator.targets import Evaluation, Targets, evaluated, exposed_totals
from moechat.configurator.uniform import kept_blocks

_ROUNDS = 5
# So many rounds without a gain end the search.
_FAILURES = 2
# Allocations that are tried one by one at the end: 10 ms.
_EVALUATIONS = 700
# A round that gains less than this share is the last one.
_GAIN = 1e-3
# Steps of the dynamic programming of one round: about 10 ms.
_WORK = 2e6
# Options of all layers together that are looked at: one look takes about 2 ms.
_MOST_PAIRS = 40_000
# What a missing expert weighs besides its exposed time, in loads: it decides between options whose exposed
# time is the same, 0 above all, and is too small to decide anything else.
_TIE = 1e-4


@dataclass(frozen=True)
class Options:
    """What a layer can be given, by pages.

    Attributes:
        experts: C, int64 ``[pairs]``; the first pair has C = 0.
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
        none, numbers = int(kept[0]), np.arange(1, experts + 1)
        if len(numbers) * len(kept) > most:
            thinner = math.sqrt(most / (len(numbers) * len(kept)))
            numbers, kept = _spread(numbers, thinner), _spread(kept, thinner)
        counts, kept = np.repeat(numbers, len(kept)), np.tile(kept, len(numbers))
        fits = counts * kept <= budget
        counts = np.concatenate([[0], counts[fits]]).astype(np.int64)
        kept = np.concatenate([[none], kept[fits]]).astype(np.int64)
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
        self.split = split
        self.options = Options.of(curves.experts, blocks, pages, split, _MOST_PAIRS // curves.layers)
        self._theta = np.where(self.options.experts > 0, self.options.blocks / blocks, 0.0)
        self._plan = native_plan(curves, model)

    def evaluate(self, targets: Targets) -> Evaluation:
        """Targets under this problem's model."""
        return self.evaluate_all([targets])[0]

    def evaluate_all(self, candidates: Sequence[Targets]) -> list[Evaluation]:
        """The same for several."""
        return evaluated(candidates, self._plan, self.blocks)

    def totals(self, candidates: Targets) -> Floats:
        """Exposed seconds of several targets, ``[candidates, layers, 2]``."""
        return exposed_totals(candidates, self._plan, self.blocks)

    def improve(self, windows: Floats, prices: Floats) -> Targets:
        """The best targets if the layers had these windows, and a longer window were worth its price.

        Args:
            windows: Seconds, ``[layers]``.
            prices: Of each layer's window, see :class:`moechat.configurator.targets.Evaluation`.
        """
        options = self.options
        tie = _TIE * self.model.costs.load
        costs = self._plan.option_costs(options.experts, self._theta, windows, prices, tie)
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
    every = search.evaluate_all(starts)
    first = min(range(len(starts)), key=lambda i: every[i].score)
    best, at, step = (starts[first], every[first]), every[first], 1.0
    rounds = failures = 0
    while rounds < _ROUNDS and failures < _FAILURES and best[1].total > 0:
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
            failures += 1
            at = replace(
                best[1],
                windows=(1 - step) * best[1].windows + step * found.windows,
                prices=(1 - step) * best[1].prices + step * found.prices,
            )
    targets = polished(
        best[0],
        best[1].total,
        search.totals,
        search.curves.experts,
        search.blocks,
        search.pages,
        free_split=search.split is None,
        work=_EVALUATIONS,
    )
    if targets is not best[0]:
        best = targets, search.evaluate(targets)
    return *best, rounds
