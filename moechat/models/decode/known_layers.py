"""The decoder layers of a model that are made of known parts only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from moechat.models.decode import delta_layer, plain_layer
from moechat.models.decode.angles import angles_of_layers
from moechat.models.decode.delta_layer import DeltaLayer, find_delta_layer
from moechat.models.decode.gated_delta import GatedDelta
from moechat.models.decode.layer_kind import layer_kind
from moechat.models.decode.norms import Norm
from moechat.models.decode.plain_layer import PlainLayer, find_plain_layer
from moechat.models.decode.routers import Rule

KnownLayer = PlainLayer | DeltaLayer


def recognise_known_layers(
    model: Any,
    norms: Mapping[nn.Module, Norm],
    rules: Mapping[nn.Module, Rule],
    rotary: Mapping[nn.Module, Any],
    deltas: Mapping[nn.Module, GatedDelta],
) -> dict[nn.Module, KnownLayer]:
    """The layers of ``model`` with their parts. One of each kind is tried.

    Args:
        model: On the CPU, but for its projections.
        norms: Modules that are known.
        rules: Of its routers that are known.
        rotary: As of :func:`moechat.models.decode.plain_layer.find_plain_layer`.
        deltas: Linear attention that is known.
    """
    found: dict[nn.Module, KnownLayer] = {}
    tried: dict[Any, bool] = {}
    for layer, angles in angles_of_layers(model).items():
        plain = find_plain_layer(layer, norms, rules, rotary)
        known = plain or find_delta_layer(layer, norms, rules, deltas)
        if known is None:
            continue
        rule = None if known.wiring.router is None else rules[known.wiring.router]
        kind = layer_kind(layer)
        if kind not in tried:
            tried[kind] = (
                delta_layer.agrees(layer, known, rule)
                if isinstance(known, DeltaLayer)
                else plain_layer.agrees(layer, known, rule, angles)
            )
        if tried[kind]:
            found[layer] = known
    return found
