"""Estimates the times of a token from a machine's profile and a model's shape, without measuring the model.

A time is bytes divided by the sustained bandwidth of their tier, plus a fixed overhead per layer. Values that
are not in the profile are constants here, each with its reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from moechat.configurator import gpu_rates
from moechat.configurator.costs import Costs
from moechat.configurator.gpu_pattern import DENSE_KERNELS, GpuCalls, gpu_calls
from moechat.errors import UsageError
from moechat.hardware.profile import Figure, HardwareProfile, LinkFigures, ModelTimes, Origin

Near = Literal["gpu", "ram"]

# Overhead of torch's operators and the interpreter on a CPU: the demo's times, whose weights are negligible,
# on two cores at 2.3 GHz, for a layer without its experts, for its experts, and for the rest of a token.
_CPU_LAYER_SECONDS = 600e-6
_CPU_EXPERTS_SECONDS = 100e-6
_CPU_TOKEN_SECONDS = 800e-6
# Share of the streaming bandwidth that torch's matrix-vector products reach on a CPU.
_DENSE_SHARE = 0.7
# Default context that attention reads.
_USUAL_CONTEXT = 1024
# From most to least reliable; a derived figure has the origin of its least reliable input.
_RELIABILITY: tuple[Origin, ...] = ("measured", "published", "datasheet", "estimate")


_MAY_BE_NOTHING = ("kv_bytes", "head_bytes", "dense_bytes", "grids", "graphs")


@dataclass(frozen=True)
class ModelShape:
    """Sizes that the time of a token depends on.

    Attributes:
        layers: Layers with routed experts.
        experts: Experts per layer.
        top_k: Experts per token and layer.
        bits: Bits per expert weight.
        block_bytes: A block record with its padding: the content of a page and of a transfer.
        blocks_per_expert: Blocks of 64 neurons per expert.
        expert_weights: Weights of one expert, including biases.
        dense_bytes: Dense weights of the whole model between the embedding and the final norm, in their
            compute type: attention, norms, routers, shared experts, dense layers; read once per token.
        head_bytes: Final norm and head, in that type.
        dense_itemsize: Mean bytes per dense weight.
        kv_bytes: Attention cache of the whole model for one token of context.
        hidden_size: Size of the hidden states.
        grids: Share of the expert weights in encodings with grids.
        kernels: Kernels of the dense part on a GPU for each layer.
        graphs: Decoded tokens are replayed from CUDA graphs on a GPU; else torch launches every kernel.

    Raises:
        ValueError: A value is negative, or a count is 0.
    """

    layers: int
    experts: int
    top_k: int
    bits: int
    block_bytes: int
    blocks_per_expert: int
    expert_weights: int
    dense_bytes: int
    head_bytes: int
    dense_itemsize: float
    kv_bytes: int
    hidden_size: int
    grids: float = 0.0
    kernels: float = DENSE_KERNELS
    graphs: bool = True

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 0 or (value == 0 and name not in _MAY_BE_NOTHING):
                raise ValueError(f"{name} is {value}")
        if self.top_k > self.experts:
            raise ValueError(f"{self.top_k} experts per token of {self.experts} are not valid")

    @property
    def expert_bytes(self) -> int:
        """``U_e``: bytes of all blocks of an expert."""
        return self.blocks_per_expert * self.block_bytes

    @property
    def all_expert_bytes(self) -> int:
        """Bytes of all experts of all layers."""
        return self.layers * self.experts * self.expert_bytes

    @property
    def layer_dense_bytes(self) -> float:
        """Mean bytes of dense weights per layer."""
        return self.dense_bytes / self.layers


@dataclass(frozen=True)
class CostFigures:
    """The times of :class:`Costs`, each with its origin.

    Attributes:
        costs: The times.
        figures: Known, finite times by field name of :class:`Costs`. A time derived from one figure of the
            profile has its origin; one by a rule of this module is an ``estimate`` with the rule as source.
    """

    costs: Costs
    figures: Mapping[str, Figure]

    @property
    def measured(self) -> bool:
        """Whether all times were measured on this machine."""
        return all(figure.origin == "measured" for figure in self.figures.values())


def costs_of(
    profile: HardwareProfile,
    shape: ModelShape,
    *,
    times: ModelTimes | None = None,
    near: Near,
    context: int = _USUAL_CONTEXT,
    ahead: bool = False,
) -> Costs:
    """The times of a token on a machine: :func:`cost_figures` without the origins."""
    return cost_figures(profile, shape, times=times, near=near, context=context, ahead=ahead).costs


def cost_figures(
    profile: HardwareProfile,
    shape: ModelShape,
    *,
    times: ModelTimes | None = None,
    near: Near,
    context: int = _USUAL_CONTEXT,
    in_ram: float = 1.0,
    ahead: bool = False,
) -> CostFigures:
    """The times of a token on a machine, with their origins.

    Near ``gpu``: cached experts in VRAM, all in RAM, where the CPU can compute them. Near ``ram``: cached
    experts in RAM, all in a file.

    Args:
        profile: The machine.
        shape: The model.
        times: Times measured on the model, replacing estimates from its bytes.
        near: Tier that computes the dense part and caches experts.
        context: Tokens that attention reads.
        in_ram: Share of the experts that RAM holds behind a GPU.
        ahead: On a GPU: no layer waits for the host (:func:`moechat.configurator.gpu_pattern.runs_ahead`).

    Raises:
        UsageError: The machine lacks that tier or the link to it.
    """
    link = _link(profile, near)
    computing = profile.with_grids(shape.grids)
    each = shape.expert_bytes
    held = round(in_ram * shape.all_expert_bytes) if near == "gpu" else 0
    figures = {"load": _over(each, link_rate(link, each, held)), "latency": _first_byte(link)}
    calls = gpu_calls(
        _copy_overhead(link),
        profile.gpu,
        ahead_layers=shape.layers if ahead else 0,
        dense_kernels=shape.kernels,
        graphs=shape.graphs,
    )
    together = link_rate_together(link, each, held)
    if together is not None:
        figures["load_together"] = _over(each, together)
    far = _over(each, expert_rate(computing, shape.bits))
    if near == "gpu":
        figures["compute_far"] = far
        beside = beside_link(computing, near)
        if beside:
            figures["compute_together"] = _over(each, beside[nearest_bits(shape.bits, beside)])
    if times is not None:
        figures.update(attention=times.attention, moe=times.moe, head=times.head)
    else:
        kv = shape.kv_bytes * context / shape.layers
        dense = shape.layer_dense_bytes + kv
        figures.update(
            _times_on_gpu(profile, shape, dense, calls)
            if near == "gpu"
            else _times_in_ram(profile, shape, dense, far)
        )
    values: dict[str, Any] = {name: figure.value for name, figure in figures.items()}
    costs = Costs(**values)
    if profile.gpu is not None and near == "gpu":
        reading = shape.top_k * each / gpu_rates.expert_rate(profile.gpu, shape.bits).value
        # A time that was measured on the model may be shorter than the estimate of reading it.
        costs = replace(costs, call=max(0.0, costs.moe - reading), calls=calls)
    else:
        slowdown = _near_slowdown(computing, shape.bits, link_rate(link, each).value)
        costs = replace(costs, near_slowdown=slowdown)
    return CostFigures(costs, figures)


def _near_slowdown(profile: HardwareProfile, bits: int, link_rate: float) -> float:
    """Factor of the CPU's times while the disk is read: measured, or what the disk takes of the memory."""
    alone = expert_rate(profile, bits).value
    together = beside_link(profile, "ram")
    if together:
        return max(1.0, alone / together[nearest_bits(bits, together)].value)
    ram = profile.ram_bandwidth.value
    return ram / max(ram - link_rate, ram / 2)


