"""Estimates the time of a token and of a prompt. Pure functions.

A decoded token takes ``T_head + L·(T_att + T_moe) + Σ T_i``. The exposed times ``T_i`` of an allocation
are those of the expected number of missing experts, which is a lower bound: a layer that misses half an
expert on average misses none in one token and one in the next, and only the latter waits. So this module
takes the expectation over the number of missing experts, each activated expert missing independently.

A prompt goes through the layers in waves of one or more passes; in each, the experts that its tokens choose
and that are not near are streamed once, while the layer before is computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from moechat.configurator import gpu_rates
from moechat.configurator.allocation import Allocation
from moechat.configurator.costs import Costs
from moechat.configurator.estimate import (
    ModelShape,
    Near,
    beside_link,
    expert_rate,
    link_rate,
    link_rate_together,
    nearest_bits,
)
from moechat.configurator.exposure import EngineModel
from moechat.configurator.systems import CacheSettings
from moechat.configurator.targets import BLOCKS, EXPERTS
from moechat.hardware.profile import Figure, HardwareProfile
from moechat.routing.statistics import RoutingStatistics

PROMPTS = (128, 1024, 4096, 16384)

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Decode:
    """The time of a decoded token.

    Attributes:
        seconds: Total.
        dense: Seconds in attention, norms, routers, shared experts.
        experts: Seconds in the routed experts that are near.
        waiting: Seconds that missing experts take, moved or computed where they lie, beyond all other work.
        head: Seconds of the head and of sampling the token.
        hit_rate: Share of activated experts, by bytes, that are kept near.
        ready_rate: The same, with experts that were prefetched in time.
        far_bytes: Bytes of activated experts that are not kept near.
    """

    seconds: float
    dense: float
    experts: float
    waiting: float
    head: float
    hit_rate: float
    ready_rate: float
    far_bytes: float

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return 1 / self.seconds


def kept_share(allocation: Allocation, statistics: RoutingStatistics, blocks: int) -> Floats:
    """``H(C)·θ``: float64 ``[layers]``: share of activations, by bytes, that the kept experts serve."""
    experts, kept = allocation.targets[:, EXPERTS], allocation.targets[:, BLOCKS]
    layers = np.arange(len(experts))
    share: Floats = statistics.hit_rate[layers, experts] * kept / blocks
    return share


def expected_exposed(
    settings: CacheSettings,
    costs: Costs,
    shape: ModelShape,
    statistics: RoutingStatistics,
    allocation: Allocation,
) -> Floats:
    """Expected exposed seconds of each layer: float64 ``[layers]``.

    Of K activated experts, a binomial number r, with probability ``1 - H(C)``, is not kept at all; of each of
    the others ``1 - θ`` is missing. Experts prefetched in time reduce both by the same share.
    """
    top_k, blocks = shape.top_k, shape.blocks_per_expert
    experts, kept = allocation.targets[:, EXPERTS], allocation.targets[:, BLOCKS]
    hit = statistics.hit_rate[np.arange(len(experts)), experts]
    lacking = 1 - np.where(experts > 0, kept / blocks, 0.0)
    missing = top_k * (1 - hit * (1 - lacking))
    ahead = np.where(missing > 0, (top_k - allocation.loaded) / np.maximum(missing, 1e-12), 0.0)
    ahead = np.clip(ahead, 0.0, 1.0)  # share of the missing bytes that no prefetch brings in time
    whole = (1 - hit) * ahead
    counts = np.arange(top_k + 1)
    ways = np.array([math.comb(top_k, count) for count in counts], dtype=np.float64)
    chance = ways * whole[:, None] ** counts * (1 - whole[:, None]) ** (top_k - counts)
    late = counts + (top_k - counts) * (lacking * ahead)[:, None]
    exposed, _ = EngineModel.of(settings, costs, top_k, blocks).times(top_k - np.minimum(late, top_k))
    expected: Floats = (chance * exposed).sum(axis=1)
    # The lower bound applies where it is larger, as with experts that miss together.
    return np.maximum(expected, allocation.exposed)


def scaled_to(exposed: Floats, seconds: float) -> Floats:
    """The exposed times, scaled so that they add up to ``seconds``; spread evenly if all are 0."""
    total = float(exposed.sum())
    return exposed * (seconds / total) if total > 0 else np.full_like(exposed, seconds / len(exposed))


def decode_speed(
    costs: Costs,
    shape: ModelShape,
    statistics: RoutingStatistics,
    allocation: Allocation | None = None,
    exposed: Floats | None = None,
) -> Decode:
    """Time of a token with an allocation and its :func:`expected_exposed`; without them all experts are
    near.
    """
    dense, experts = shape.layers * costs.attention, shape.layers * costs.moe
    if allocation is None or exposed is None:
        seconds = costs.head + dense + experts
        return Decode(seconds, dense, experts, 0.0, costs.head, 1.0, 1.0, 0.0)
    share = kept_share(allocation, statistics, shape.blocks_per_expert)
    waiting = float(exposed.sum())
    return Decode(
        seconds=costs.head + dense + experts + waiting,
        dense=dense,
        experts=experts,
        waiting=waiting,
        head=costs.head,
        hit_rate=float(share.mean()),
        ready_rate=float(np.clip(allocation.loaded / shape.top_k, 0, 1).mean()),
        far_bytes=float((1 - share).sum()) * shape.top_k * shape.expert_bytes,
    )


@dataclass(frozen=True)
class PrefillRates:
    """Rates at which many tokens at a time are computed and experts streamed.

    Attributes:
        dense: Multiplications and additions a second with dense weights.
        experts: The same with experts.
        width: Bytes of weights a second; a lower bound for the time of a pass.
        stream: Bytes of experts a second from the far tier; infinite where all are near.
        by_tokens: :attr:`experts` by tokens of each expert, where that is known.
    """

    dense: float
    experts: float
    width: float
    stream: float
    by_tokens: Callable[[float], float] | None = None

    def experts_at(self, tokens: float) -> float:
        """Multiplications and additions a second with experts, each of which has so many tokens."""
        return self.experts if self.by_tokens is None else self.by_tokens(tokens)


def prefill_rates(
    profile: HardwareProfile, shape: ModelShape, near: Near, stream: float
) -> PrefillRates | None:
    """Rates from a profile; ``None`` where it has none for many tokens."""
    gpu = profile.gpu
    if near == "gpu":
        assert gpu is not None
        return PrefillRates(
            dense=gpu_rates.dense_flops(gpu, shape.dense_itemsize).value,
            experts=gpu_rates.expert_flops(gpu, shape.bits).value,
            width=gpu.bandwidth.value,
            stream=stream,
            by_tokens=lambda tokens: gpu_rates.expert_flops(gpu, shape.bits, tokens).value,
        )
    if not profile.expert_flops:
        return None
    known = profile.expert_flops
    nearest = nearest_bits(shape.bits, known)
    return PrefillRates(
        known[max(known)].value, known[nearest].value, expert_rate(profile, shape.bits).value, stream
    )


def prompt_seconds(
    tokens: int,
    chunk: int,
    wave: int,
    shape: ModelShape,
    rates: PrefillRates,
    statistics: RoutingStatistics,
    allocation: Allocation | None,
    costs: Costs,
) -> float:
    """Time to the first token of a prompt.

    Args:
        tokens: Of the prompt.
        chunk: Tokens of a pass.
        wave: Tokens of a wave, whose missing experts are moved once; at most ``chunk``: those of a pass.
        shape: The model.
        rates: Of many tokens.
        statistics: Which experts tokens choose.
        allocation: Which experts are near; ``None``: all.
        costs: Of a decoded token.
    """
    seconds, done = costs.head, 0
    while done < tokens:
        step = min(max(chunk, wave), tokens - done)
        chosen, missing = _streamed(step, shape, statistics, allocation)
        dense = sum(
            _dense_seconds(min(chunk, done + step - begin), begin, shape, rates)
            for begin in range(done, done + step, chunk)
        )
        each = step * shape.top_k * shape.layers / max(1.0, float(chosen.sum()))
        routed = 2 * step * shape.top_k * shape.expert_weights / rates.experts_at(max(1.0, each))
        computed = dense / shape.layers + np.maximum(routed, chosen * shape.expert_bytes / rates.width)
        # No pass is faster than that of one token.
        computed = np.maximum(computed, -(-step // chunk) * costs.attention + costs.moe)
        moved = missing * shape.expert_bytes / rates.stream
        seconds += float(np.maximum(computed, moved).sum())
        done += step
    return seconds


def _dense_seconds(tokens: int, before: int, shape: ModelShape, rates: PrefillRates) -> float:
    """Time of the dense part of a pass of so many tokens behind ``before`` others."""
    # Scores and values of attention: two products a pair of tokens.
    pairs = tokens * (before + tokens / 2)
    products = 2 * tokens * shape.dense_bytes / shape.dense_itemsize
    products += 4 * pairs * shape.hidden_size * shape.layers
    return max(products / rates.dense, shape.dense_bytes / rates.width)


def _streamed(
    tokens: int, shape: ModelShape, statistics: RoutingStatistics, allocation: Allocation | None
) -> tuple[Floats, Floats]:
    """Experts that so many tokens choose in each layer, and those of them that are not near: float64
    ``[layers]`` each.

    Tokens are assumed to choose independently, each expert as often as it was counted; the tokens of a text
    choose similar experts, so these numbers are upper bounds.
    """
    counts = statistics.activations.astype(np.float64) + 1e-9
    popular = -np.sort(-counts / counts.sum(axis=1, keepdims=True), axis=1)
    touched = 1 - (1 - np.minimum(shape.top_k * popular, 1.0)) ** tokens
    chosen: Floats = touched.sum(axis=1)
    if allocation is None:
        return chosen, np.zeros(len(chosen))
    sums = np.concatenate([np.zeros((len(chosen), 1)), np.cumsum(touched, axis=1)], axis=1)
    experts, kept = allocation.targets[:, EXPERTS], allocation.targets[:, BLOCKS]
    there = sums[np.arange(len(chosen)), experts] * kept / shape.blocks_per_expert
    return chosen, np.maximum(chosen - there, 0.0)


def behind_disk(
    costs: Costs,
    shape: ModelShape,
    statistics: RoutingStatistics,
    *,
    near_share: float,
    ram_share: float,
    disk_rate: float,
) -> Costs:
    """Costs where RAM does not hold all experts, so that some of the missing ones come from the disk.

    RAM keeps the most used experts beyond those of the near tier, so of the activations that miss the near
    tier this share misses both: ``(1 - H(C_near + C_ram)) / (1 - H(C_near))``.

    Args:
        costs: Costs if RAM holds all experts.
        shape: The model.
        statistics: Statistics for H.
        near_share: Share of all experts that the near tier holds.
        ram_share: Share that RAM holds.
        disk_rate: Bytes a second from the disk.
    """
    if ram_share >= 1:
        return costs
    reached = statistics.hit_rate.mean(axis=0)
    places = np.arange(len(reached)) / (len(reached) - 1)
    missed_both = 1 - float(np.interp(min(1.0, near_share + ram_share), places, reached))
    missed_near = 1 - float(np.interp(near_share, places, reached))
    disk = min(1.0, missed_both / missed_near) if missed_near > 0 else 0.0
    read = shape.expert_bytes / disk_rate

    def slower(seconds: float) -> float:
        return (1 - disk) * seconds + disk * max(seconds, read) if math.isfinite(seconds) else seconds

    return replace(
        costs,
        load=slower(costs.load),
        compute_far=slower(costs.compute_far),
        load_together=slower(costs.both_loads),
        compute_together=slower(costs.both_computes),
    )


def figures_used(
    profile: HardwareProfile, shape: ModelShape, near: Near, *, far: bool, disk: bool, in_ram: float = 1.0
) -> Mapping[str, Figure]:
    """The figures of a profile that a speed rests on, by name.

    Args:
        profile: The machine.
        shape: The model.
        near: Tier that computes.
        far: Whether some experts are not near.
        disk: Whether some of those are on the disk only.
        in_ram: Share of the experts that RAM holds behind a GPU.
    """
    found: dict[str, Figure] = {}
    computing = profile.with_grids(shape.grids)
    rates, together = expert_rate(computing, shape.bits), beside_link(computing, near)
    if near == "gpu" and profile.gpu is not None:
        gpu = profile.gpu
        found["graphics memory, bytes/s"] = gpu.bandwidth
        found["dense weights on the GPU, bytes/s"] = gpu_rates.dense_rate(gpu, shape.dense_itemsize)
        found["experts on the GPU, bytes/s"] = gpu_rates.expert_rate(gpu, shape.bits)
        found["GPU, operations/s"] = gpu_rates.dense_flops(gpu, shape.dense_itemsize)
        found["experts on the GPU, operations/s"] = gpu_rates.expert_flops(gpu, shape.bits)
        found["starting a kernel, s"] = gpu.launch
        if not far:
            return found
        link = profile.links["gpu"]
        held = round(in_ram * shape.all_expert_bytes)
        found["RAM to GPU, bytes/s"] = link_rate(link, shape.expert_bytes, held)
        found["experts on the CPU, bytes/s"] = rates
        shared = link_rate_together(link, shape.expert_bytes, held)
        if shared is not None:
            found["RAM to GPU while the CPU computes, bytes/s"] = shared
        if together:
            nearest = nearest_bits(shape.bits, together)
            found["experts on the CPU while that link is busy, bytes/s"] = together[nearest]
    else:
        found["experts on the CPU, bytes/s"] = rates
        if profile.expert_flops:
            nearest = nearest_bits(shape.bits, profile.expert_flops)
            found["experts on the CPU, operations/s"] = profile.expert_flops[nearest]
        found["RAM, bytes/s"] = profile.ram_bandwidth
    if disk:
        found["disk to RAM, bytes/s"] = link_rate(profile.links["file"], shape.expert_bytes)
    return found
