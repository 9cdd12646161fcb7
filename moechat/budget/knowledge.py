"""What is known of a model's routing and of the machine's times, before and while a model runs.

Statistics and costs are read from the user's files and from the package. Missing, unreadable or damaged ones
are replaced: recorded statistics by the package's defaults for the family, measured costs by assumed ones.
:attr:`Knowledge.notes` lists the reasons.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from moechat.configurator.costs import Costs
from moechat.configurator.estimate import ModelShape, Near, cost_figures, costs_of
from moechat.configurator.gpu_pattern import gpu_calls
from moechat.configurator.systems import Policy
from moechat.configurator.warm_start import blended_statistics, default_statistics
from moechat.errors import MoechatWarning
from moechat.geometry import DenseBits
from moechat.hardware.known_gpus import gpu_machine
from moechat.hardware.measured_file import load_measured
from moechat.hardware.times_file import TimesKey, load_times
from moechat.routing.statistics import RoutingStatistics
from moechat.routing.statistics_file import load_statistics, model_key

# Assumed for a machine that was not measured: experts read from an NVMe disk on PCIe 3.0, two channels of
# DDR4 memory, fixed time in Python and torch. Rates are bytes a second. The plan depends only on their
# ratios, and the first replan replaces them with costs observed while decoding.
_ASSUMED_LINK = 2.0e9
_ASSUMED_EXPERTS = 12.0e9
_ASSUMED_DENSE = 10.0e9
_LAYER_SECONDS = 100e-6
# The same for a mid-range GPU on PCIe 4.0 x16.
_ASSUMED_GPU = 250e9
_ASSUMED_PCIE = 20e9
# Seconds of a copy besides its bytes.
_ASSUMED_COPY = 2e-6

_NOT_MEASURED = (
    "{} has not been measured, so the plan of its memory rests on assumed figures: "
    "`moechat profile --refresh` measures it"
)

_T = TypeVar("_T")


@dataclass(frozen=True)
class Knowledge:
    """The statistics and costs that a plan is made from.

    Attributes:
        statistics: Routing statistics, or ``None`` if there are none.
        costs: Costs of a token.
        statistics_from: Origin of the statistics, for people.
        costs_from: Origin of the costs, for people.
        notes: Reasons why statistics or costs could not be used.
        near: Tier that keeps the experts.
        threads: Threads of the CPU.
    """

    statistics: RoutingStatistics | None
    costs: Costs
    statistics_from: str
    costs_from: str
    notes: tuple[str, ...] = ()
    near: Near = "ram"
    threads: int = 1


def gather(
    shape: ModelShape,
    model_type: str,
    fingerprint: str,
    policy: Policy,
    *,
    dtype: str,
    threads: int,
    dense_bits: DenseBits,
    dense_bytes: int,
    activation_bits: int,
    kv_bits: int,
    near: Near = "ram",
    in_ram: float = 0.0,
) -> Knowledge:
    """Read the statistics and costs of a model that has not run yet; fast, raises nothing.

    Args:
        shape: Shape of the model.
        model_type: Its family, as named in transformers.
        fingerprint: Fingerprint of its weights, the key of saved statistics and measured times.
        policy: Eviction policy whose priorities rank the experts in the statistics.
        dtype: Type of the dense weights, part of the key of measured times.
        threads: Threads that compute, part of that key as well.
        dense_bits: Bits of a dense weight.
        dense_bytes: Bytes of all dense weights.
        activation_bits: Bits of the inputs of quantised weights.
        kv_bits: Bits of a key or value in the attention cache.
        near: Tier that keeps the experts: ``ram``, or ``gpu``, for which no layer times are measured.
        in_ram: With ``gpu``: share of the experts that RAM holds, where the CPU can compute them.
    """
    notes: list[str] = []
    statistics, statistics_from = _statistics(shape, model_type, fingerprint, policy, notes)
    if near == "gpu":
        costs, costs_from = _costs_on_gpu(shape, in_ram, notes)
        if in_ram == 0:
            costs = replace(costs, compute_far=math.inf, compute_together=None)
        return Knowledge(statistics, costs, statistics_from, costs_from, tuple(notes), near, threads)
    costs, costs_from = _costs(
        shape,
        lambda profile: TimesKey(
            profile=profile,
            model=fingerprint,
            dtype=dtype,
            threads=threads,
            bits=shape.bits,
            dense_bits=dense_bits,
            dense_bytes=dense_bytes,
            activation_bits=activation_bits,
            kv_bits=kv_bits,
        ),
        notes,
    )
    return Knowledge(statistics, costs, statistics_from, costs_from, tuple(notes), near, threads)


def defaults(shape: ModelShape, model_type: str, policy: Policy) -> Knowledge:
    """The defaults of the package; reads none of the user's files."""
    notes: list[str] = []
    statistics, origin = _statistics(shape, model_type, None, policy, notes)
    return Knowledge(statistics, assumed_costs(shape), origin, "assumed", tuple(notes))


