"""Simulates one system on one trace."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypedDict, Unpack

import numpy as np
import numpy.typing as npt

from moechat import _native
from moechat.configurator.systems import CacheSettings
from moechat.configurator.transit_reserve import stream_tokens
from moechat.errors import UsageError
from moechat.routing.hot_experts import long_run
from moechat.routing.trace import Trace
from moechat.simulate.request_queues import RequestQueues
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
        warm: float64 ``[layers, experts]``: shares of earlier tokens that chose each expert: those with the
            highest shares are loaded in place of others while nothing is done, before timing; ``None``: none.
    """

    experts: int
    top_k: int
    blocks: int
    block_bytes: int
    pages: int
    targets: Ints
    reserve: int
    ranks: Floats | None = None
    warm: Floats | None = None

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


class Passes(TypedDict, total=False):
    """Arguments of :class:`Simulation` that can be left out."""

    rankings: Ints | None
    starts: npt.NDArray[np.int64] | None
    warmup: int
    hurried: int
    followed: int
    settled: bool
    timed: int | None
    group_items: int
    watched: Watched | None
    queues: RequestQueues | None


@dataclass(frozen=True)
class Watched:
    """A watch, and the settings of its ways, which differ only in how experts are loaded."""

    watch: Watch
    ways: Mapping[str, CacheSettings]


