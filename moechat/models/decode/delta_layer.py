"""Decoder layers with linear attention by the gated delta rule, recognised while the model is on the CPU.

As of :mod:`moechat.models.decode.plain_layer`: parts by their results, the code by its names, the whole by
its result for random tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from moechat.models.decode.gated_delta import GatedDelta
from moechat.models.decode.norms import Norm
from moechat.models.decode.plain_layer import weight_of
from moechat.models.decode.probe import close, normal_numbers, probing
from moechat.models.decode.routers import Rule
from moechat.models.decode.stand_ins import StandIn, chooses
from moechat.models.decode.wiring import LINEAR_ATTENTION, Wiring, recognise_wiring

_PROBES = 2


class _StandInMixer(StandIn):
    """Takes the place of linear attention."""

    def forward(self, hidden_states: torch.Tensor, **_: Any) -> torch.Tensor:  # type: ignore[override]
        """The answer; the arguments are those of linear attention."""
        return super().forward(hidden_states)


@dataclass(frozen=True)
class DeltaLayer:
    """A decoder layer: linear attention and a feed-forward part, each behind a norm.

    Attributes:
        wiring: Its modules.
        before: What ``wiring.before`` computes.
        after: What ``wiring.after`` computes.
        delta: What ``wiring.attention`` is.
    """

    wiring: Wiring
    before: Norm
    after: Norm
    delta: GatedDelta


def find_delta_layer(
    layer: Any,
    norms: Mapping[nn.Module, Norm],
    routers: Collection[nn.Module],
    deltas: Mapping[nn.Module, GatedDelta],
) -> DeltaLayer | None:
    """The parts of a layer; ``None`` if they are not known. It still has to be tried: :func:`agrees`.

    Args:
        layer: Any module.
        norms: Those of the model that are known.
        routers: Likewise.
        deltas: Likewise.
    """
    wiring = recognise_wiring(layer, lambda module: module in routers, LINEAR_ATTENTION)
    if wiring is None or "forward" in vars(wiring.mlp):
        return None
    before, after, delta = norms.get(wiring.before), norms.get(wiring.after), deltas.get(wiring.attention)
    if before is None or after is None or delta is None:
        return None
    return DeltaLayer(wiring, before, after, delta)


def agrees(layer: Any, found: DeltaLayer, rule: Rule | None) -> bool:
    """Whether a layer has the results of its parts, but for rounding, for random tokens.

    Args:
        layer: The layer.
        found: Its parts.
        rule: Of its router, if it has only a router and experts.
    """
    wiring = found.wiring
    before, after = weight_of(wiring.before), weight_of(wiring.after)
    with probing() as generator:
        normal = normal_numbers(generator, before.dtype)
        mixer, part = _StandInMixer(normal(1, 1, len(before))), StandIn(normal(1, 1, len(before)))
        fed = wiring.mlp if wiring.experts is None else wiring.experts
        with mixer.in_place_of(wiring.attention), part.in_place_of(fed):
            for _ in range(_PROBES):
                hidden = normal(1, 1, len(before))
                try:
                    theirs = layer.forward(hidden.clone(), attention_mask=None, position_embeddings=None)
                except Exception:  # the family's code needs more than the probe has
                    return False
                middle = hidden + mixer.answer
                if not isinstance(theirs, torch.Tensor) or not part.seen or not mixer.seen:
                    return False
                x, *choice = part.seen
                normed = found.after.apply(middle, after)
                pairs = [
                    (theirs, middle + part.answer),
                    (mixer.seen[0], found.before.apply(hidden, before)),
                    (x.view_as(normed), normed),
                ]
                if not all(close(ours, wanted) for ours, wanted in pairs):
                    return False
                if rule is not None and not chooses(wiring.router, rule, x, choice):
                    return False
    return True