def _copy_overhead(link: LinkFigures) -> float:
    """Seconds that the smallest transfer takes beyond its bytes at the rate of the largest."""
    smallest, largest = min(link.bandwidth), max(link.bandwidth)
    return max(0.0, smallest / link.bandwidth[smallest].value - smallest / link.bandwidth[largest].value)


def beside_link(profile: HardwareProfile, near: Near) -> Mapping[int, Figure]:
    """By bits: bytes of blocks per second that the CPU computes while the link into that tier is busy; empty
    if unknown.
    """
    link = profile.links.get("gpu" if near == "gpu" else "file")
    if link is not None and link.experts:
        return link.experts
    # Profiles that do not name the link mean that into the tier that computes.
    return profile.expert_rate_together if near == "gpu" or profile.gpu is None else {}


def _times_on_gpu(
    profile: HardwareProfile, shape: ModelShape, dense: float, calls: GpuCalls
) -> dict[str, Figure]:
    gpu = profile.gpu
    assert gpu is not None  # _link() has looked

    def time(nbytes: float, rate: Figure, whole: Callable[[float], float]) -> Figure:
        reading = nbytes / rate.value
        seconds = whole(reading)
        rule = (
            f"{nbytes / 1e6:.4g} MB at {rate.value / 1e9:.4g} GB/s ({rate.source}), and "
            f"{(seconds - reading) * 1e6:.3g} us of calls and waits that they do not hide"
        )
        return Figure(seconds, "estimate", rule)

    weights = gpu_rates.dense_rate(gpu, shape.dense_itemsize)
    experts = gpu_rates.expert_rate(gpu, shape.bits)
    return {
        "attention": time(dense, weights, calls.layer),
        "moe": time(shape.top_k * shape.expert_bytes, experts, calls.experts),
        "head": time(shape.head_bytes, weights, calls.head),
    }


