"""The routing statistics that a plan rests on: recorded ones of this model, else the family's defaults."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from moechat.configurator.systems import CacheSettings
from moechat.configurator.warm_start import blended_statistics, default_statistics
from moechat.planning.source import PlannedModel
from moechat.routing.statistics import RoutingStatistics
from moechat.routing.statistics_file import load_statistics, model_key

if TYPE_CHECKING:
    from moechat.models.shape import ModelOutline


@dataclass(frozen=True)
class Routing:
    """Statistics and where they come from.

    Attributes:
        statistics: For the configurator.
        tokens: Recorded tokens of this very model among them.
        source: For people.
    """

    statistics: RoutingStatistics
    tokens: int
    source: str


def routing_of(found: PlannedModel, outline: ModelOutline, settings: CacheSettings) -> Routing:
    """What is known of a model's routing under a policy."""
    default = default_statistics(
        outline.model_type,
        len(outline.expert_layers),
        outline.experts.num_experts,
        outline.top_k,
        policy=settings.policy,
    )
    layers, experts = len(outline.expert_layers), outline.experts.num_experts
    seen = None
    if found.store is not None:
        fingerprint = found.store.manifest.source.fingerprint
        key = model_key(fingerprint, layers=layers, experts=experts, top_k=outline.top_k)
        seen = load_statistics(key, settings.policy)
    if seen is None or not seen.tokens or (seen.layers, seen.experts) != (layers, experts):
        return Routing(default, 0, f"defaults for models like {outline.model_type}, none recorded")
    return Routing(
        blended_statistics(default, seen), seen.tokens, f"{seen.tokens:,} recorded tokens of this model"
    )
