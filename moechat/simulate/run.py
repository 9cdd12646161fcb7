"""One system over one trace."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from moechat import _native
from moechat.configurator.systems import CacheSettings
from moechat.errors import UsageError
from moechat.routing.trace import Trace
from moechat.simulate.timing import Timing

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int32]
_HITS = ("full", "prefetch", "top", "miss")
# As moechat.offload.cached: a pass that needs this share of a layer streams the next one whole.
_STREAM_SHARE = 0.5


@dataclass(frozen=True)
class Tier:
    """A near tier as it begins.

    Attributes:
        experts: Of a layer.
        top_k: Experts a token.
        blocks: Of an expert.
        block_bytes: Bytes of one.
        pages: Of the slab.
        targets: int32 ``[layers, 2]``: experts kept and blocks kept of each.
        reserve: Pages left for blocks on their way.
        ranks: float64 ``[layers, experts]`` for the policy ``static``: higher is kept, and there from the
            beginning.
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
        """Expert layers."""
        return len(self.targets)


@dataclass(frozen=True)
class SimulatedRun:
    """What was simulated.

    Attributes:
        seconds: float64 ``[passes]``: each timed pass.
        stall: The same: part of it in which the near tier waited for blocks or for the far tier.
        demand_bytes: The same: bytes that the link moved on demand.
        prefetch_bytes: The same: bytes that it moved ahead.
        counters: Of the timed passes together; hits and blocks are those of the engine.
    """

    seconds: Floats
    stall: Floats
    demand_bytes: Floats
    prefetch_bytes: Floats
    counters: dict[str, Any]

    @property
    def tpot(self) -> float:
        """Mean seconds of a token."""
        return float(self.seconds.mean())

    @property
    def hits(self) -> dict[str, float]:
        """Shares of (token, expert) pairs: ``full``, ``prefetch``, ``top``, ``miss``."""
        total = sum(self.counters[f"hits_{kind}"] for kind in _HITS) or 1
        return {kind: self.counters[f"hits_{kind}"] / total for kind in _HITS}

    @property
    def bytes_per_token(self) -> float:
        """Bytes over the link, wanted or not."""
        return float((self.demand_bytes + self.prefetch_bytes).mean())


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
) -> SimulatedRun:
    """Play a trace over a near tier.

    Args:
        trace: In the shape of the model.
        settings: How the near tier is run.
        tier: Its sizes.
        timing: What things take.
        rankings: int32 ``[lookahead, tokens, layers, width]``: experts expected of each token and layer by
            how many layers ahead, best first, -1 for none; what is fetched ahead where the settings say
            ``next-router`` or ``perfect``.
        starts: int64 ``[passes + 1]``: first tokens of the passes; ``None``: every token is a pass of its
            own. A pass of many tokens leaves the cache as a prompt does, but takes the dense times of one
            token.
        warmup: Passes before those that are timed.
        hurried: So many of these take no time, nor do their transfers.
        settled: Everything on its way has arrived before timing begins.
        timed: Passes that are timed; ``None``: all that are left.
        group_items: (token, expert) pairs whose sums the engine adds up at a time; 0: all of a pass.

    Raises:
        UsageError: There is nothing to time, or the settings do not fit what is given.
        ValueError: Sizes do not fit together.
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
    if settings.prefetch in ("next-router", "perfect") and rankings is None:
        raise UsageError(f"prefetching by {settings.prefetch} needs predictions")
    timeline = _timeline(trace, settings, tier, timing, group_items)
    if tier.ranks is not None:
        _preload(timeline, tier)

    def play(start: int, stop: int, hurry: bool = False) -> dict[str, Floats]:
        return timeline.run(trace.experts, starts, rankings, start, stop, hurry)

    if hurried:
        play(0, hurried, True)
        timeline.drain()
    if warmup > hurried:
        play(hurried, warmup)
    if settled:
        timeline.drain()
    timeline.reset_stats()
    figures = play(warmup, end)
    return SimulatedRun(**figures, counters=timeline.stats())


def _timeline(
    trace: Trace, settings: CacheSettings, tier: Tier, timing: Timing, group_items: int
) -> _native.Timeline:
    far = timing.far_block if settings.miss != "fetch" else None
    shared = far if timing.far_block_shared is None else timing.far_block_shared
    ahead = {"none": "none", "whole-layer": "whole-layer"}.get(settings.prefetch, "ranked")
    most = settings.prefetch_experts
    share = min(tier.top_k, tier.experts) / tier.experts
    stream = np.log(1 - _STREAM_SHARE) / np.log1p(-share) if share < 1 else 1.0
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
        # A far tier that cannot compute leaves only the link.
        miss="fetch" if far is None else settings.miss,
        ahead=ahead,
        lookahead=settings.lookahead,
        ahead_experts=min(tier.top_k if most is None else most, tier.experts),
        ahead_bytes=settings.prefetch_bytes,
        stream_tokens=max(2, int(np.ceil(stream))),
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
    """A chosen set is there from the beginning, as the systems that have one load it."""
    assert tier.ranks is not None
    for layer, (experts, blocks) in enumerate(tier.targets.tolist()):
        if experts:
            best = np.argsort(-tier.ranks[layer], kind="stable")[:experts]
            timeline.preload(layer, best.astype(np.int32), blocks)
