"""Systems over a trace: what each one keeps, made from the part of the trace that comes before timing."""

from __future__ import annotations

import numpy as np

from moechat.configurator.allocate import allocate
from moechat.configurator.costs import Costs
from moechat.configurator.pages import in_transit, uniform_targets
from moechat.configurator.systems import SYSTEMS, CacheSettings, parse_settings
from moechat.errors import UsageError
from moechat.geometry import ExpertGeometry
from moechat.routing.statistics import RoutingStatistics
from moechat.simulate.run import Ints, Tier

# Published systems that cannot be simulated yet.
LATER = ("moe-infinity", "finemoe", "expertflow", "melinoe")
MIN_PAGES = 2


def settings_for(name: str) -> CacheSettings:
    """Settings of ``NAME`` or ``NAME:key=value,key=value``.

    Raises:
        UsageError: There is no such system or setting, or it cannot be simulated yet.
    """
    refuse_later(name)
    return parse_settings(name)


def refuse_later(names: str) -> None:
    """Refuse published systems that cannot be simulated yet.

    Args:
        names: Systems with or without settings, and commas between them.

    Raises:
        UsageError: One of them cannot.
    """
    for piece in names.split(","):
        system = piece.partition(":")[0].strip()
        if system in LATER and system not in SYSTEMS:
            raise UsageError(
                f"the system {system} cannot be simulated yet", hint=f"choose from: {', '.join(SYSTEMS)}"
            )


def pages_for(
    geometry: ExpertGeometry, layers: int, top_k: int, settings: CacheSettings, share: float
) -> int:
    """Pages of a near tier that holds a share of all experts.

    A system that keeps nothing between tokens has no use for more than blocks on their way need: it gets no
    more, or what happens to be left in the other pages would be a cache that it does not have.
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
    """A near tier as a system would lay it out.

    Args:
        settings: The system.
        statistics: Of the part of the trace that it may have seen, ranked by its policy.
        costs: Of the machine.
        geometry: Of the experts.
        pages: Of the slab.
        top_k: Experts a token.
    """
    layers = statistics.layers
    targets, reserve = uniform_targets(geometry, layers, pages, top_k, settings)
    still = settings.miss == "compute" and settings.prefetch == "none"
    if still:  # nothing is ever on its way
        reserve = 1
    kept = int((pages - reserve) * settings.keep)
    if still or (settings.allocation != "uniform" and kept >= layers):
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
    )


def kept_share(tier: Tier) -> tuple[float, float]:
    """Experts kept of a layer, and the share of each, in the mean."""
    targets: Ints = tier.targets
    experts, blocks = targets[:, 0].astype(np.int64), targets[:, 1]
    total = int(experts.sum())
    theta = float((experts * blocks).sum() / (total * tier.blocks)) if total else 0.0
    return total / tier.layers, theta
