"""The routing statistics that a plan rests on: recorded ones of this model, else the family's defaults."""

from __future__ import annotations

from dataclasses import dataclass

from moechat.configurator.estimate import ModelShape
from moechat.configurator.systems import CacheSettings
from moechat.configurator.warm_start import default_statistics
from moechat.offload.knowledge import blend, saved_statistics
from moechat.planning.source import PlannedModel
from moechat.routing.statistics import RoutingStatistics


@dataclass(frozen=True)
class Routing:
    """Routing statistics and their origin.

    Attributes:
        statistics: Statistics for the configurator.
        tokens: Recorded tokens of this model among them.
        source: Origin, for people.
        remarks: Reasons why recorded statistics are not used.
    """

    statistics: RoutingStatistics
    tokens: int
    source: str
    remarks: tuple[str, ...] = ()


def routing_of(found: PlannedModel, model_type: str, shape: ModelShape, settings: CacheSettings) -> Routing:
    """The routing statistics of a model, by the priorities of the settings' policy."""
    remarks: list[str] = []
    default = default_statistics(model_type, shape.layers, shape.experts, shape.top_k, policy=settings.policy)
    seen = None
    if found.store is not None:
        fingerprint = found.store.manifest.source.fingerprint
        seen = saved_statistics(shape, fingerprint, settings.policy, remarks)
    if seen is None or not seen.tokens:
        source = f"defaults for models like {model_type}, none recorded"
        return Routing(default, 0, source, tuple(remarks))
    statistics, _ = blend(default, seen, remarks)
    source = f"{seen.tokens:,} recorded tokens of this model"
    return Routing(statistics or default, seen.tokens, source, tuple(remarks))
