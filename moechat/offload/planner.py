"""Computes the targets of a near tier from routing statistics and costs; always returns a plan.

Statistics and costs are read from the user's files and from the package. Missing, unreadable or damaged ones
are replaced: recorded statistics by the package's defaults for the family, measured costs by assumed ones.
If no plan can be made from them, every layer gets the same share. :attr:`Knowledge.notes` lists the reasons.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from moechat.configurator.allocate import allocate
from moechat.configurator.allocation import Allocation
from moechat.configurator.costs import Costs
from moechat.configurator.curves import RoutingCurves
from moechat.configurator.estimate import ModelShape, Near, costs_of
from moechat.configurator.exposure import EngineModel
from moechat.configurator.systems import CacheSettings, Policy
from moechat.configurator.targets import BLOCKS, EXPERTS, evaluate, pages_of
from moechat.configurator.transit_reserve import uniform_targets
from moechat.configurator.warm_start import blended_statistics, default_statistics
from moechat.geometry import ExpertGeometry
from moechat.hardware.measured_file import load_measured
from moechat.hardware.times_file import TimesKey, load_times
from moechat.routing.statistics import RoutingStatistics
from moechat.routing.statistics_file import load_statistics, model_key
from moechat.simulate.run import Tier
from moechat.simulate.strategy import Chosen, Strategy, choose_by_statistics
from moechat.simulate.timing import Launch

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
_GPU_LAYER_SECONDS = 150e-6
# Three kernels for any number of experts; two copies and a kernel where the CPU computes a part.
_GPU_CALL_SECONDS, _GPU_FAR_CALL_SECONDS = 15e-6, 35e-6

# How each tier computes.
_LAUNCHES: Mapping[Near, Launch] = {"ram": "host", "gpu": "card"}

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


@dataclass(frozen=True)
class TierTargets:
    """Targets of a near tier.

    Attributes:
        targets: int32 ``[layers, 2]``: experts kept, and blocks of each.
        reserve: Pages left for blocks in transit.
        method: Method of the allocation.
        allocation: The configurator's allocation with its expected times; ``None`` if the pages are divided
            evenly without it.
        notes: Reasons why another method than that of the settings was used.
        strategy: The strategy that was chosen for the settings; ``None``: they are as given.
    """

    targets: npt.NDArray[np.int32]
    reserve: int
    method: str
    allocation: Allocation | None = None
    notes: tuple[str, ...] = ()
    strategy: Chosen | None = None

    def settings_for(self, wanted: CacheSettings) -> CacheSettings:
        """The settings to run by, where ``wanted`` may leave a choice."""
        return replace(wanted, choose=False) if self.strategy is None else self.strategy.strategy.settings


def plan_tier(
    geometry: ExpertGeometry,
    layers: int,
    pages: int,
    top_k: int,
    settings: CacheSettings,
    knowledge: Knowledge | None,
    *,
    reserve: int | None = None,
    strategy: Strategy | None = None,
) -> TierTargets:
    """Divide the pages among the layers, and choose the strategy where the settings leave a choice.

    Args:
        geometry: Geometry of the experts.
        layers: Number of expert layers.
        pages: Pages of the slab.
        top_k: Experts per token.
        settings: Settings of the cache; they name the method.
        knowledge: Statistics and costs; ``None`` gives every layer the same.
        reserve: Pages left for blocks in transit; ``None`` takes the usual number.
        strategy: The strategy, where the settings leave a choice; ``None``: the fastest in a simulation.
    """
    if settings.choose:
        return _chosen(geometry, layers, pages, top_k, settings, knowledge, reserve, strategy)
    targets, usual = uniform_targets(geometry, layers, pages, top_k, settings)
    reserve = usual if reserve is None else reserve
    kept = int((pages - reserve) * settings.keep)
    evenly = TierTargets(targets, reserve, "uniform")
    if pages_of(targets) > kept:  # the given reserve is larger than the usual one
        evenly = replace(evenly, targets=_shrunk(targets, kept))
    if settings.allocation == "uniform" or knowledge is None or knowledge.statistics is None or kept < layers:
        return evenly
    try:
        found = allocate(
            settings,
            knowledge.statistics,
            knowledge.costs,
            blocks=geometry.blocks_per_expert,
            pages=kept,
            top_k=top_k,
        )
        _check(found.targets, geometry, layers, kept)
    except Exception as error:  # damaged files must not prevent a chat
        return replace(evenly, notes=(f"no {settings.allocation} plan could be made: {error!r}",))
    return TierTargets(np.ascontiguousarray(found.targets, dtype=np.int32), reserve, found.method, found)


def _chosen(
    geometry: ExpertGeometry,
    layers: int,
    pages: int,
    top_k: int,
    settings: CacheSettings,
    knowledge: Knowledge | None,
    reserve: int | None,
    strategy: Strategy | None,
) -> TierTargets:
    """The targets of the strategy that is fastest in a simulation over drawn routing."""

    def planned(candidate: CacheSettings) -> TierTargets:
        return plan_tier(geometry, layers, pages, top_k, candidate, knowledge, reserve=reserve)

    as_given = replace(settings, choose=False)
    usual = planned(as_given)
    everything = layers * geometry.num_experts * geometry.blocks_per_expert
    if knowledge is None or knowledge.statistics is None or pages >= everything or usual.notes:
        return usual
    plans = {as_given: usual}

    def tier_for(candidate: CacheSettings) -> Tier:
        if candidate not in plans:
            plans[candidate] = planned(candidate)
        return _tier(geometry, pages, top_k, plans[candidate])

    try:
        chosen = choose_by_statistics(
            settings,
            tier_for,
            knowledge.costs,
            knowledge.statistics,
            threads=knowledge.threads,
            launch=_LAUNCHES[knowledge.near],
            only=strategy,
        )
    except Exception as error:  # damaged files must not prevent a chat
        return replace(usual, notes=(f"no strategy could be chosen: {error!r}",))
    return replace(plans[chosen.strategy.settings], strategy=chosen)


def simulated_seconds(
    geometry: ExpertGeometry, pages: int, top_k: int, plan: TierTargets, knowledge: Knowledge
) -> float:
    """Seconds of a token with the targets and the strategy of a plan, simulated with other knowledge.

    Args:
        geometry: Geometry of the experts.
        pages: Pages of the slab.
        top_k: Experts per token.
        plan: A plan with a strategy.
        knowledge: Costs and statistics.
    """
    assert plan.strategy is not None
    assert knowledge.statistics is not None
    strategy = plan.strategy.strategy
    return choose_by_statistics(
        strategy.settings,
        lambda _: _tier(geometry, pages, top_k, plan),
        knowledge.costs,
        knowledge.statistics,
        threads=knowledge.threads,
        launch=_LAUNCHES[knowledge.near],
        only=strategy,
    ).seconds_of_choice


def _tier(geometry: ExpertGeometry, pages: int, top_k: int, plan: TierTargets) -> Tier:
    return Tier(
        experts=geometry.num_experts,
        top_k=top_k,
        blocks=geometry.blocks_per_expert,
        block_bytes=geometry.record_bytes,
        pages=pages,
        targets=plan.targets,
        reserve=plan.reserve,
    )


def _shrunk(targets: npt.NDArray[np.int32], pages: int) -> npt.NDArray[np.int32]:
    smaller = targets.copy()
    while pages_of(smaller) > pages:
        most = int(smaller[:, EXPERTS].argmax())
        smaller[most, 0] -= 1
    return smaller


def _check(targets: npt.NDArray[np.int32], geometry: ExpertGeometry, layers: int, pages: int) -> None:
    experts, blocks = targets[:, EXPERTS], targets[:, BLOCKS]
    if targets.shape != (layers, 2) or experts.min() < 0 or experts.max() > geometry.num_experts:
        raise ValueError(f"targets of shape {targets.shape} are not for this model")
    if (blocks[experts > 0] < 1).any() or blocks.max() > geometry.blocks_per_expert:
        raise ValueError(f"blocks are not between 1 and {geometry.blocks_per_expert}")
    if pages_of(targets) > pages:
        raise ValueError(f"{pages_of(targets)} pages are planned, {pages} are there")


def gather(
    shape: ModelShape,
    model_type: str,
    fingerprint: str,
    policy: Policy,
    *,
    dtype: str,
    threads: int,
    dense_bits: int = 16,
    activation_bits: int = 16,
    near: Near = "ram",
    far_computes: bool = False,
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
        activation_bits: Bits of the inputs of quantised weights.
        near: Tier that keeps the experts: ``ram``, or ``gpu``, for which no layer times are measured.
        far_computes: With ``gpu``: missing experts are in RAM, where the CPU can compute them.
    """
    notes: list[str] = []
    statistics, statistics_from = _statistics(shape, model_type, fingerprint, policy, notes)
    if near == "gpu":
        costs, costs_from = _costs_on_gpu(shape, notes)
        if not far_computes:
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
            activation_bits=activation_bits,
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

    seen = _tried("saved routing statistics", saved, notes)
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

    return _tried("the family's routing statistics", usual, notes)


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
    return _tried("routing statistics", both, notes) or seen or default, origin


