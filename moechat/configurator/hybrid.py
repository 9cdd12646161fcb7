"""The allocation ``auto``: experts and split of every layer that minimise the exposed time of this engine.

MoEpic moves one hundredth of the memory at a time and stops at the first move without gain. Here all options
of every layer, C experts with b blocks each, including whole experts and none, are considered, and one option
per layer is chosen within the budget (:mod:`moechat.configurator.knapsack`).

Layers depend on each other, because each determines the prefetch window of the next one. So the choice is
made for the windows of the previous solution, with a price on changes of later windows (the derivative of the
exposed time of later layers), then evaluated with its own windows, several times; after an overshoot the step
is halved. Finally small changes of single layers and pairs are tried, with all their effects
(:mod:`moechat.configurator.polish`). The search starts from the results of the other methods and is never
worse.
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
_FAILURES = 2  # rounds without gain that end the search
_EVALUATIONS = 700  # of the final small changes, about 10 ms
_GAIN = 1e-3  # relative gain below which a round is the last one
_WORK = 2e6  # steps of dynamic programming per round, about 10 ms
_MOST_PAIRS = 40_000  # options of all layers together; evaluating them takes about 2 ms
# Cost of a missing expert besides its exposed time, in loads: breaks ties between options with equal exposed
# time (usually 0), and is too small for other effects.
_TIE = 1e-4


@dataclass(frozen=True)
class Options:
    """All options of a layer, ordered by pages.

    Attributes:
        experts: C, int64 ``[pairs]``; the first pair has C = 0.
        blocks: b, int64 ``[pairs]``.
        sizes: int64 ``[sizes]``: the distinct numbers of pages, ascending from 0.
        starts: int64 ``[sizes]``: first pair of each size.
    """

    experts: Ints
    blocks: Ints
    sizes: Ints
    starts: Ints

    @classmethod
    def of(cls, experts: int, blocks: int, budget: int, split: float | None, most: int = 1 << 30) -> Options:
        """All pairs within the budget; with a fixed split, only those with its number of blocks.

        If there are more than ``most``, an even sample of C and of b, including both ends.
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
        # For equal pages, fewer and larger experts come first and win ties.
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
        split: A fixed θ; ``None``: free.
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
        """Evaluate targets with this problem's model."""
        return self.evaluate_all([targets])[0]

    def evaluate_all(self, candidates: Sequence[Targets]) -> list[Evaluation]:
        """Evaluate several targets."""
        return evaluated(candidates, self._plan, self.blocks)

    def totals(self, candidates: Targets) -> Floats:
        """Exposed seconds of several targets, ``[candidates, layers, 2]``."""
        return exposed_totals(candidates, self._plan, self.blocks)

    def improve(self, windows: Floats, prices: Floats) -> Targets:
        """The best targets for fixed windows, with a price for the window that a layer leaves.

        Args:
            windows: Seconds, ``[layers]``.
            prices: Price of each layer's window, see :class:`moechat.configurator.targets.Evaluation`.
        """
        options = self.options
        tie = _TIE * self.model.costs.load
        costs = self._plan.option_costs(options.experts, self._theta, windows, prices, tie)
        least = np.minimum.reduceat(costs, options.starts, axis=1)
        choice = choose(np.minimum.accumulate(least, axis=1), options.sizes, self.pages, work=_WORK)
        return self._targets(costs, choice.picks)

    def _targets(self, costs: Floats, picks: Ints) -> Targets:
        """The cheapest pair with at most the pages of each pick."""
        targets = np.empty((len(picks), 2), dtype=np.int32)
        ends = np.append(self.options.starts[1:], len(self.options.experts))[picks]
        for layer, end in enumerate(ends.tolist()):
            pair = int(costs[layer, :end].argmin())
            targets[layer] = self.options.experts[pair], self.options.blocks[pair]
        return targets


def _spread(values: Ints, share: float) -> Ints:
    """An even sample of about that share of the values, including the first and the last."""
    count = max(2, round(len(values) * share))
    return values[
        np.unique(np.linspace(0, len(values) - 1, min(count, len(values))).round().astype(np.int64))
    ]


def minimise(search: Search, starts: Sequence[Targets]) -> tuple[Targets, Evaluation, int]:
    """Search for the best targets; never worse than any of ``starts``.

    Args:
        search: The problem.
        starts: At least one allocation within the budget; the search starts from the windows of the best.

    Returns:
        Targets, their evaluation, and the number of rounds.
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
            # Overshoot: move only a part of the way to the found windows and prices.
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
