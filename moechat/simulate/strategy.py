"""Chooses the settings of ``auto`` for a machine, a model and a budget: the fastest in a simulation.

Policies, prefetching and the division of missing blocks each pay on some machines and cost on others. The
simulator makes the engine's decisions on another clock, so the candidates are simulated over the same routing
and the fastest is taken. The choice is among settings that one native runner can switch between.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from moechat.configurator.systems import CacheSettings
from moechat.routing.trace import Trace
from moechat.simulate.predictions import draw_rankings, perfect_rankings
from moechat.simulate.run import Ints, Tier, simulate
from moechat.simulate.timing import Timing

# Another candidate than the computed one must be faster by this share: what a simulation cannot tell apart
# stays as it is.
_LEAST_GAIN = 0.005
# Tokens that fill the cache, without taking time, and tokens that are timed: fewer for many experts, so that a
# choice takes a second.
_FILLING = 300
_TIMED_EXPERTS, _LEAST_TIMED, _MOST_TIMED = 400_000, 100, 600


@dataclass(frozen=True)
class Strategy:
    """One way to run a near tier.

    Attributes:
        name: Short and stable.
        title: For people.
        settings: Settings of the near tier.
    """

    name: str
    title: str
    settings: CacheSettings


@dataclass(frozen=True)
class Chosen:
    """The fastest strategy.

    Attributes:
        strategy: It.
        seconds: Simulated seconds of a token, by name of the strategy.
    """

    strategy: Strategy
    seconds: dict[str, float]


def strategies(settings: CacheSettings, *, far_computes: bool) -> list[Strategy]:
    """The candidates, most promising first; the first has the settings as they are.

    Args:
        settings: Settings with ``choose``.
        far_computes: Missing experts can be computed where they lie.
    """
    fixed = replace(settings, choose=False)
    whole = replace(fixed, allocation="uniform", split=1.0)
    found = [
        Strategy("computed", "the computed plan", fixed),
        Strategy("whole", "whole experts, as many in each layer", whole),
    ]
    if fixed.prefetch != "none":
        quiet = {"prefetch": "none", "prefetch_experts": None}
        found += [
            Strategy("nothing-ahead", "nothing fetched ahead", replace(fixed, **quiet)),  # type: ignore[arg-type]
            Strategy(
                "whole-nothing-ahead",
                "whole experts, nothing fetched ahead",
                replace(whole, **quiet),  # type: ignore[arg-type]
            ),
        ]
    if far_computes and fixed.miss == "both":
        found += [
            Strategy(
                "cpu",
                "the CPU computes what is missing",
                replace(found[-2].settings, miss="compute"),
            ),
            Strategy("link", "everything is fetched", replace(fixed, miss="fetch")),
        ]
    found.append(Strategy("dp", "whole experts, most hits", replace(fixed, allocation="dp", split=1.0)))
    return found


def lengths(layers: int, experts: int) -> tuple[int, int]:
    """Tokens that fill the cache before timing, and tokens that are timed, for layers of so many experts."""
    timed = _TIMED_EXPERTS // (layers * experts)
    return _FILLING, min(max(timed, _LEAST_TIMED), _MOST_TIMED)


def choose_strategy(
    settings: CacheSettings,
    tier_for: Callable[[CacheSettings], Tier],
    timing: Timing,
    trace: Trace,
    rankings: Ints | None,
) -> Chosen:
    """Simulate the candidates over one trace and take the fastest.

    Args:
        settings: Settings with ``choose``.
        tier_for: The near tier of a candidate, with the same pages for all.
        timing: Times of the machine.
        trace: Routing; its last tokens, half of them at most, are timed.
        rankings: Predictions for its tokens; ``None``: nothing is predicted.

    """
    filling, timed = lengths(trace.layers, trace.num_experts)
    timed = min(timed, -(-trace.tokens // 2))
    filling = min(filling, trace.tokens - timed)
    start = trace.tokens - timed - filling
    last = np.ascontiguousarray(trace.experts[start:])
    part = Trace(last, np.array([0, len(last)], dtype=np.int64), trace.num_experts)
    ahead = None if rankings is None else np.ascontiguousarray(rankings[:, start:])
    seconds: dict[str, float] = {}
    found = strategies(settings, far_computes=timing.far_block is not None)
    for strategy in found:
        run = simulate(
            part,
            strategy.settings,
            tier_for(strategy.settings),
            timing,
            rankings=ahead if strategy.settings.ranks else None,
            warmup=filling,
            hurried=filling,
        )
        seconds[strategy.name] = run.tpot
    best = min(seconds, key=lambda name: seconds[name])
    if seconds[best] > (1 - _LEAST_GAIN) * seconds[found[0].name]:
        best = found[0].name
    return Chosen(next(each for each in found if each.name == best), seconds)


def predictions_for(
    settings: CacheSettings, trace: Trace, accuracy: np.ndarray, *, width: int, seed: int = 0
) -> Ints | None:
    """Predictions of the experts of a trace, as the settings ask for them.

    Args:
        settings: Settings of the near tier.
        trace: The trace.
        accuracy: float64 ``[layers]``.
        width: Experts to rank.
        seed: Random seed.
    """
    if settings.prefetch == "perfect":
        return perfect_rankings(trace, settings.lookahead)
    if not settings.ranks:
        return None
    return draw_rankings(trace, accuracy, width=width, lookahead=settings.lookahead, seed=seed)