def _costs(shape: ModelShape, key_for: Callable[[str], TimesKey], notes: list[str]) -> tuple[Costs, str]:
    def measured() -> tuple[Costs, str] | None:
        profile = load_measured(notes.append)
        if profile is None:
            return None
        times = load_times(key_for(profile.key), notes.append)
        origin = "the machine's profile" if times is None else "the machine's profile and the model's times"
        return costs_of(profile, shape, times=times, near="ram"), origin

    return _tried("the machine's profile", measured, notes) or (assumed_costs(shape), "assumed")


def _costs_on_gpu(shape: ModelShape, notes: list[str]) -> tuple[Costs, str]:
    def measured() -> tuple[Costs, str] | None:
        profile = load_measured(notes.append)
        if profile is None or profile.gpu is None or "gpu" not in profile.links:
            return None
        return costs_of(profile, shape, times=None, near="gpu"), "the machine's profile"

    return _tried("the machine's profile", measured, notes) or (assumed_on_gpu(shape), "assumed")


def assumed_on_gpu(shape: ModelShape) -> Costs:
    """Costs on a GPU that was not measured: a mid-range one on PCIe 4.0 x16."""
    return Costs(
        attention=shape.layer_dense_bytes / _ASSUMED_GPU + _GPU_LAYER_SECONDS,
        moe=shape.top_k * shape.expert_bytes / _ASSUMED_GPU,
        head=shape.head_bytes / _ASSUMED_GPU + _GPU_LAYER_SECONDS,
        load=shape.expert_bytes / _ASSUMED_PCIE,
        latency=15e-6,
        compute_far=shape.expert_bytes / _ASSUMED_EXPERTS,
        call=_GPU_CALL_SECONDS,
        far_call=_GPU_FAR_CALL_SECONDS,
    )


