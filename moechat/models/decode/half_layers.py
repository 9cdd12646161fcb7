"""Decoder layers that are a mixer or a feed-forward part alone, ``x + part(norm(x))`` (Nemotron-H)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from moechat import _native
from moechat.models.cache_memory import EMPTY
from moechat.models.decode.layers import step_with_attention
from moechat.models.decode.native_step import (
    NativeStep,
    Places,
    ended_feed,
    forwards_of,
    is_native_router,
    native_feed,
    native_part,
)
from moechat.models.decode.shared_expert import SharedBlock
from moechat.models.decode.state_steps import StateMixer, step_of
from moechat.models.decode.wiring import recognise_half

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
    wiring = recognise_half(layer, is_native_router, mixers)
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


def _feed_step(layer: Any, wiring: Any, block: SharedBlock | None) -> NativeStep | None:
    index, weight = getattr(layer, "layer_idx", None), wiring.before.weight
    if type(index) is not int or not EMPTY:
        return None
    try:
        feed = native_feed(wiring, block)
        if feed is None:
            return None
        run = _native.FeedLayer(feed.run)
    except ValueError:  # the shapes of the parts do not match
        return None
    finish, empty_like = feed.finish(run, weight.shape[0], weight.dtype), torch.empty_like
    places = Places(lambda slot: () if type(slot) in EMPTY else None, lambda place: place)

    def decode(hidden: torch.Tensor, slots: Sequence[Any], *_: torch.Tensor) -> Any:
        found = places.find_all(slots)
        return None if found is None else finish((hidden.data_ptr(), found), empty_like(hidden))

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
        decode=decode,
        places=places,
        first_slot=lambda *_: EMPTY[0](),
        keeps=forwards_of(wiring),
    )
