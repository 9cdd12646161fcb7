"""Computes the targets of a near tier and the strategy from what is known; always returns a plan.

If no plan can be made, every layer gets the same share, and :attr:`TierTargets.notes` has the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from moechat.budget.knowledge import Knowledge, tried
from moechat.configurator.allocate import allocate
from moechat.configurator.allocation import Allocation
from moechat.configurator.curves import RoutingCurves
from moechat.configurator.estimate import Near
from moechat.configurator.exposure import EngineModel
from moechat.configurator.systems import CacheSettings
from moechat.configurator.targets import BLOCKS, EXPERTS, evaluate, pages_of
from moechat.configurator.transit_reserve import uniform_targets
from moechat.geometry import ExpertGeometry
from moechat.routing.statistics import RoutingStatistics
from moechat.simulate.choice import choose_by_statistics
from moechat.simulate.kept_choices import kept_choice
from moechat.simulate.run import Tier
from moechat.simulate.strategy import Chosen, Strategy, strategies, too_small_for_a_cache
from moechat.simulate.systems import warm_shares
from moechat.simulate.timing import Launch

# How each tier computes.
_LAUNCHES: Mapping[Near, Launch] = {"ram": "host", "gpu": "card"}


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
    always: int | None = None,
    reserve: int | None = None,
    strategy: Strategy | None = None,
) -> TierTargets:
    """Divide the pages among the layers, and choose the strategy where the settings leave a choice.

    Args:
        geometry: Geometry of the experts.
        layers: Number of expert layers.
        pages: Pages of the slab, those that are lent included, and those that the experts in the page cache
            would take.
        top_k: Experts per token.
        settings: Settings of the cache; they name the method.
        knowledge: Statistics and costs; ``None`` gives every layer the same.
        always: Those of the slab that are not lent; ``None``: all are.
        reserve: Pages left for blocks in transit; ``None`` takes the usual number.
        strategy: The strategy, where the settings leave a choice; ``None``: the fastest in a simulation.
    """
    far_computes = knowledge is not None and knowledge.costs.far_computes
    if settings.choose:
        return _chosen(geometry, layers, pages, top_k, settings, knowledge, always, reserve, strategy)
    targets, usual = uniform_targets(geometry, layers, pages, top_k, settings, far_computes=far_computes)
    if always is not None and always < pages:
        usual = uniform_targets(geometry, layers, always, top_k, settings, far_computes=far_computes)[1]
    reserve = usual if reserve is None else reserve
    kept = 0 if settings.allocation == "shared" else int((pages - reserve) * settings.keep)
    evenly = TierTargets(targets, reserve, "shared" if settings.allocation == "shared" else "uniform")
    if pages_of(targets) > kept:  # the given reserve is larger than the usual one
        evenly = replace(evenly, targets=shrunk(targets, kept))
    if not settings.allocates or knowledge is None or knowledge.statistics is None or kept < layers:
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
    always: int | None,
    reserve: int | None,
    strategy: Strategy | None,
) -> TierTargets:
    """The targets of the strategy that is fastest in a simulation over drawn routing."""

    def planned(candidate: CacheSettings) -> TierTargets:
        return plan_tier(geometry, layers, pages, top_k, candidate, knowledge, always=always, reserve=reserve)

    as_given = replace(settings, choose=False)
    usual = planned(as_given)
    everything = layers * geometry.num_experts * geometry.blocks_per_expert
    if knowledge is None or knowledge.statistics is None or pages >= everything or usual.notes:
        return usual
    plans = {as_given: usual}

    def tier_for(candidate: CacheSettings) -> Tier:
        if candidate not in plans:
            plans[candidate] = planned(candidate)
        return _tier(geometry, pages, top_k, plans[candidate], candidate, knowledge.statistics)

    try:
        inputs = ("choice", geometry, layers, pages, top_k, settings, always, reserve, strategy)
        chosen = _simulated(inputs, settings, tier_for, knowledge, strategy)
    except Exception as error:  # damaged files must not prevent a chat
        return replace(usual, notes=(f"no strategy could be chosen: {error!r}",))
    best = chosen.strategy.settings
    plan = replace(plans.get(best) or planned(best), strategy=chosen)
    reason = None if strategy is not None else too_small_for_a_cache(chosen, pages, geometry.record_bytes)
    return plan if reason is None else replace(plan, notes=(*plan.notes, reason))


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
    inputs = ("seconds", geometry, pages, top_k, plan.targets.tolist(), plan.reserve, strategy)
    return _simulated(
        inputs,
        strategy.settings,
        lambda own: _tier(geometry, pages, top_k, plan, own, knowledge.statistics),
        knowledge,
        strategy,
    ).seconds_of_choice


def _simulated(
    inputs: tuple[object, ...],
    settings: CacheSettings,
    tier_for: Callable[[CacheSettings], Tier],
    knowledge: Knowledge,
    only: Strategy | None,
) -> Chosen:
    """A kept choice, or the fastest of the candidates over routing that is drawn from the statistics.

    Args:
        inputs: All that it depends on, besides the knowledge.
        settings: See :func:`moechat.simulate.choice.choose_by_statistics`, and for ``tier_for`` and ``only``.
        tier_for: The near tier of a candidate.
        knowledge: Costs and statistics.
        only: The one candidate.
    """
    statistics, costs = knowledge.statistics, knowledge.costs
    assert statistics is not None
    launch = _LAUNCHES[knowledge.near]
    candidates = [only] if only else strategies(settings, far_computes=costs.far_computes)
    known = (costs, statistics.digest(), knowledge.threads, launch)
    return kept_choice(
        (*inputs, *known),
        candidates,
        lambda: choose_by_statistics(
            settings,
            tier_for,
            costs,
            statistics,
            threads=knowledge.threads,
            launch=launch,
            only=only,
        ),
    )


def _tier(
    geometry: ExpertGeometry,
    pages: int,
    top_k: int,
    plan: TierTargets,
    settings: CacheSettings,
    statistics: RoutingStatistics | None,
) -> Tier:
    return Tier(
        experts=geometry.num_experts,
        top_k=top_k,
        blocks=geometry.blocks_per_expert,
        block_bytes=geometry.record_bytes,
        pages=pages,
        targets=plan.targets,
        reserve=plan.reserve,
        warm=warm_shares(settings, statistics),
    )


def shrunk(targets: npt.NDArray[np.int32], pages: int) -> npt.NDArray[np.int32]:
    """The targets with fewer experts, where there are most, so that they take at most so many pages."""
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

    return tried("the expectation", seconds, [])
