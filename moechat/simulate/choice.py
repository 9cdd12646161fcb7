"""Chooses the settings of ``auto`` for a machine, a model and a budget: the fastest in a simulation.

The simulator makes the engine's decisions on another clock, so the candidates are simulated over the same
routing and the fastest is taken.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from moechat.configurator.costs import Costs
from moechat.configurator.systems import CacheSettings
from moechat.routing.hot_experts import LEAST_TOKENS, shares_of_tokens
from moechat.routing.statistics import RoutingStatistics
from moechat.routing.trace import Trace
from moechat.simulate.race import Entrant, race
from moechat.simulate.run import Ints, Simulation, Tier, simulate
from moechat.simulate.shared_draws import drawn_rankings, drawn_routing
from moechat.simulate.strategy import LOOKAHEAD, PARTS, Chosen, Strategy, fastest, handicap, strategies
from moechat.simulate.timing import Launch, Timing, timing_of

# Tokens before timing, which take no time, and tokens that are timed at most: fewer where a token activates
# more blocks.
_FILLING = 200
_TIMED_BLOCKS, _LEAST_TIMED, _MOST_TIMED = 1_200_000, 100, 600
# Of the tokens before timing, those that move blocks; only the policy sees those before. Fewer would not
# scatter the pages of an expert as they are in the long run, so that copies would be too long: with 40,
# choices were up to 2.3 % slower.
_MOVING = 100
# Of these, those that a candidate plays itself where it takes over the cache of a similar one.
_OWN_MOVING = 4
# Tokens of one strategy alone, for its expected time: those that only the policy sees, those that fill the
# cache in no time, those whose loads bring it into its usual state, and those that are timed.
_ALONE = (60, 20, 60, 100)


def lengths(layers: int, top_k: int, blocks: int) -> tuple[int, int]:
    """Tokens that fill the cache before timing, and tokens that are timed.

    Args:
        layers: Number of expert layers.
        top_k: Experts per token.
        blocks: Blocks per expert.
    """
    timed = _TIMED_BLOCKS // (layers * top_k * blocks)
    return _FILLING, min(max(timed, _LEAST_TIMED), _MOST_TIMED)


def choose_strategy(
    settings: CacheSettings,
    tier_for: Callable[[CacheSettings], Tier],
    timing: Timing,
    trace: Trace,
    rankings: Ints | None,
    *,
    recorded: bool = True,
) -> Chosen:
    """Simulate the candidates over one trace and take the :func:`fastest`.

    Args:
        settings: Settings with ``choose``.
        tier_for: The near tier of a candidate, with the same pages for all.
        timing: Times of the machine.
        trace: Routing; its last tokens, half of them at most, are timed.
        rankings: Predictions for its tokens, at least :data:`LOOKAHEAD` layers ahead; ``None``: nothing is
            predicted.
        recorded: The near tiers' ``warm`` shares are of this trace: those of the tokens before the timed ones
            take their place. Else what was counted would also be what comes.
    """
    found = strategies(settings, far_computes=timing.far_block is not None)
    filling, timed = lengths(trace.layers, trace.top_k, tier_for(found[0].settings).blocks)
    timed = min(timed, -(-trace.tokens // 2))
    filling = min(filling, trace.tokens - timed)
    part, ahead = _last(trace, rankings, filling + timed)
    known = trace.experts[: trace.tokens - timed]
    in_parts: set[str] = set()
    first: dict[object, str] = {}
    same: dict[str, str] = {}
    entrants: list[Entrant] = []
    filled: dict[tuple[int, int], Simulation] = {}
    for each in found:
        tier = tier_for(each.settings)
        if tier.warm is not None and recorded:
            enough = len(known) >= LEAST_TOKENS
            tier = replace(tier, warm=shares_of_tokens(known, trace.num_experts) if enough else None)
        # Allocations that come to the same targets are one candidate.
        inputs = tier.targets.tobytes(), tier.reserve, tier.pages
        key = replace(each.settings, allocation="uniform", split=1.0), inputs
        if (tier.targets[:, 1] < tier.blocks).any():
            in_parts.add(each.name)
        elif each.name == PARTS:
            continue
        same[each.name] = first.setdefault(key, each.name)
        if same[each.name] != each.name:
            continue
        # Pages of parts scatter differently with every target, those of whole experts only with prefetches.
        alike = each.settings.lookahead if each.settings.ranks else 0, tier.pages
        like = None if each.name in in_parts or tier.warm is not None else filled.get(alike)
        simulation = Simulation(
            part,
            each.settings,
            tier,
            timing,
            rankings=_ranked(ahead, each),
            warmup=filling,
            hurried=filling,
            followed=0 if like else max(0, filling - _MOVING),
            like=like,
        )
        if each.name not in in_parts and like is None and tier.warm is None:
            simulation.fill(_OWN_MOVING)
            filled[alike] = simulation
        entrants.append(
            Entrant(each.name, each.settings, simulation, handicap(each.name, in_parts=each.name in in_parts))
        )
    raced = race(entrants, lambda means: fastest(found, means, in_parts).name)
    seconds_of = {name: raced[other] for name, other in same.items()}
    return Chosen(fastest(found, seconds_of, in_parts), seconds_of)


def _last(trace: Trace, rankings: Ints | None, tokens: int) -> tuple[Trace, Ints | None]:
    """The last tokens of a trace, and their predictions."""
    start = trace.tokens - tokens
    last = np.ascontiguousarray(trace.experts[start:])
    part = Trace(last, np.array([0, tokens], dtype=np.int64), trace.num_experts)
    return part, None if rankings is None else rankings[:, start:]


def _ranked(rankings: Ints | None, strategy: Strategy) -> Ints | None:
    """The predictions that a strategy uses."""
    if rankings is None or not strategy.settings.ranks:
        return None
    return np.ascontiguousarray(rankings[: strategy.settings.lookahead])


def choose_by_statistics(
    settings: CacheSettings,
    tier_for: Callable[[CacheSettings], Tier],
    costs: Costs,
    statistics: RoutingStatistics,
    *,
    threads: int,
    launch: Launch,
    only: Strategy | None = None,
) -> Chosen:
    """:func:`choose_strategy` over routing that is drawn from statistics.

    The time of the choice is that of a simulation of its own, and so the same as where it is the one
    candidate; the times of the others are scaled with it.

    Args:
        settings: Settings with ``choose``.
        tier_for: The near tier of a candidate, with the same pages for all.
        costs: Times of the machine.
        statistics: Counts, or the defaults of a family.
        threads: Threads of the CPU.
        launch: As :class:`moechat.simulate.timing.Timing`.
        only: The one candidate; ``None``: all of them.
    """
    tier = tier_for(only.settings if only else replace(settings, choose=False))
    timing = timing_of(
        costs,
        top_k=statistics.top_k,
        blocks=tier.blocks,
        block_bytes=tier.block_bytes,
        far_threads=threads,
        launch=launch,
    )
    if only is not None:
        return Chosen(only, {only.name: _seconds_alone(only, tier, timing, statistics)})
    tokens = sum(lengths(statistics.layers, statistics.top_k, tier.blocks))
    lookahead = max(settings.lookahead, LOOKAHEAD)
    trace, rankings = _drawn(settings, statistics, tokens, lookahead)
    chosen = choose_strategy(settings, tier_for, timing, trace, rankings, recorded=False)
    best = chosen.strategy
    alone = _seconds_alone(best, tier_for(best.settings), timing, statistics)
    scale = alone / chosen.seconds_of_choice
    seconds = {name: alone if name == best.name else scale * each for name, each in chosen.seconds.items()}
    return Chosen(best, seconds)


def _drawn(
    settings: CacheSettings, statistics: RoutingStatistics, tokens: int, lookahead: int
) -> tuple[Trace, Ints | None]:
    """Routing, and predictions if the settings use them."""
    trace = drawn_routing(statistics, tokens)
    if not settings.predicts:
        return trace, None
    width = settings.ranked_experts(statistics.top_k)
    return trace, drawn_rankings(statistics, trace, width=width, lookahead=lookahead)


def _seconds_alone(strategy: Strategy, tier: Tier, timing: Timing, statistics: RoutingStatistics) -> float:
    """Seconds of a token of one strategy."""
    followed, filling, settling, timed = _ALONE
    settings = strategy.settings
    trace, rankings = _drawn(settings, statistics, sum(_ALONE), settings.lookahead)
    run = simulate(
        trace,
        settings,
        tier,
        timing,
        rankings=rankings,
        warmup=followed + filling + settling,
        hurried=followed + filling,
        followed=followed,
        timed=timed,
    )
    return run.tpot