def observed_costs(
    shape: ModelShape, before: Costs, counted: Mapping[str, float], tokens: int, seconds: float
) -> Costs | None:
    """Costs observed while decoding; ``None`` if no expert was computed or no block was moved.

    The time outside the experts is divided between layers and head in the ratio of ``before``. The link's
    rate is that of all its transfers over the time that it was busy.

    Args:
        shape: Shape of the model.
        before: Costs that these replace.
        counted: Differences of the native runner's counters over these tokens.
        tokens: Tokens decoded.
        seconds: Seconds that they took.
    """
    computed, computing = counted["bytes_computed"], counted["compute_seconds"]
    moved, busy = counted["link_bytes"], counted["link_busy_seconds"]
    if min(computed, computing, moved, busy, tokens) <= 0:
        return None
    rest = max(0.0, seconds - computing - counted["stall_seconds"] - counted["begin_seconds"]) / tokens
    layers = before.attention * shape.layers
    share = layers / (layers + before.head) if layers + before.head > 0 else 1.0
    return replace(
        before,
        attention=rest * share / shape.layers,
        head=rest * (1 - share),
        moe=shape.top_k * shape.expert_bytes * computing / computed,
        load=shape.expert_bytes * busy / moved,
        load_together=None,
    )


def expected_seconds(
    plan: TierTargets, settings: CacheSettings, knowledge: Knowledge, top_k: int, blocks: int
) -> float | None:
    """Expected exposed load time of a token in seconds; ``None`` if it cannot be computed.

    Args:
        plan: The targets.
        settings: Settings of the near tier.
        knowledge: Statistics and costs.
        top_k: Experts per token.
        blocks: Blocks per expert.
    """
    statistics, costs = knowledge.statistics, knowledge.costs
    if statistics is None:
        return None

    def seconds() -> float:
        curves = RoutingCurves.of(statistics, settings, top_k)
        return evaluate(plan.targets, curves, EngineModel.of(settings, costs, top_k, blocks), blocks).total

    return _tried("the expectation", seconds, [])


def _tried(name: str, source: Callable[[], _T], notes: list[str]) -> _T | None:
    try:
        return source()
    except Exception as error:  # damaged files must not prevent a chat
        notes.append(f"{name} cannot be used: {error!r}")
        return None
