"""Multiple-choice knapsack: one option per layer, with the least total cost within a budget.

A Lagrange multiplier, a price per page, decides nearly everything: for a given price every layer takes its
cheapest option. Remaining pages are distributed greedily by gain, and pairs of layers exchange pages. The
price also gives a lower bound of the optimum. An option with a reduced cost above the gap cannot be part of a
better solution; dynamic programming finds the best of the few remaining ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_PRICES = 48
_MOST_EXCHANGES = 64


@dataclass(frozen=True)
class Choice:
    """A solution.

    Attributes:
        picks: int64 ``[layers]``: option of each layer.
        cost: Total cost.
        bound: Lower bound of the cost.
    """

    picks: Ints
    cost: float
    bound: float


def choose(costs: Floats, sizes: Ints, budget: int, *, work: float = math.inf) -> Choice:
    """The cheapest choice; exact if the dynamic programming needs at most ``work`` steps.

    Args:
        costs: float64 ``[layers, options]``, not increasing along the options.
        sizes: int64 ``[options]``, strictly ascending from 0.
        budget: Limit of the sum of sizes of all picks.
        work: Limit of options times sizes; beyond it, the result comes from the price, the greedy
            distribution and the exchanges, within ``cost - bound`` of the optimum.
    """
    if len(costs) * int(sizes[-1]) <= budget:
        picks = np.argmin(costs, axis=1).astype(np.int64)  # the first of equal ones is the smallest
        cost = float(_at(costs, picks).sum())
        return Choice(picks, cost, cost)
    price, picks = _priced(costs, sizes, budget)
    bound = _bound(costs, sizes, budget, price)
    picks = _distribute_rest(costs, sizes, budget, picks)
    picks = _exchange(costs, sizes, budget, picks)
    cost = float(_at(costs, picks).sum())
    if cost - bound > 1e-12 * max(abs(cost), 1e-300):
        better = _exact(costs, sizes, budget, price, cost - bound, work)
        if better is not None:
            exact = float(_at(costs, better).sum())
            if exact < cost:
                picks = better
            cost = min(cost, exact)
            bound = cost
    return Choice(picks, cost, min(bound, cost))


def _at(costs: Floats, picks: Ints) -> Floats:
    return np.take_along_axis(costs, picks[:, None], axis=1)[:, 0]


def _priced(costs: Floats, sizes: Ints, budget: int) -> tuple[float, Ints]:
    """The lowest price for which the cheapest options of all layers fit, and those options.

    Identical layers change their option at the same price; as many of them as fit get the larger option.
    """
    steps = -np.diff(costs, axis=1) / np.diff(sizes)
    low, high = 0.0, float(steps.max(initial=0.0)) * 2 + 1e-300
    taken = np.zeros(len(costs), dtype=np.int64)
    dearer = taken
    for _ in range(_PRICES):
        price = (low + high) / 2
        picks = np.argmin(costs + price * sizes, axis=1)
        used = int(sizes[picks].sum())
        if used > budget:
            low, dearer = price, picks
        else:
            high, taken = price, picks.astype(np.int64)
            if used == budget:
                break
        if high - low <= 1e-12 * high:
            break
    left = budget - int(sizes[taken].sum())
    more = sizes[dearer] - sizes[taken]
    gain = _at(costs, taken) - _at(costs, dearer)
    for layer in np.argsort(-gain / np.maximum(more, 1), kind="stable").tolist():
        if 0 < more[layer] <= left and gain[layer] > 0:
            taken[layer] = dearer[layer]
            left -= int(more[layer])
    return high, taken


def _bound(costs: Floats, sizes: Ints, budget: int, price: float) -> float:
    return float((costs + price * sizes).min(axis=1).sum()) - price * budget


def _up_to(sizes: Ints) -> Ints:
    """For every size up to the largest: the largest option of at most that size."""
    return np.searchsorted(sizes, np.arange(int(sizes[-1]) + 1), side="right") - 1


def _distribute_rest(costs: Floats, sizes: Ints, budget: int, picks: Ints) -> Ints:
    """Distribute the rest of the budget greedily, by gain per size."""
    picks = picks.copy()
    rows, up_to, largest = np.arange(len(costs))[:, None], _up_to(sizes), int(sizes[-1])
    left = budget - int(sizes[picks].sum())
    while left > 0:
        held = sizes[picks]
        last = up_to[np.minimum(held + left, largest)]
        width = int((last - picks).max())
        if width == 0:
            break
        option = np.minimum(picks[:, None] + np.arange(1, width + 1), last[:, None])
        more = sizes[option] - held[:, None]
        gain = np.where(more > 0, _at(costs, picks)[:, None] - costs[rows, option], 0.0)
        rate = gain / np.maximum(more, 1)
        layer, column = np.unravel_index(int(rate.argmax()), rate.shape)
        if rate[layer, column] <= 0:
            break
        left -= int(more[layer, column])
        picks[layer] = option[layer, column]
    return picks


def _exchange(costs: Floats, sizes: Ints, budget: int, picks: Ints) -> Ints:
    """Move pages between two layers while one gains more than the other loses."""
    picks = picks.copy()
    if len(costs) < 2:
        return picks
    up_to, largest = _up_to(sizes), int(sizes[-1])
    # Amounts to try: the smallest sizes, and a sample of larger ones.
    amounts = np.unique(
        np.concatenate([sizes[1:17], np.geomspace(1, largest, 24).astype(np.int64), sizes[-1:]])
    )
    rows = np.arange(len(costs))[:, None]
    for _ in range(_MOST_EXCHANGES):
        held = sizes[picks]
        left = budget - int(held.sum())
        now = _at(costs, picks)[:, None]
        taking = up_to[np.minimum(held[:, None] + amounts + left, largest)]
        gain = now - costs[rows, taking]
        giving = up_to[np.maximum(held[:, None] - amounts, 0)]
        loss = np.where(held[:, None] >= amounts, costs[rows, giving] - now, np.inf)
        # Best pair of different layers for every amount: the best taker with the best giver, or the second
        # best of either if that is the same layer.
        taker, giver = np.argsort(-gain, axis=0)[:2], np.argsort(loss, axis=0)[:2]
        columns = np.arange(len(amounts))
        profits = np.where(
            taker[:, None] == giver[None, :],
            -np.inf,
            gain[taker, columns][:, None] - loss[giver, columns][None, :],
        )
        t, g, a = np.unravel_index(int(np.argmax(profits)), profits.shape)
        if not profits[t, g, a] > 1e-12 * max(float(now.sum()), 1e-300):
            break
        picks[taker[t, a]], picks[giver[g, a]] = taking[taker[t, a], a], giving[giver[g, a], a]
    return picks


def _exact(costs: Floats, sizes: Ints, budget: int, price: float, gap: float, work: float) -> Ints | None:
    """The best choice; ``None`` if it takes too much work or no choice lies within the gap."""
    priced = costs + price * sizes
    reduced = priced - priced.min(axis=1, keepdims=True)
    options = [np.flatnonzero(row <= gap * (1 + 1e-9)) for row in reduced]
    unit = int(np.gcd.reduce(sizes))
    small = sizes // unit
    least = sum(int(small[some[0]]) for some in options)
    room = budget // unit - least
    if room < 0:
        return None
    span = np.minimum(np.cumsum([int(small[some[-1]] - small[some[0]]) for some in options]), room) + 1
    if float((span * np.array([len(some) for some in options])).sum()) > work:
        return None
    best = np.zeros(1)
    history: list[Ints] = []
    for layer, some in enumerate(options):
        width = int(span[layer])
        fresh, origin = np.full(width, np.inf), np.zeros(width, dtype=np.int64)
        for option in some.tolist():
            shift = int(small[option] - small[some[0]])
            count = min(len(best), width - shift)
            if count <= 0:
                break
            view = fresh[shift : shift + count]
            value = best[:count] + costs[layer, option]
            better = value < view
            view[better] = value[better]
            origin[shift : shift + count][better] = option
        best = fresh
        history.append(origin)
    place = int(np.argmin(best))
    if not math.isfinite(best[place]):
        return None
    picks = np.empty(len(costs), dtype=np.int64)
    for layer in range(len(costs) - 1, -1, -1):
        option = int(history[layer][place])
        picks[layer] = option
        place -= int(small[option] - small[options[layer][0]])
    return picks
