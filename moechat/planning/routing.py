"""The routing statistics that a plan rests on: recorded ones of this model, else the family's defaults."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from moechat.budget.knowledge import blend, saved_statistics
from moechat.configurator.estimate import ModelShape
from moechat.configurator.routing_families import family_bounds, recorded_model, recorded_names
from moechat.configurator.systems import CacheSettings
from moechat.configurator.warm_start import PSEUDO_TOKENS, default_statistics
from moechat.planning.source import PlannedModel
from moechat.routing.statistics import RoutingStatistics

# From so many recorded tokens on, the defaults weigh so little (1 in 11) that no range is given.
_ENOUGH_TOKENS = 10 * PSEUDO_TOKENS

Basis = Literal["recorded", "trace", "assumed"]


@dataclass(frozen=True)
class Routing:
    """Routing statistics and their origin.

    Attributes:
        statistics: Statistics for the configurator.
        tokens: Recorded tokens of this model among them.
        source: Origin, for people.
        basis: ``recorded``: while this model was used here; ``trace``: a published recording of this model;
            ``assumed``: neither, so the routing of other models is taken for it.
        bounds: Statistics with which the model is slowest, and fastest; ``None`` where they are known well
            enough.
        remarks: Reasons why recorded statistics are not used.
    """

    statistics: RoutingStatistics
    tokens: int
    source: str
    basis: Basis
    bounds: tuple[RoutingStatistics, RoutingStatistics] | None = None
    remarks: tuple[str, ...] = ()


def routing_of(found: PlannedModel, model_type: str, shape: ModelShape, settings: CacheSettings) -> Routing:
    """The routing statistics of a model, by the priorities of the settings' policy."""
    remarks: list[str] = []
    sizes = (shape.layers, shape.experts, shape.top_k)
    default = default_statistics(model_type, *sizes, policy=settings.policy)
    trace = recorded_model(model_type, *sizes)
    seen = None
    if found.store is not None:
        fingerprint = found.store.manifest.source.fingerprint
        seen = saved_statistics(shape, fingerprint, settings.policy, remarks)
    tokens = 0 if seen is None else seen.tokens
    bounds = None
    if trace is None and tokens < _ENOUGH_TOKENS:
        low, high = (
            default_statistics(model_type, *sizes, policy=settings.policy, family=family)
            for family in family_bounds(model_type)
        )
        # Recorded tokens weigh in both as they do in the statistics, which narrows the range.
        bounds = (blend(low, seen, [])[0] or low, blend(high, seen, [])[0] or high)
    basis: Basis
    if tokens:
        source, basis = f"{tokens:,} recorded tokens of this model", "recorded"
    elif trace is not None:
        source = f"a published recording of {trace.tokens:,} tokens of {trace.name}; none recorded here"
        basis = "trace"
    else:
        known = " and ".join(recorded_names())
        source = (
            f"assumed for models like {model_type}, none recorded here: "
            f"defaults rest on recordings of {known}"
        )
        basis = "assumed"
    statistics, _ = blend(default, seen if tokens else None, remarks)
    return Routing(statistics or default, tokens, source, basis, bounds, tuple(remarks))