def assumed_costs(shape: ModelShape) -> Costs:
    """Costs on a machine that was not measured."""
    far = shape.expert_bytes / _ASSUMED_EXPERTS
    return Costs(
        attention=shape.layer_dense_bytes / _ASSUMED_DENSE + _LAYER_SECONDS,
        moe=shape.top_k * far,
        head=shape.head_bytes / _ASSUMED_DENSE + _LAYER_SECONDS,
        load=shape.expert_bytes / _ASSUMED_LINK,
        latency=100e-6,
    )


def _statistics(
    shape: ModelShape, model_type: str, fingerprint: str | None, policy: Policy, notes: list[str]
) -> tuple[RoutingStatistics | None, str]:
    default = family_statistics(shape, model_type, policy, notes)
    seen = None if fingerprint is None else saved_statistics(shape, fingerprint, policy, notes)
    return blend(default, seen, notes)


def saved_statistics(
    shape: ModelShape, fingerprint: str, policy: str, notes: list[str]
) -> RoutingStatistics | None:
    """Statistics of earlier runs; ``None`` if there are none, or, with a note, if they cannot be used."""

    def saved() -> RoutingStatistics | None:
        return load_statistics(key_of(shape, fingerprint), policy, warn=notes.append)

    seen = tried("saved routing statistics", saved, notes)
    if seen is not None and (seen.layers, seen.experts) != (shape.layers, shape.experts):
        notes.append(f"saved routing statistics are not used: they are for {seen.describe()}")
        return None
    return seen


def key_of(shape: ModelShape, fingerprint: str) -> str:
    """Name of a model's saved statistics."""
    return model_key(fingerprint, layers=shape.layers, experts=shape.experts, top_k=shape.top_k)


def family_statistics(
    shape: ModelShape, model_type: str, policy: Policy, notes: list[str]
) -> RoutingStatistics | None:
    """The package's defaults for a family; ``None``, with a note, if they cannot be computed."""

    def usual() -> RoutingStatistics:
        return default_statistics(model_type, shape.layers, shape.experts, shape.top_k, policy=policy)

    return tried("the family's routing statistics", usual, notes)


def blend(
    default: RoutingStatistics | None, seen: RoutingStatistics | None, notes: list[str]
) -> tuple[RoutingStatistics | None, str]:
    """Blend defaults with recorded statistics.

    Returns:
        The statistics, and their origin for people.
    """
    if default is None:
        return seen, "none" if seen is None else f"{seen.tokens:,} tokens of this model"

    def both() -> RoutingStatistics:
        return blended_statistics(default, seen)

    origin = "defaults" if seen is None else f"defaults and {seen.tokens:,} tokens of this model"
    return tried("routing statistics", both, notes) or seen or default, origin


def _costs(shape: ModelShape, key_for: Callable[[str], TimesKey], notes: list[str]) -> tuple[Costs, str]:
    def measured() -> tuple[Costs, str] | None:
        profile = load_measured(notes.append)
        if profile is None:
            return None
        times = load_times(key_for(profile.key), notes.append)
        origin = "the machine's profile" if times is None else "the machine's profile and the model's times"
        return costs_of(profile, shape, times=times, near="ram"), origin

    return tried("the machine's profile", measured, notes) or (assumed_costs(shape), "assumed")


def _costs_on_gpu(shape: ModelShape, in_ram: float, notes: list[str]) -> tuple[Costs, str]:
    def known() -> tuple[Costs, str] | None:
        profile = gpu_machine(notes.append)
        if profile is None or profile.gpu is None:
            return None
        origin = "the machine's profile"
        if not profile.links["gpu"].measured:
            # Measuring here would take memory beside the budget, and a minute where no kernel is built yet.
            origin = "assumed"
            warnings.warn(_NOT_MEASURED.format(profile.gpu.name), MoechatWarning, stacklevel=2)
        return cost_figures(profile, shape, near="gpu", in_ram=in_ram).costs, origin

    return tried("the machine's profile", known, notes) or (assumed_on_gpu(shape), "assumed")


def assumed_on_gpu(shape: ModelShape) -> Costs:
    """Costs on a GPU that was not measured: a mid-range one on PCIe 4.0 x16."""
    calls = gpu_calls(_ASSUMED_COPY, dense_kernels=shape.kernels, graphs=shape.graphs)
    reading = shape.top_k * shape.expert_bytes / _ASSUMED_GPU
    return Costs(
        attention=calls.layer(shape.layer_dense_bytes / _ASSUMED_GPU),
        moe=calls.experts(reading),
        head=calls.head(shape.head_bytes / _ASSUMED_GPU),
        load=shape.expert_bytes / _ASSUMED_PCIE,
        latency=15e-6,
        compute_far=shape.expert_bytes / _ASSUMED_EXPERTS,
        call=calls.experts(reading) - reading,
        calls=calls,
    )


def tried(name: str, source: Callable[[], _T], notes: list[str]) -> _T | None:
    """The result of ``source``; ``None``, with a note, if it raises."""
    try:
        return source()
    except Exception as error:  # damaged files must not prevent a chat
        notes.append(f"{name} cannot be used: {error!r}")
        return None
