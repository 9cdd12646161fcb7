"""Decoder layers that are a mixer or a feed-forward part alone, ``x + part(norm(x))`` (Nemotron-H)."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

import torch
from torch import nn

from moechat import _native
from moechat.models.cache_memory import EMPTY
from moechat.models.decode.layers import step_with_attention
from moechat.models.decode.native_step import (
    NativeStep,
    Places,
    decode_with_states,
    ended_feed,
    forwards_of,
    is_native_router,
    native_feed,
    native_part,
)
from moechat.models.decode.shared_expert import SharedBlock
from moechat.models.decode.state_steps import StateMixer, step_of
from moechat.models.decode.wiring import ATTENTION_NAMES, Wiring, router_and_experts, uses_only

# Parts of a layer, and the names that its code uses.
_PARTS = ("norm", "mixer")
_NAMES = frozenset({*_PARTS, "to", "dtype", "weight", "block_type"})
_ATTENTION = "q_proj"


def half_step(
    layer: Any, mixers: Mapping[nn.Module, StateMixer], blocks: Mapping[nn.Module, SharedBlock]
) -> NativeStep | None:
    """The native step of such a layer; ``None`` if it is not one, or its parts are not native.

    The result still has to be verified by :func:`moechat.models.decode.layer_check.agrees`.

    Args:
        layer: Any module.
        mixers: Those with states of the model.
        blocks: Those of the model that have a shared expert.
    """
    wiring = _recognise(layer, mixers)
    if wiring is None:
        return None
    norm = native_part(wiring.before)
    if not isinstance(norm, _native.RmsNorm):
        return None
    if (mixer := mixers.get(wiring.attention)) is not None:
        return step_of(wiring, mixer, ended_feed(norm, wiring.mlp))
    if _ATTENTION in wiring.attention._modules:
        return step_with_attention(wiring, ended_feed(norm, wiring.mlp), 0, 0)
    return _feed_step(layer, wiring, blocks.get(wiring.mlp))


def _recognise(layer: Any, mixers: Container[nn.Module]) -> Wiring | None:
    """The parts of a layer ``x + part(norm(x))``; ``None`` if its code does anything else with them. Modules
    that do nothing stand for those that it does not have.

    Args:
        layer: Any module.
        mixers: Known ones with states, whose own code is not looked at.
    """
    parts = dict(layer.named_children())
    if parts.keys() != set(_PARTS) or "forward" in vars(layer) or layer.training:
        return None
    if not uses_only(layer, _NAMES):
        return None
    norm, part = (parts[name] for name in _PARTS)
    if part in mixers:
        return Wiring(norm, part, norm, nn.Identity(), None, None, gated=False)
    if _ATTENTION in part._modules:
        wiring = Wiring(norm, part, norm, nn.Identity(), None, None, gated=False)
        return wiring if uses_only(part, ATTENTION_NAMES) and wiring.plain_attention() else None
    router, experts = router_and_experts(part, is_native_router)
    return Wiring(norm, nn.Identity(), norm, part, router, experts, gated=False)


def _feed_step(layer: Any, wiring: Wiring, block: SharedBlock | None) -> NativeStep | None:
    index, weight = getattr(layer, "layer_idx", None), wiring.before.weight
    assert isinstance(weight, torch.Tensor)
    if type(index) is not int or not EMPTY:
        return None
    try:
        feed = native_feed(wiring, block)
        if feed is None:
            return None
        run = _native.FeedLayer(feed.run)
    except ValueError:  # the shapes of the parts do not match
        return None
    finish = feed.finish(run, weight.shape[0], weight.dtype)
    places = Places(lambda slot: () if type(slot) in EMPTY else None, lambda place: place)

    return NativeStep(
        wiring=wiring,
        feed=feed,
        run=run,
        dtype=weight.dtype,
        hidden_size=weight.shape[0],
        angles=0,
        index=index,
        slots=EMPTY,
        exact=feed.exact,
        decode=decode_with_states(finish, places),
        places=places,
        first_slot=lambda *_: EMPTY[0](),
        keeps=forwards_of(wiring),
    )
