"""Compares systems over one trace, at several sizes of the near tier.

Keys of the results, one object per system and fraction:

- ``system`` as written, ``fraction`` of all experts that fit in the near tier, ``pages`` of one block each
  and their ``pages_bytes`` (fewer for a system that keeps nothing between tokens), ``experts_kept`` per layer
  and ``split``, the cached share of each, both as means.
- ``hit_rate``: share of (token, expert) pairs whose expert was resident or in transit when the router was
  done: ``full_hit_rate`` without a prefetch plus ``prefetch_hit_rate`` with one. ``top_hit_rate``: only some
  of its blocks; ``miss_rate``: none. These four rates without ``hit_rate`` add up to 1.
- ``tpot_ms``: mean milliseconds per token, ``tpot_p50_ms`` and ``tpot_p95_ms`` its percentiles,
  ``tokens_per_second`` its inverse. ``stall_ms``: the part in which the near tier waited for blocks or for
  the far tier's sums; ``compute_ms``: computing experts; ``dense_ms``: the rest of the model.
- ``bytes_per_token`` over the link: ``demand_bytes_per_token`` plus ``prefetch_bytes_per_token``, of which
  ``wasted_bytes_per_token`` were never used. ``far_blocks_per_token`` were computed in the far tier instead.
- ``link_busy`` and ``far_busy``: shares of the time. ``strategy``: that which ``auto`` has chosen, or ``as
  given``.
- Input, the same in all objects of a run: ``trace``, ``mapping`` (null if the trace has the model's shape),
  ``model``, ``bits``, ``expert_bytes``, ``experts_total_bytes`` of all experts, ``profile``, ``near`` (tier
  that computes), ``link_bandwidth`` (bytes per second for an expert), ``accuracy`` as requested,
  ``accuracy_measured`` over all layers and ``accuracy_by_layer``, ``warmup`` and ``tokens``, ``seed``, and
  ``costs``: seconds of ``attention`` (per layer), ``moe`` (a layer's experts, all near), ``head`` (per
  token), ``load`` (an expert over the link) and ``compute_far`` (an expert in the far tier; null if it cannot
  compute). A GPU that holds all experts takes less: its layers do not wait for the host.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from threading import Lock
from typing import Any

import numpy as np
import numpy.typing as npt

from moechat.config import cuda_graphs_wanted, run_ahead_wanted
from moechat.configurator.costs import Costs
from moechat.configurator.estimate import ModelShape, Near, costs_of
from moechat.configurator.gpu_pattern import runs_ahead
from moechat.configurator.systems import SYSTEMS, CacheSettings
from moechat.errors import UsageError
from moechat.hardware.profile import HardwareProfile
from moechat.routing.counter import statistics_of_trace
from moechat.routing.statistics import RoutingStatistics
from moechat.routing.trace import Trace
from moechat.routing.trace_mapping import map_trace
from moechat.simulate.choice import choose_strategy
from moechat.simulate.predictions import (
    accuracy_by_layer,
    draw_rankings,
    measured_accuracy,
    perfect_rankings,
)
from moechat.simulate.request_queues import RequestQueues, request_queues
from moechat.simulate.run import Ints, SimulatedRun, Tier, simulate
from moechat.simulate.simulated_model import SimulatedModel
from moechat.simulate.strategy import LOOKAHEAD, Strategy, strategies
from moechat.simulate.systems import kept_share, pages_for, settings_for, tier_for
from moechat.simulate.timing import Timing, timing_of

Report = Callable[[str], None]
DEFAULT_FRACTIONS = (0.125, 0.25, 0.5)
_USUAL_WARMUP = 1000
# Tokens before timing from which ``auto`` chooses its strategy on them.
_LEAST_CHOICE = 30


@dataclass(frozen=True)
class SimulateOptions:
    """Parameters of a simulation.

    Attributes:
        systems: Names, in the syntax of :func:`moechat.simulate.systems.settings_for`.
        fractions: Shares of all experts that fit in the near tier.
        accuracy: Mean accuracy of predictions over the layers.
        tokens: Timed tokens.
        warmup: Tokens before them, which fill the cache and are the only routing known to a system's plan;
            ``None``: 1000, or a third of a short trace.
        bandwidth: Bytes per second of the link, replacing the profile's.
        seed: Random seed.

    Raises:
        UsageError: A value is out of range, or a system is unknown.
    """

    systems: tuple[str, ...]
    fractions: tuple[float, ...] = DEFAULT_FRACTIONS
    accuracy: float = 0.7
    tokens: int = 2000
    warmup: int | None = None
    bandwidth: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.systems or len(set(self.systems)) != len(self.systems):
            raise UsageError("name different systems, at least one")
        for name in self.systems:
            settings_for(name)
        for fraction in self.fractions:
            if not 0 < fraction <= 1:
                raise UsageError(f"a fraction is {fraction:g}; it must be above 0 and at most 1")
        if not self.fractions or len(set(self.fractions)) != len(self.fractions):
            raise UsageError("the fractions must be different numbers, at least one")
        accuracy_by_layer(1, self.accuracy)
        for name, value, least in (
            ("tokens", self.tokens, 1),
            ("warmup", 0 if self.warmup is None else self.warmup, 0),
            ("seed", self.seed, 0),
        ):
            if value < least:
                raise UsageError(f"{name} is {value}; it must be at least {least}")
        if self.bandwidth is not None and not 0 < self.bandwidth < math.inf:
            raise UsageError(f"the link moves {self.bandwidth:g} bytes a second; it must be above 0")


class Comparison:
    """Simulates systems on one trace, model and machine.

    Args:
        trace: The recorded trace.
        model: Sizes of the model; the trace is mapped to its shape if necessary.
        profile: The machine.
        near: Tier that computes; ``None``: the GPU if there is one.
        options: Parameters.
        name: Name of the trace, for the results.

    Raises:
        UsageError: The trace is too short or cannot be mapped to the model, or the profile lacks a tier.
    """

    def __init__(
        self,
        trace: Trace,
        model: SimulatedModel,
        profile: HardwareProfile,
        options: SimulateOptions,
        *,
        near: Near | None = None,
        name: str = "",
    ) -> None:
        self.options = options
        self.near: Near = near if near is not None else ("gpu" if profile.gpu is not None else "ram")
        self.model = model.on(self.near)
        shape = self.model.shape
        self.warmup, self.tokens = _lengths(trace, options)
        part = trace.head(self.warmup + self.tokens)
        mapped = map_trace(part, shape.layers, shape.experts, shape.top_k, seed=options.seed)
        self.trace = mapped.trace
        self.how = None if self.trace is part else mapped.how
        self.costs = _costs(profile, shape, self.near, options.bandwidth)
        self.timing = self._timing(profile, self.costs)
        # Of a GPU that holds every expert.
        self._costs_ahead, self._timing_ahead = self.costs, self.timing
        if self.near == "gpu":
            self._costs_ahead = _costs(profile, shape, self.near, options.bandwidth, ahead=True)
            self._timing_ahead = self._timing(profile, self._costs_ahead)
        self.rankings: dict[int, Ints] = {}
        self.accuracy = accuracy_by_layer(shape.layers, options.accuracy)
        self._statistics: dict[tuple[Any, ...], RoutingStatistics] = {}
        self._queues: dict[tuple[Any, ...], RequestQueues | None] = {}
        self._making = Lock()
        self._done: dict[tuple[Any, ...], dict[str, Any]] = {}
        self.facts = self._facts(profile, name)

    def cases(self, report: Report = lambda _: None) -> Iterator[dict[str, Any]]:
        """Results, one per system and fraction; see the module docstring.

        Args:
            report: Called with a line about each result.
        """
        for fraction in self.options.fractions:
            for name in self.options.systems:
                case = self.case(name, fraction)
                report(f"{fraction:.3g} of the experts, {name}: {case['tpot_ms']:.1f} ms a token")
                yield case

    def case(self, name: str, fraction: float) -> dict[str, Any]:
        """Simulate one system at one size."""
        settings = settings_for(name)
        if settings.choose and settings.needs_future:
            figures = self._in_hindsight(settings, fraction)
        else:
            figures = self._played(self.strategy(settings, fraction), fraction)
        return {"system": name, "fraction": fraction, **figures, **self.facts}

    @property
    def floor_ms(self) -> float:
        """Milliseconds per token where all experts are near."""
        costs = self._costs_ahead
        return 1000 * (costs.head + self.model.shape.layers * (costs.attention + costs.moe))

    def _in_hindsight(self, settings: CacheSettings, fraction: float) -> dict[str, Any]:
        """Figures of the fastest: the ways to use the future, those of auto, and all other systems.

        Who knows the future also knows which system will be the fastest, and can do as it does.
        """
        far_computes = self.timing.far_block is not None
        found = [
            *strategies(settings, far_computes=far_computes),
            *strategies(settings_for("auto"), far_computes=far_computes),
        ]
        for name in {**SYSTEMS, **dict.fromkeys(self.options.systems)}:
            other = settings_for(name)
            if not other.choose:
                found.append(Strategy(name, f"as {name}", other))
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            played = pool.map(lambda each: self._played(each, fraction), found)
            return min(played, key=lambda case: case["tpot_ms"])

    def _played(self, strategy: Strategy, fraction: float) -> dict[str, Any]:
        """Figures of one strategy."""
        settings, tier = strategy.settings, self.tier(strategy.settings, fraction)
        # Cached, because a system that cannot use more memory has the same result at every size.
        key = (settings, tier.pages, tier.targets.tobytes())
        if key not in self._done:
            rankings = self.rankings_for(settings)
            timing = self._timing_ahead if self._runs_ahead(tier) else self.timing
            done = simulate(
                self.trace,
                settings,
                tier,
                timing,
                rankings=rankings,
                queues=self.queues_for(settings),
                warmup=self.warmup,
            )
            self._done[key] = _figures(done, tier)
        return {**self._done[key], "strategy": strategy.title}

    def _runs_ahead(self, tier: Tier) -> bool:
        blocks = tier.layers * tier.experts * tier.blocks
        return self.near == "gpu" and runs_ahead(
            tier.pages, blocks, graphs=cuda_graphs_wanted(), wanted=run_ahead_wanted()
        )

    def tier(self, settings: CacheSettings, fraction: float) -> Tier:
        """Plan the near tier of a system."""
        geometry, shape = self.model.geometry, self.model.shape
        return tier_for(
            settings,
            self.statistics(settings),
            self.costs,
            geometry,
            pages=pages_for(geometry, shape.layers, shape.top_k, settings, fraction),
            top_k=shape.top_k,
        )

    def strategy(self, settings: CacheSettings, fraction: float) -> Strategy:
        """The strategy of a system: its settings, or what it chooses on the tokens before timing."""
        if not settings.choose:
            return Strategy("given", "as given", settings)
        if self.warmup < _LEAST_CHOICE:
            return Strategy("computed", "the computed plan", replace(settings, choose=False))
        rankings = self.rankings_for(replace(settings, lookahead=max(settings.lookahead, LOOKAHEAD)))
        return choose_strategy(
            settings,
            lambda candidate: self.tier(candidate, fraction),
            self.timing,
            self.trace.head(self.warmup),
            None if rankings is None else rankings[:, : self.warmup],
        ).strategy

    def rankings_for(self, settings: CacheSettings) -> Ints | None:
        """Predictions for a system; the same for all systems."""
        if settings.prefetch == "perfect":
            return perfect_rankings(self.trace, settings.lookahead)
        if not settings.predicts:
            return None
        return self._drawn(settings.lookahead, max(1, settings.ranked_experts(self.model.shape.top_k)))

    def queues_for(self, settings: CacheSettings) -> RequestQueues | None:
        """What a system that learns from requests fetches ahead; the same at every size."""
        key = (settings.prefetch, settings.entries, settings.match, settings.distance, settings.per_request)
        with self._making:
            if key not in self._queues:
                self._queues[key] = request_queues(self.trace, settings)
            return self._queues[key]

    def _drawn(self, lookahead: int, width: int = 0) -> Ints:
        """Draw predictions once, for the largest width and lookahead, so that all systems share them."""
        if not self.rankings:
            everyone = [settings_for(name) for name in self.options.systems]
            widest = max([self.model.shape.top_k, *(each.prefetch_experts or 0 for each in everyone)])
            farthest = max(LOOKAHEAD, *(each.lookahead for each in everyone))
            drawn = draw_rankings(
                self.trace, self.accuracy, width=widest, lookahead=farthest, seed=self.options.seed
            )
            self.rankings = {ahead: drawn[ahead : ahead + 1] for ahead in range(farthest)}
        wanted = [self.rankings[ahead][..., :width] for ahead in range(lookahead)]
        return np.ascontiguousarray(np.concatenate(wanted))

    def statistics(self, settings: CacheSettings) -> RoutingStatistics:
        """Statistics of the tokens before timing, ranked by the policy of a system."""
        if settings.policy == "belady":  # uses the future, so its ranks do not describe a cache
            settings = replace(settings, policy="lcp")
        key = (settings.policy, settings.omega, settings.rho, settings.gamma)
        if key not in self._statistics:
            seen = self.trace.head(max(1, self.warmup))
            expected = self._drawn(1, self.model.shape.top_k)[0, : seen.tokens]
            self._statistics[key] = statistics_of_trace(seen, settings, predictions=expected)
        return self._statistics[key]

    def _timing(self, profile: HardwareProfile, costs: Costs) -> Timing:
        shape = self.model.shape
        gpu = profile.gpu if self.near == "gpu" else None
        return timing_of(
            costs,
            top_k=shape.top_k,
            blocks=shape.blocks_per_expert,
            block_bytes=shape.block_bytes,
            link=profile.links["gpu" if self.near == "gpu" else "file"],
            bandwidth=self.options.bandwidth,
            far_threads=profile.cores,
            launch="host" if gpu is None else "card",
        )

    def _facts(self, profile: HardwareProfile, name: str) -> dict[str, Any]:
        shape, options, costs = self.model.shape, self.options, self.costs
        load = len(self.timing.link) * shape.block_bytes / self.timing.link[-1]
        return {
            "trace": name,
            "mapping": self.how,
            "model": self.model.name,
            "bits": shape.bits,
            "expert_bytes": shape.expert_bytes,
            "experts_total_bytes": shape.all_expert_bytes,
            "profile": profile.name,
            "near": self.near,
            "link_bandwidth": load,
            "accuracy": options.accuracy,
            "accuracy_measured": measured_accuracy(self.trace, self._drawn(1, shape.top_k)),
            "accuracy_by_layer": [round(float(value), 4) for value in self.accuracy],
            "warmup": self.warmup,
            "tokens": self.tokens,
            "seed": options.seed,
            "costs": {
                "attention": costs.attention,
                "moe": costs.moe,
                "head": costs.head,
                "load": costs.load,
                "compute_far": costs.compute_far if costs.far_computes else None,
            },
        }


def _costs(
    profile: HardwareProfile, shape: ModelShape, near: Near, bandwidth: float | None, *, ahead: bool = False
) -> Costs:
    costs = costs_of(profile, shape, near=near, ahead=ahead)
    if bandwidth is None:
        return costs
    load = shape.expert_bytes / bandwidth
    return replace(costs, load=load, load_together=load * costs.both_loads / costs.load)


def _lengths(trace: Trace, options: SimulateOptions) -> tuple[int, int]:
    """Number of tokens before timing, and of timed tokens."""
    warmup = options.warmup
    if warmup is None:
        warmup = min(_USUAL_WARMUP, trace.tokens // 3)
    left = trace.tokens - warmup
    if left < 1:
        raise UsageError(
            f"the trace has {trace.tokens} tokens, {warmup} of which come before timing: none is left",
            hint="use a longer trace, or a smaller --warmup",
        )
    return warmup, min(options.tokens, left)


def _figures(done: SimulatedRun, tier: Tier) -> dict[str, Any]:
    hits, counters, tokens = done.hits, done.counters, len(done.seconds)
    total = float(done.seconds.sum())
    experts, split = kept_share(tier)

    def milliseconds(values: npt.NDArray[np.float64] | float) -> float:
        return 1000 * float(np.mean(values))

    compute = counters["compute_seconds"] / tokens
    return {
        "hit_rate": hits["full"] + hits["prefetch"],
        "top_hit_rate": hits["top"],
        "tpot_ms": milliseconds(done.seconds),
        "stall_ms": milliseconds(done.stall),
        "bytes_per_token": done.bytes_per_token,
        "full_hit_rate": hits["full"],
        "prefetch_hit_rate": hits["prefetch"],
        "miss_rate": hits["miss"],
        "tpot_p50_ms": milliseconds(float(np.percentile(done.seconds, 50))),
        "tpot_p95_ms": milliseconds(float(np.percentile(done.seconds, 95))),
        "tokens_per_second": 1 / done.tpot if done.tpot > 0 else None,
        "compute_ms": milliseconds(compute),
        "dense_ms": milliseconds(done.seconds - done.stall) - milliseconds(compute),
        "demand_bytes_per_token": float(done.demand_bytes.mean()),
        "prefetch_bytes_per_token": float(done.prefetch_bytes.mean()),
        "wasted_bytes_per_token": counters["prefetch_wasted"] * tier.block_bytes / tokens,
        "far_blocks_per_token": counters["blocks_far"] / tokens,
        # Sums of times round.
        "link_busy": min(1.0, counters["link_busy_seconds"] / total) if total else 0.0,
        "far_busy": counters["far_seconds"] / total if total else 0.0,
        "pages": tier.pages,
        "pages_bytes": tier.pages * tier.block_bytes,
        "experts_kept": experts,
        "split": split,
    }