class Simulation:
    """A trace that is played on a near tier, as far as it is advanced.

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
        followed: Number of these, of one token each, that only the policy sees: nothing is moved.
        settled: Complete all transfers before timing begins.
        timed: Timed passes; ``None``: all that remain.
        group_items: (token, expert) pairs that the engine sums up at a time; 0: all of a pass.
        watched: Watch that may change the settings after each pass that takes time; ``rankings`` have to be
            deep enough for all of its ways.
        queues: What is fetched ahead, if the settings learn from requests.
        like: A simulation of the same trace and policy with a tier of equal sizes, not beyond its hurried
            passes: start at the pass that it has come to, with its blocks and its policy's state. What is on
            its way there arrives.

    Attributes:
        timed: Number of timed passes.

    Raises:
        UsageError: No pass remains to be timed, or an input that the settings need is missing.
        ValueError: Sizes do not match, or the times are of a GPU that holds every block, and it does not.
    """

    def __init__(
        self,
        trace: Trace,
        settings: CacheSettings,
        tier: Tier,
        timing: Timing,
        *,
        rankings: Ints | None = None,
        starts: npt.NDArray[np.int64] | None = None,
        warmup: int = 0,
        hurried: int = 0,
        followed: int = 0,
        settled: bool = False,
        timed: int | None = None,
        group_items: int = 0,
        watched: Watched | None = None,
        queues: RequestQueues | None = None,
        like: Simulation | None = None,
    ) -> None:
        if starts is None:
            starts = np.arange(trace.tokens + 1, dtype=np.int64)
        passes = len(starts) - 1
        end = passes if timed is None else min(passes, warmup + timed)
        if not 0 <= followed <= hurried <= warmup < end:
            raise UsageError(
                f"the trace has {passes} tokens, {warmup} of which come before timing: none is left",
                hint="use a longer trace, or a smaller --warmup",
            )
        if settings.ranks and rankings is None:
            raise UsageError(f"prefetching by {settings.prefetch} needs predictions")
        if settings.queues and (queues is None or queues.experts is None):
            raise UsageError(f"prefetching by {settings.prefetch} needs the queues of the trace")
        self._trace, self._starts, self._rankings = trace, starts, rankings
        self._queues = queues or RequestQueues(np.empty(0, dtype=np.int64))
        self._tier, self._timing, self._watched = tier, timing, watched
        self._hurried, self._warmup, self._end, self._settled = hurried, warmup, end, settled
        self.timed = end - warmup
        self._at, self._begun = 0, False
        self._figures: list[dict[str, Floats]] = []
        self._timeline: _native.Timeline
        policy = _policy(trace, settings, tier) if like is None else like._timeline.copy_policy()
        if followed:
            if starts[followed] != followed:
                raise ValueError("passes that only the policy sees must be of one token each")
            policy.follow(trace.experts[:followed])
            self._at = followed
        self._timeline = _timeline(settings, tier, timing, policy, group_items, watched is not None)
        every_block = tier.layers * tier.experts * tier.blocks
        if timing.launch == "graphs" and tier.pages < every_block:
            raise ValueError(f"{tier.pages} pages do not hold every block, so that layers wait for the host")
        if like is not None:
            if not like._at <= like._hurried or followed > 0:
                raise ValueError("a simulation can start like another that is in its hurried passes")
            like._timeline.drain()
            self._timeline.start_like(like._timeline)
            self._at = like._at
        elif timing.launch != "host" and tier.pages >= every_block:
            # As loading fills a GPU.
            everyone = np.arange(tier.experts, dtype=np.int32)
            for layer in range(tier.layers):
                self._timeline.preload(layer, everyone, tier.blocks)
        elif tier.ranks is not None:
            _preload(self._timeline, tier)

    @property
    def seconds(self) -> Floats:
        """float64 ``[passes]``: times of the timed passes so far."""
        if not self._figures:
            return np.empty(0)
        return np.concatenate([part["seconds"] for part in self._figures])

    def fill(self, left: int) -> None:
        """Play hurried passes until ``left`` of them remain; does nothing where fewer do."""
        self._play(self._hurried - left, hurry=True)

    def advance(self, timed: int | None = None) -> None:
        """Play until so many timed passes have been played.

        Args:
            timed: Passes, from the first timed one; ``None``: all.
        """
        if not self._begun:
            if self._hurried:
                self._play(self._hurried, hurry=True)
                self._timeline.drain()
            self._play(self._warmup)
            if self._settled:
                self._timeline.drain()
            if self._tier.warm is not None:
                self._timeline.start_warm(self._tier.warm, *long_run(self._tier.warm, self._room()))
            self._timeline.reset_stats()
            self._begun = True
        self._figures += self._play(self._end if timed is None else min(self._end, self._warmup + timed))

    def result(self) -> SimulatedRun:
        """The timed passes so far, of which there must be one at least."""
        columns = self._figures[0].keys() - {"hard"}
        figures = {name: np.concatenate([part[name] for part in self._figures]) for name in columns}
        return SimulatedRun(**figures, counters=self._timeline.stats())

    def _room(self) -> int:
        """Experts that the pages hold."""
        return (self._tier.pages - self._tier.reserve) // self._tier.blocks

    def _play(self, stop: int, *, hurry: bool = False) -> list[dict[str, Floats]]:
        """Play the passes before ``stop``; returns their figures in parts."""
        start, self._at = self._at, max(self._at, stop)
        if start >= stop:
            return []
        inputs = self._trace.experts, self._starts, self._rankings
        queues = self._queues
        if self._watched is None or hurry:
            ahead = (queues.experts, queues.scores, queues.requests)
            return [self._timeline.run(*inputs, start, stop, hurry, *ahead)]
        parts = []
        for each in range(start, stop):
            parts.append(self._timeline.run(*inputs, each, each + 1, False))
            watch = self._watched.watch
            if watch.token(float(parts[-1]["seconds"][0]), float(parts[-1]["hard"][0])):
                changed = loading_of(self._watched.ways[watch.way], self._tier, self._timing)
                self._timeline.switch_to(targets=self._tier.targets, **changed)
        return parts


def simulate(
    trace: Trace,
    settings: CacheSettings,
    tier: Tier,
    timing: Timing,
    **more: Unpack[Passes],
) -> SimulatedRun:
    """Play a whole trace on a near tier; arguments and errors as :class:`Simulation`."""
    simulation = Simulation(trace, settings, tier, timing, **more)
    simulation.advance()
    return simulation.result()


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
    settings: CacheSettings,
    tier: Tier,
    timing: Timing,
    policy: _native.EvictionPolicy,
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
        policy=policy,
        whole_experts=settings.whole_experts,
        admit=settings.admit,
        victims=settings.victims,
        adaptive=settings.adaptive_experts(tier.top_k),
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
        layer_factor=settings.layer_factor,
        per_request=settings.per_request,
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