def _times_in_ram(
    profile: HardwareProfile, shape: ModelShape, dense: float, expert: Figure
) -> dict[str, Figure]:
    ram = profile.ram_bandwidth.value

    def time(nbytes: float, more: float) -> Figure:
        rule = (
            f"{nbytes / 1e6:.4g} MB at {_DENSE_SHARE:g} of {ram / 1e9:.4g} GB/s, {more * 1e6:.3g} us of "
            "the interpreter"
        )
        return Figure(nbytes / (_DENSE_SHARE * ram) + more, "estimate", rule)

    return {
        "attention": time(dense, _CPU_LAYER_SECONDS),
        "moe": replace(
            expert,
            value=shape.top_k * expert.value + _CPU_EXPERTS_SECONDS,
            source=f"{expert.source}; and {_CPU_EXPERTS_SECONDS * 1e6:.3g} us of the interpreter",
        ),
        "head": time(shape.head_bytes, _CPU_TOKEN_SECONDS),
    }


def _over(nbytes: int, rate: Figure) -> Figure:
    """Seconds for ``nbytes`` at a rate."""
    return Figure(nbytes / rate.value, rate.origin, rate.source)


def link_rate(link: LinkFigures, nbytes: int, held: int = 0) -> Figure:
    """The link's rate for transfers of ``nbytes``, with the origin of the less reliable neighbour.

    Args:
        link: The link.
        nbytes: Of one transfer.
        held: Bytes of host memory that are transferred from. What the system does not pin of them goes
            through the ring of pinned buffers.
    """
    sizes = sorted(link.bandwidth)
    below = max((size for size in sizes if size <= nbytes), default=sizes[0])
    above = min((size for size in sizes if size >= nbytes), default=sizes[-1])
    weaker = _weaker(link.bandwidth[below], link.bandwidth[above])
    pinned, staged = link.pinned_share(held), link.staged_rate(nbytes)
    if pinned == 1 or staged is None:
        return weaker.derived(link.rate(nbytes))
    rate = 1 / (pinned / link.rate(nbytes) + (1 - pinned) / staged)
    return replace(
        weaker.derived(rate),
        source=f"{weaker.source}; {100 * pinned:.0f} % of the experts in RAM can be pinned",
    )


def link_rate_together(link: LinkFigures, nbytes: int, held: int = 0) -> Figure | None:
    """The same while the CPU computes; ``None`` if unknown.

    It is known for the largest transfers from pinned memory; others are reduced by the same factor.
    """
    if link.together is None:
        return None
    alone, largest = link_rate(link, nbytes, held), link.bandwidth[max(link.bandwidth)]
    share = min(1.0, link.together.value / largest.value)
    return _weaker(link.together, alone).derived(share * alone.value)


def _weaker(first: Figure, second: Figure) -> Figure:
    """The less reliable of two figures."""
    return max(first, second, key=lambda figure: _RELIABILITY.index(figure.origin))


def _first_byte(link: LinkFigures) -> Figure:
    """Seconds from a request on the idle link to the first byte; the profile's latency is up to the last byte
    of its smallest transfer.
    """
    smallest = min(link.bandwidth)
    seconds = link.latency.value - smallest / link.bandwidth[smallest].value
    return link.latency.derived(max(0.0, seconds))


def expert_rate(profile: HardwareProfile, bits: int) -> Figure:
    """Bytes of blocks per second that all cores compute, for these bits or, as an estimate, for the nearest
    known ones.

    Raises:
        UsageError: The profile has no such rates.
    """
    known = nearest_bits(bits, profile.expert_rate)
    rates = profile.expert_rate.get(known, {})
    if not rates:
        raise UsageError(
            f"the profile {profile.name} says nothing about the CPU's expert kernels",
            hint="`moechat profile --refresh` measures this machine",
        )
    rate = rates[max(rates)]
    if known == bits:
        return rate
    return replace(rate, origin="estimate", source=f"as with {known} bits: {rate.source}")


def nearest_bits(bits: int, known: Mapping[int, object]) -> int:
    """The key nearest to ``bits`` on a logarithmic scale; ``bits`` itself if there is none."""
    return min(known, key=lambda key: abs(math.log2(key / bits)), default=bits)


def _link(profile: HardwareProfile, near: Near) -> LinkFigures:
    if near == "gpu" and profile.gpu is None:
        raise UsageError(
            f"{profile.title} has no GPU",
            hint="plan without --vram, or name another machine with --gpu",
        )
    link = profile.links.get("gpu" if near == "gpu" else "file")
    if link is None:
        between = "RAM and the GPU" if near == "gpu" else "the disk and RAM"
        raise UsageError(
            f"the profile {profile.name} has no figures of the link between {between}",
            hint="`moechat profile --refresh` measures this machine",
        )
    return link
