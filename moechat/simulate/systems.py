"""Near tiers of simulated systems, planned from the part of the trace before timing."""

from __future__ import annotations

import numpy as np

from moechat.configurator.allocate import allocate
from moechat.configurator.costs import Costs
from moechat.configurator.systems import CacheSettings, parse_settings
from moechat.configurator.targets import BLOCKS, EXPERTS
from moechat.configurator.transit_reserve import in_transit, uniform_targets
from moechat.geometry import ExpertGeometry
from moechat.routing.hot_experts import LEAST_TOKENS, expert_shares
from moechat.routing.statistics import RoutingStatistics
from moechat.simulate.run import Floats, Ints, Tier

MIN_PAGES = 2


def settings_for(name: str) -> CacheSettings:
    """Parse ``NAME`` or ``NAME:key=value,key=value``.

    Raises:
        UsageError: The system or setting is unknown.
    """
    return parse_settings(name)


def pages_for(
    geometry: ExpertGeometry, layers: int, top_k: int, settings: CacheSettings, share: float
) -> int:
    """Pages of a near tier for a share of all experts.

    A system that keeps nothing between tokens gets only the pages for blocks in transit. With more, leftover
    blocks would act as a cache, which it does not have.
    """
    pages = max(MIN_PAGES, round(share * layers * geometry.num_experts * geometry.blocks_per_expert))
    if settings.keep == 0.0:
        pages = min(pages, in_transit(geometry, top_k, settings))
    return pages


def tier_for(
    settings: CacheSettings,
    statistics: RoutingStatistics,
    costs: Costs,
    geometry: ExpertGeometry,
    *,
    pages: int,
    top_k: int,
) -> Tier:
    """Plan the near tier of a system.

    Args:
        settings: The system.
        statistics: Statistics of the known part of the trace, ranked by its policy.
        costs: Costs of the machine.
        geometry: Geometry of the experts.
        pages: Pages of the slab.
        top_k: Experts per token.
    """
    layers = statistics.layers
    targets, reserve = uniform_targets(
        geometry, layers, pages, top_k, settings, far_computes=costs.far_computes
    )
    kept = int((pages - reserve) * settings.keep)
    if settings.allocates and kept >= layers:
        found = allocate(
            settings,
            statistics,
            costs,
            blocks=geometry.blocks_per_expert,
            pages=kept,
            top_k=top_k,
        )
        targets = np.ascontiguousarray(found.targets, dtype=np.int32)
    ranks = statistics.activations.astype(np.float64) if settings.policy == "static" else None
    return Tier(
        experts=geometry.num_experts,
        top_k=top_k,
        blocks=geometry.blocks_per_expert,
        block_bytes=geometry.record_bytes,
        pages=pages,
        targets=targets,
        reserve=reserve,
        ranks=ranks,
        warm=warm_shares(settings, statistics),
    )


def warm_shares(settings: CacheSettings, statistics: RoutingStatistics | None) -> Floats | None:
    """What :class:`Tier` takes as ``warm``: of settings that load the most used experts between answers.

    ``None``: other settings, or too few tokens are known.
    """
    if not settings.loads_most_used or statistics is None or statistics.tokens < LEAST_TOKENS:
        return None
    return expert_shares(statistics)


def kept_share(tier: Tier) -> tuple[float, float]:
    """Mean number of cached experts per layer, and mean cached share of each."""
    targets: Ints = tier.targets
    experts, blocks = targets[:, EXPERTS].astype(np.int64), targets[:, BLOCKS]
    total = int(experts.sum())
    theta = float((experts * blocks).sum() / (total * tier.blocks)) if total else 0.0
    return total / tier.layers, theta
