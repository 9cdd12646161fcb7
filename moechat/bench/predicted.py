"""Simulates measured runs, to compare the simulator with the measurement.

The routing and predictions of a run are recorded and played on the same near tier with a virtual clock. Its
times are measured with all experts in memory (dense part, bookkeeping, kernels), the same while a file link
is busy, with kernels for fewer blocks, and on the link; none is measured on the predicted system.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from moechat import _native
from moechat.bench.figures import Run
from moechat.configurator.systems import CacheSettings
from moechat.geometry import DEFAULT_ACTIVATION_BITS
from moechat.offload.links import open_link
from moechat.offload.settings import LinkSettings
from moechat.offload.tier import ExpertTier
from moechat.predict import Predictor
from moechat.routing import Trace
from moechat.routing.counter import rankings
from moechat.simulate import SimulatedRun, Timing, simulate
from moechat.simulate.run import Tier
from moechat.simulate.timing import OPERATION_BYTES
from moechat.store.store import Store

# Default bytes in flight of the links; see sim_link.cc and file_link.cc.
_SIM_IN_FLIGHT = 2 << 20
_FILE_IN_FLIGHT = 6 << 20
_ACCUMULATOR_BYTES = 8 << 20  # of the runner's sums, see expert_sum.h
_MOST_BYTES = 1 << 29
_ROUNDS = 40
_READS = 64


class Recorder:
    """Wraps the runner of a near tier and records its routing and predictions.

    Args:
        runner: The native runner.
        layers: Number of expert layers.
    """

    def __init__(self, runner: Any, layers: int) -> None:
        self._runner = runner
        self._layers = layers
        self._passes: list[list[npt.NDArray[np.int64]]] = []
        self._expected: list[tuple[int, int, int, int, npt.NDArray[np.float32]]] = []

    def begin(self, layer: int, index: npt.NDArray[np.int64], weight: npt.NDArray[np.float32]) -> None:
        """See the native runner."""
        if layer == 0:
            self._passes.append([])
        self._passes[-1].append(index.copy())
        self._runner.begin(layer, index, weight)

    def prefetch(
        self,
        layer: int,
        scores: npt.NDArray[np.float32] | None,
        experts: int,
        most: int | None,
        *,
        later: bool = False,
    ) -> int:
        """See the native runner."""
        if scores is not None:
            number, begun = len(self._passes) - 1, len(self._passes[-1]) - 1
            self._expected.append((number, begun, layer, experts, scores.copy()))
        queued: int = self._runner.prefetch(layer, scores, experts, most, later=later)
        return queued

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def routing(self, experts: int) -> Recorded:
        """Everything recorded so far, without interrupted passes.

        Args:
            experts: Experts per layer.
        """
        passes = [each for each in self._passes if len(each) == self._layers]
        lengths = [len(each[0]) for each in passes]
        starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        chosen = np.concatenate([np.stack(each, axis=1) for each in passes])
        trace = Trace(
            np.ascontiguousarray(chosen, dtype=np.int32), np.array([0, len(chosen)], dtype=np.int64), experts
        )
        return Recorded(trace, starts, self._rankings(starts))

    def _rankings(self, starts: npt.NDArray[np.int64]) -> npt.NDArray[np.int32] | None:
        if not self._expected:
            return None
        placed = []
        for number, layer, target, experts, scores in self._expected:
            ahead = (target - layer) % self._layers
            if (
                number + 1 < len(starts)
                and (token := int(starts[number + 1]) - 1 + (target < layer)) < starts[-1]
            ):
                placed.append((ahead, token, target, rankings(scores, experts)))
        depths = max(ahead for ahead, *_ in placed)
        width = max(len(best) for *_, best in placed)
        out = np.full((depths, int(starts[-1]), self._layers, max(1, width)), -1, dtype=np.int32)
        for ahead, token, target, best in placed:
            out[ahead - 1, token, target, : len(best)] = best
        return out


@dataclass(frozen=True)
class Recorded:
    """Routing and predictions of one run.

    Attributes:
        trace: All its tokens.
        starts: int64 ``[passes + 1]``: first token of each pass.
        rankings: int32 ``[lookahead, tokens, layers, width]``, -1 for none; ``None``: no predictions.
    """

    trace: Trace
    starts: npt.NDArray[np.int64]
    rankings: npt.NDArray[np.int32] | None


def tier_of(near: ExpertTier) -> Tier:
    """The sizes of a near tier, for the simulator."""
    geometry = near.geometry
    return Tier(
        experts=geometry.num_experts,
        top_k=near.top_k,
        blocks=geometry.blocks_per_expert,
        block_bytes=geometry.record_bytes,
        pages=near.pages,
        targets=np.ascontiguousarray(near.targets),
        reserve=near.reserve,
    )


def predict(
    recorded: Recorded,
    settings: CacheSettings,
    tier: Tier,
    timing: Timing,
    *,
    fill: int,
    timed: int,
    hidden_size: int,
) -> SimulatedRun | None:
    """Simulate one run of the bench.

    Args:
        recorded: Its routing and predictions.
        settings: Settings of the system.
        tier: The measured near tier.
        timing: See :func:`floor_timing`.
        fill: Passes that filled the cache.
        timed: Timed passes, the last ones.
        hidden_size: Hidden size of the model.

    Returns:
        ``None`` for a static set, which the engine loads in another way, and for predictors that learn from
        requests, which were not recorded.
    """
    if settings.policy == "static" or settings.queues or settings.prefetch == "adaptive":
        return None
    expected = recorded.rankings
    if expected is None and settings.ranks:
        settings = replace(settings, prefetch="none")  # the run had no predictions
    if expected is not None:
        # A watched run predicts nothing, or further ahead, in some of its passes.
        settings = replace(settings, lookahead=len(expected))
    passes = len(recorded.starts) - 1
    return simulate(
        recorded.trace,
        # The measured engine fetches all misses.
        replace(settings, miss="fetch"),
        tier,
        timing,
        rankings=expected,
        starts=recorded.starts,
        warmup=passes - timed,
        hurried=min(fill, passes - timed),
        settled=True,
        group_items=max(1, _ACCUMULATOR_BYTES // (4 * hidden_size)),
    )


def slowed(timing: Timing, share: float) -> Timing:
    """The timing with all computation of the near tier longer by ``share``."""
    factor = 1.0 + share
    return replace(
        timing,
        attention=timing.attention * factor,
        head=timing.head * factor,
        compute=tuple(factor * seconds for seconds in timing.compute),
    )


def busy_share(run: SimulatedRun) -> float:
    """Share of the timed passes in which the link was busy."""
    total = float(run.seconds.sum())
    return min(1.0, float(run.counters["link_busy_seconds"]) / total) if total else 0.0


@dataclass(frozen=True)
class LinkTimes:
    """Times of a link for the simulator; see :class:`moechat.simulate.Timing`."""

    latency: float
    link: tuple[float, ...]
    in_flight_bytes: int


def link_times(store: Store, settings: LinkSettings, bandwidth: float) -> LinkTimes:
    """Determine the times of a link.

    Args:
        store: The store that it reads.
        settings: Settings of the link.
        bandwidth: Bytes per second, configured or measured.
    """
    block = store.geometry.record_bytes
    if settings.kind == "sim":
        # The simulated link does not merge adjacent blocks.
        in_flight = settings.in_flight_bytes or _SIM_IN_FLIGHT
        return LinkTimes(settings.latency, (block / bandwidth,), in_flight)
    merged = max(1, OPERATION_BYTES // block)
    moving = tuple(count * block / bandwidth for count in range(1, merged + 1))
    latency = max(0.0, _one_read(store, settings) - block / bandwidth)
    return LinkTimes(latency, moving, settings.in_flight_bytes or _FILE_IN_FLIGHT)


def _one_read(store: Store, settings: LinkSettings) -> float:
    """Seconds of one block over the idle file link."""
    geometry = store.geometry
    link = open_link(store, settings)
    record = geometry.record_bytes
    room = np.empty(record + 4096, dtype=np.uint8)
    begin = -room.ctypes.data % 4096
    target = room[begin : begin + record].reshape(1, record)
    generator = np.random.default_rng(0)
    link.open(1)
    seconds = []
    try:
        for _ in range(_READS):
            layer = int(generator.integers(len(store.layers)))
            block = int(generator.integers(geometry.num_experts * geometry.blocks_per_expert))
            started = time.perf_counter()
            link.submit([(0, layer, block * record, record, 0)], target)
            while not link.wait(1.0):
                pass
            link.poll()
            seconds.append(time.perf_counter() - started)
    finally:
        link.stop(1.0)
    return statistics.median(seconds)


def kernel_curve(
    store: Store, pairs: int, *, activation_bits: int = DEFAULT_ACTIVATION_BITS, seed: int = 0
) -> npt.NDArray[np.float64]:
    """Seconds of the kernels for 1, 2, ... ``pairs`` blocks of one token, from memory larger than the caches.

    Medians of interleaved measurements at powers of two, interpolated linearly.
    """
    geometry = store.geometry
    records = np.array(store.expert_layer(store.layers[0].layer)).reshape(-1, geometry.record_bytes)
    records = records[: max(pairs, _MOST_BYTES // geometry.record_bytes)]
    counts = sorted({*(1 << bit for bit in range(pairs.bit_length())), pairs})
    generator = np.random.default_rng(seed)
    threads = _native.num_threads()
    found: dict[int, list[float]] = {count: [] for count in counts}
    try:
        for _ in range(_ROUNDS):
            for count in counts:
                # As in the runner: for so little work, waking other threads takes too long.
                _native.set_num_threads(1 if count <= 2 else threads)
                found[count].append(_kernel_seconds(geometry, records, count, activation_bits, generator))
    finally:
        _native.set_num_threads(threads)
    # Monotone: more blocks do not take less time.
    medians = np.maximum.accumulate([statistics.median(found[count]) for count in counts])
    return np.interp(np.arange(1, pairs + 1), counts, medians)


def _kernel_seconds(
    geometry: Any,
    records: npt.NDArray[np.uint8],
    count: int,
    activation_bits: int,
    generator: np.random.Generator,
) -> float:
    """Seconds of one kernel call over ``count`` blocks that are not in the caches."""
    blocks = geometry.blocks_per_expert
    rows = -(-count // blocks)
    experts = generator.permutation(len(records) // blocks)[:rows]
    entries = np.arange(count)
    row, block = entries // blocks, entries % blocks
    pointers = (records.ctypes.data + (experts[row] * blocks + block) * geometry.record_bytes).astype(
        np.uint64
    )
    x = generator.standard_normal((1, geometry.hidden_size), dtype=np.float32)
    out = np.zeros((1, geometry.hidden_size), dtype=np.float32)
    arguments = (
        geometry.layout,
        geometry.gate.native,
        x,
        pointers,
        block.astype(np.int32),
        row.astype(np.int32),
        np.arange(rows + 1, dtype=np.int32),
        np.zeros(rows, dtype=np.int32),
        np.full(rows, 0.5, dtype=np.float32),
        out,
    )
    started = time.perf_counter()
    _native.moe_forward(*arguments, activation_bits=activation_bits)
    return time.perf_counter() - started


def predictor_seconds(predictor: Predictor, layers: int, hidden_size: int) -> float:
    """Seconds to predict one layer."""
    hidden = torch.zeros((1, hidden_size))
    seconds = []
    for _ in range(8):
        started = time.perf_counter()
        for ordinal in range(layers):
            predictor.scores(ordinal, 1, hidden)
        seconds.append((time.perf_counter() - started) / layers)
    return statistics.median(seconds)


def floor_timing(
    floors: Sequence[Run], layers: int, curve: npt.NDArray[np.float64], link: LinkTimes
) -> Timing:
    """Times of a token's parts from runs with all experts in memory.

    The kernel curve is scaled to the time of the kernels in these runs. The rest of a token is divided
    equally among the layers.

    Args:
        floors: These runs.
        layers: Number of expert layers.
        curve: Result of :func:`kernel_curve`.
        link: Result of :func:`link_times`.
    """
    token = statistics.median(run.tpot for run in floors)
    wall = sum(sum(run.steps) for run in floors)
    kernels = token * sum(float(run.native["compute_seconds"]) for run in floors) / wall / layers
    return Timing(
        attention=max(0.0, token / layers - kernels),
        head=0.0,
        compute=tuple((curve * (kernels / curve[-1])).tolist()),
        latency=link.latency,
        link=link.link,
        in_flight_bytes=link.in_flight_bytes,
    )
