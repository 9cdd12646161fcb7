"""Simulates candidates side by side over the same tokens, and drops those that are clearly slower.

The differences between candidates over the same tokens vary much less than their times, so a few tens of
tokens tell most of them apart. Only those that are close go on.

The limits below were set on complete simulations of 8 known models on all reference machines with an eighth,
a quarter and half of the experts. Applied to them, the limits lose 0.01 % on average and 0.4 % at most, and
need a third of the tokens. Where the first tokens counted too, and any candidate could drop any other, up to
14 % were lost: for some tens of tokens, those that replace little profit from how the cache was filled.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from moechat.configurator.systems import CacheSettings
from moechat.simulate.run import Floats, Simulation

# Timed tokens after which candidates are dropped; of those that are left after the last, the fastest wins.
_MARKS = (20, 32, 48, 64, 96, 128, 160)
# Timed tokens at the beginning that are not compared: they still profit from how the cache was filled.
_SETTLING = 12
# A candidate is dropped if it is slower by this many standard errors of the difference, or would be if it
# were slower by this share of the time: smaller differences are worth no tokens.
_STANDARD_ERRORS = 3.0
_NEGLIGIBLE = 0.002
# Candidates that load in different ways approach their usual state at different speeds. They are dropped only
# for a difference of at least this many tokens: 5 % after 20 tokens, 1 % after 100.
_UNLIKE_TOKENS = 1.0
# These replace almost nothing in a cache that others have filled, so at first they seem too fast: no other
# candidate is dropped for them.
_FAST_AT_FIRST = ("seldom", "stay", "cpu")


@dataclass(frozen=True)
class Entrant:
    """A candidate in a race.

    Attributes:
        name: Short and unique.
        settings: Its settings.
        simulation: At any pass before the first timed one.
        handicap: Factor of its times where they are compared.
    """

    name: str
    settings: CacheSettings
    simulation: Simulation
    handicap: float = 1.0

    @property
    def seconds(self) -> Floats:
        """Compared seconds of its timed tokens so far."""
        return self.simulation.seconds * self.handicap

    def is_like(self, other: Entrant) -> bool:
        """Whether both load missing experts in the same way, though not the same ones."""
        mine, theirs = self.settings, other.settings
        return (mine.prefetch, mine.miss, mine.keep) == (theirs.prefetch, theirs.miss, theirs.keep)


def race(entrants: Sequence[Entrant], pick: Callable[[Mapping[str, float]], str]) -> dict[str, float]:
    """Simulate until one entrant is left.

    The result does not depend on the number of threads.

    Args:
        entrants: At least one, over the same tokens.
        pick: The name of the best, by mean seconds of a token of those that are left at last.

    Returns:
        Mean seconds of a token by name, of all entrants: of the best, over the tokens that it ran; of another
        one, those of the entrant that it was dropped for, times the ratio of the two over the tokens that
        were compared. So an easy or a hard part of the tokens changes no order.
    """
    end = entrants[0].simulation.timed
    left, slower = list(entrants), dict[str, tuple[str, float]]()
    with ThreadPoolExecutor(min(len(left), os.cpu_count() or 1)) as pool:
        for mark in (*(mark for mark in _MARKS if mark < end), end):
            list(pool.map(partial(_advance, mark=mark), left))
            if len(left) == 1 or mark == end:
                break
            left = _kept(left, slower)
            if mark == _MARKS[-1]:
                left = _picked(left, pick, slower, _SETTLING)
            if len(left) == 1:
                break
    left = _picked(left, pick, slower, 0)
    seconds = {left[0].name: float(left[0].simulation.seconds.mean())}
    # Those that were dropped last were dropped for one that was left, and so on.
    for name, (faster, ratio) in reversed(slower.items()):
        seconds[name] = seconds[faster] * ratio
    return {each.name: seconds[each.name] for each in entrants}


def _advance(entrant: Entrant, mark: int) -> None:
    entrant.simulation.advance(mark)


def _kept(left: Sequence[Entrant], slower: dict[str, tuple[str, float]]) -> list[Entrant]:
    """Those that may still be the fastest; the others are added to ``slower``."""
    leading = [each for each in left if each.settings.miss not in _FAST_AT_FIRST] or left
    times = {each.name: each.seconds[_SETTLING:] for each in left}
    first = min(leading, key=lambda each: float(times[each.name].mean()))
    usual = float(times[first.name].mean())
    kept = []
    for each in left:
        gaps = (times[each.name] - times[first.name]) / usual
        gap, error = float(gaps.mean()), float(gaps.std(ddof=1)) / len(gaps) ** 0.5
        least = 0.0 if each.is_like(first) else _UNLIKE_TOKENS / len(each.seconds)
        if each is first or gap < least or gap + _NEGLIGIBLE <= _STANDARD_ERRORS * error:
            kept.append(each)
        else:
            slower[each.name] = first.name, _ratio(each, first, _SETTLING)
    return kept


def _picked(
    left: Sequence[Entrant],
    pick: Callable[[Mapping[str, float]], str],
    slower: dict[str, tuple[str, float]],
    start: int,
) -> list[Entrant]:
    """The best of those that are left, alone, by their tokens from ``start`` on."""
    best = pick({each.name: float(each.simulation.seconds[start:].mean()) for each in left})
    first = next(each for each in left if each.name == best)
    slower |= {each.name: (best, _ratio(each, first, start)) for each in left if each is not first}
    return [first]


def _ratio(each: Entrant, other: Entrant, start: int) -> float:
    return float(each.simulation.seconds[start:].sum() / other.simulation.seconds[start:].sum())
