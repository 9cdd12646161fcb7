"""Simulates one system on one trace."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from moechat import _native
from moechat.configurator.systems import CacheSettings
from moechat.configurator.transit_reserve import stream_tokens
from moechat.errors import UsageError
from moechat.routing.hot_experts import expert_shares, hottest_first
from moechat.routing.statistics import RoutingStatistics
from moechat.routing.trace import Trace
from moechat.simulate.timing import Timing
from moechat.trials import Watch

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int32]
_HITS = ("full", "prefetch", "top", "miss")


@dataclass(frozen=True)
class Tier:
    """Initial state of a near tier.

    Attributes:
        experts: Experts per layer.
        top_k: Experts per token.
        blocks: Blocks per expert.
        block_bytes: Bytes per block.
        pages: Pages of the slab.
        targets: int32 ``[layers, 2]``: experts kept and blocks kept of each.
        reserve: Pages reserved for blocks in transit.
        ranks: float64 ``[layers, experts]`` for the policy ``static``: the experts with the highest ranks are
            resident from the beginning.
    """

    experts: int
    top_k: int
    blocks: int
    block_bytes: int
    pages: int
    targets: Ints
    reserve: int
    ranks: Floats | None = None

    @property
    def layers(self) -> int:
        """Number of expert layers."""
        return len(self.targets)


@dataclass(frozen=True)
class SimulatedRun:
    """Result of a simulation.

    Attributes:
        seconds: float64 ``[passes]``: time of each timed pass.
        stall: float64 ``[passes]``: part of it in which the near tier waited for blocks or for the far tier.
        demand_bytes: float64 ``[passes]``: bytes moved on demand.
        prefetch_bytes: float64 ``[passes]``: bytes moved by prefetches.
        counters: Totals of the timed passes, with the engine's definitions of hits and blocks.
    """

    seconds: Floats
    stall: Floats
    demand_bytes: Floats
    prefetch_bytes: Floats
    counters: dict[str, Any]

    @property
    def tpot(self) -> float:
        """Mean seconds per token."""
        return float(self.seconds.mean())

    @property
    def hits(self) -> dict[str, float]:
        """Shares of (token, expert) pairs: ``full``, ``prefetch``, ``top``, ``miss``."""
        total = sum(self.counters[f"hits_{kind}"] for kind in _HITS) or 1
        return {kind: self.counters[f"hits_{kind}"] / total for kind in _HITS}

    @property
    def bytes_per_token(self) -> float:
        """Bytes over the link, used or not."""
        return float((self.demand_bytes + self.prefetch_bytes).mean())


@dataclass(frozen=True)
class Watched:
    """A watch, and the settings of its ways, which differ only in how experts are loaded."""

    watch: Watch
    ways: Mapping[str, CacheSettings]


def simulate(
    trace: Trace,
    settings: CacheSettings,
    tier: Tier,
    timing: Timing,
    *,
    rankings: Ints | None = None,
    starts: npt.NDArray[np.int64] | None = None,
    warmup: int = 0,
    hurried: int = 0,
    settled: bool = False,
    timed: int | None = None,
    group_items: int = 0,
    watched: Watched | None = None,
    warm: RoutingStatistics | None = None,
) -> SimulatedRun:
    """Play a trace on a near tier.

    Args:
        trace: A trace in the shape of the model.
        settings: Settings of the near tier.
        tier: Its sizes.
        timing: Times of the parts.
        rankings: int32 ``[lookahead, tokens, layers, width]``: predicted experts of each token and layer, by
            distance ahead, best first, -1 for none; used if the settings prefetch by a ranking.
        starts: int64 ``[passes + 1]``: first tokens of the passes; ``None``: one token per pass. A pass of
            many tokens changes the cache like a prompt, but takes the dense times of one token.
        warmup: Passes before the timed ones.
        hurried: Number of these, and their transfers, that take no time.
        settled: Complete all transfers before timing begins.
        timed: Timed passes; ``None``: all that remain.
        group_items: (token, expert) pairs that the engine sums up at a time; 0: all of a pass.
        watched: Watch that may change the settings after each pass that takes time; ``rankings`` have to be
            deep enough for all of its ways.
        warm: Counts of earlier runs: as the engine, start with the experts in free pages that they used most;
            ``None``: start empty.

    Raises:
        UsageError: No pass remains to be timed, or an input that the settings need is missing.
        ValueError: Sizes do not match, or the times are of a GPU that holds every block, and it does not.
    """
    if starts is None:
        starts = np.arange(trace.tokens + 1, dtype=np.int64)
    passes = len(starts) - 1
    end = passes if timed is None else min(passes, warmup + timed)
    if not 0 <= hurried <= warmup < end:
        raise UsageError(
            f"the trace has {passes} tokens, {warmup} of which come before timing: none is left",
            hint="use a longer trace, or a smaller --warmup",
        )
    if settings.ranks and rankings is None:
        raise UsageError(f"prefetching by {settings.prefetch} needs predictions")
    timeline = _timeline(trace, settings, tier, timing, group_items, watched is not None)
    every_block = tier.layers * tier.experts * tier.blocks
    if timing.launch == "graphs" and tier.pages < every_block:
        raise ValueError(f"{tier.pages} pages do not hold every block, so that layers wait for the host")
    if timing.launch != "host" and tier.pages >= every_block:
        # As loading fills a GPU.
        everyone = np.arange(tier.experts, dtype=np.int32)
        for layer in range(tier.layers):
            timeline.preload(layer, everyone, tier.blocks)
    elif tier.ranks is not None:
        _preload(timeline, tier)
    elif warm is not None:
        shares = expert_shares(warm)
        timeline.start_warm(shares, hottest_first(shares))

    def play(start: int, stop: int, hurry: bool = False) -> dict[str, Floats]:
        if watched is None or hurry:
            return timeline.run(trace.experts, starts, rankings, start, stop, hurry)
        parts = []
        for each in range(start, stop):
            parts.append(timeline.run(trace.experts, starts, rankings, each, each + 1, False))
            if watched.watch.token(float(parts[-1]["seconds"][0]), float(parts[-1]["hard"][0])):
                changed = watched.ways[watched.watch.way]
                timeline.switch_to(targets=tier.targets, **loading_of(changed, tier, timing))
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    if hurried:
        play(0, hurried, True)
        timeline.drain()
    if warmup > hurried:
        play(hurried, warmup)
    if settled:
        timeline.drain()
    timeline.reset_stats()
    figures = play(warmup, end)
    figures.pop("hard")
    return SimulatedRun(**figures, counters=timeline.stats())


def loading_of(settings: CacheSettings, tier: Tier, timing: Timing) -> dict[str, Any]:
    """How a timeline loads experts, as arguments of it."""
    return {
        # If the far tier cannot compute, everything is fetched.
        "miss": "fetch" if timing.far_block is None else settings.miss,
        "ahead": settings.ahead,
        "lookahead": settings.lookahead,
        "ahead_experts": min(settings.ranked_experts(tier.top_k), tier.experts),
        "ahead_bytes": settings.prefetch_bytes,
        "stream_tokens": stream_tokens(tier.top_k, tier.experts),
    }


def _timeline(
    trace: Trace,
    settings: CacheSettings,
    tier: Tier,
    timing: Timing,
    group_items: int,
    counts_hard: bool,
) -> _native.Timeline:
    far = timing.far_block
    shared = far if timing.far_block_shared is None else timing.far_block_shared
    return _native.Timeline(
        layers=tier.layers,
        experts=tier.experts,
        blocks=tier.blocks,
        block_bytes=tier.block_bytes,
        pages=tier.pages,
        targets=tier.targets,
        reserve=tier.reserve,
        policy=_policy(trace, settings, tier),
        whole_experts=settings.whole_experts,
        **loading_of(settings, tier, timing),
        counts_hard=counts_hard,
        group_items=group_items,
        attention=timing.attention,
        head=timing.head,
        call=timing.call,
        compute=list(timing.compute),
        far_block=0.0 if far is None else far,
        far_block_shared=0.0 if shared is None else shared,
        latency=timing.latency,
        link=list(timing.link),
        link_shared=list(timing.link_shared),
        in_flight_bytes=timing.in_flight_bytes,
        far_threads=timing.far_threads,
        far_call=timing.far_call,
        near_slowdown=timing.near_slowdown,
        launch=timing.launch,
        calls=timing.calls.timeline(),
    )


def _policy(trace: Trace, settings: CacheSettings, tier: Tier) -> _native.EvictionPolicy:
    future = trace.experts if settings.policy == "belady" else None
    if settings.policy == "static" and tier.ranks is None:
        raise UsageError("the policy static needs ranks")
    return _native.EvictionPolicy(
        settings.policy,
        tier.layers,
        tier.experts,
        omega=settings.omega,
        rho=settings.rho,
        gamma=settings.gamma,
        ranks=tier.ranks if settings.policy == "static" else None,
        future=future,
    )


def _preload(timeline: _native.Timeline, tier: Tier) -> None:
    """Load the experts of a static set before the first pass, like the systems that use one."""
    assert tier.ranks is not None
    for layer, (experts, blocks) in enumerate(tier.targets.tolist()):
        if experts:
            best = np.argsort(-tier.ranks[layer], kind="stable")[:experts]
            timeline.preload(layer, best.astype(np.int32), blocks)
