"""What a loaded model does with its memory: for a page or a terminal that shows it at work."""

from __future__ import annotations

from dataclasses import dataclass

from moechat.budget.tier_targets import TierTargets, expected_seconds
from moechat.engine.api import Engine
from moechat.offload.expert_map import ExpertMap, RecentUse, read_map
from moechat.offload.tier import ExpertTier


@dataclass(frozen=True)
class LinkTotals:
    """Counters of the link since they were last set to 0.

    Attributes:
        busy_s: Seconds with at least one transfer under way.
        demand_bytes: Moved after a router had chosen the expert.
        ahead_bytes: Moved before that.
    """

    busy_s: float
    demand_bytes: int
    ahead_bytes: int


@dataclass(frozen=True)
class AtWork:
    """A model at work, at one moment.

    Attributes:
        map: Where every expert is.
        used_bytes: Bytes of experts in memory, at most those of the budget that are for experts alone.
        link: Counters of the link; ``None`` where experts are mapped.
        exposed_ms: Load time of a token that nothing hides, in milliseconds, as the plan in effect expects
            it; ``None`` where there is no such plan.
    """

    map: ExpertMap
    used_bytes: int
    link: LinkTotals | None
    exposed_ms: float | None


class Watcher:
    """Looks at one engine now and then; REQUIRES: in the thread that uses the engine, between tokens.

    Args:
        engine: The engine.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._exposed: tuple[TierTargets, float | None] | None = None  # of the last plan
        manifest = engine.loaded.store.manifest
        self._layers = tuple(record.layer for record in manifest.layers)
        self._experts = engine.loaded.store.geometry.num_experts
        self._recent = RecentUse()

    def look(self) -> AtWork:
        """The state now; takes well under a millisecond.

        Raises:
            RuntimeError: The engine is closed.
        """
        loaded = self._engine.loaded
        near = loaded.near
        found = read_map(near, self._layers, self._experts, self._recent)
        if near is None:
            return AtWork(found, loaded.plan.expert_bytes, None, None)
        stats = near.stats()
        demand = int(stats["link_bytes_demand"])
        if self._exposed is None or self._exposed[0] is not near.plan:
            self._exposed = near.plan, _exposed_ms(near)
        return AtWork(
            found,
            min(found.blocks * near.geometry.record_bytes, loaded.plan.expert_bytes),
            LinkTotals(stats["link_busy_seconds"], demand, int(stats["link_bytes"]) - demand),
            self._exposed[1],
        )


def _exposed_ms(near: ExpertTier) -> float | None:
    """Load time of a token that nothing hides, as the plan in effect expects it."""
    if near.plan.allocation is not None:
        return 1000 * near.plan.allocation.exposed_total
    if near.knowledge is None:
        return None
    blocks = near.geometry.blocks_per_expert
    seconds = expected_seconds(near.plan, near.settings, near.knowledge, near.top_k, blocks)
    return None if seconds is None else 1000 * seconds
