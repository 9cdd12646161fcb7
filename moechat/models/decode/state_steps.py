"""Native steps of decoder layers whose mixer has states: linear attention, short convolution, Mamba-2."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from moechat import _native
from moechat.models.decode.native_step import (
    Feed,
    NativeStep,
    Places,
    decode_with_states,
    forwards_of,
    is_native_router,
    native_feed,
    native_part,
)
from moechat.models.decode.shared_expert import SharedBlock
from moechat.models.decode.wiring import Wiring, recognise_wiring
from moechat.models.state_layer import StateLayer, places_of_states


@dataclass(frozen=True)
class StateMixer:
    """A mixer with states.

    Attributes:
        index: Of its layer in the attention cache.
        dtype: Of hidden states.
        hidden_size: Hidden size.
        step: Class of the native step of its layers.
        places: Addresses of a token's states in the layer of a cache; ``None``: it has none that native code
            overwrites.
        fill: Gives the layer of a cache random states.
    """

    index: int
    dtype: torch.dtype
    hidden_size: int
    step: type[_native.DeltaStep] | type[_native.ShortConvStep] | type[_native.MambaStep]
    places: Callable[[Any], tuple[int, int] | None]
    fill: Callable[[StateLayer, torch.Generator], None]


def state_step(
    layer: Any, name: str, mixers: Mapping[nn.Module, StateMixer], blocks: Mapping[nn.Module, SharedBlock]
) -> NativeStep | None:
    """The native step of a decoder layer with such a mixer; ``None`` if its parts are not native.

    The result still has to be verified by :func:`moechat.models.decode.layer_check.agrees`.

    Args:
        layer: Any module.
        name: Of its mixer.
        mixers: Those of the model. The ``forward`` of each has its native part as attribute ``mixer``, if it
            is native with its projections.
        blocks: Those of the model that have a shared expert.
    """
    wiring = recognise_wiring(layer, is_native_router, name)
    if wiring is None or (mixer := mixers.get(wiring.attention)) is None:
        return None
    try:
        feed = native_feed(wiring, blocks.get(wiring.mlp))
    except ValueError:  # the shapes of the parts do not match
        return None
    return None if feed is None else step_of(wiring, mixer, feed)


def step_of(wiring: Wiring, mixer: StateMixer, feed: Feed, *, scale: float = 1.0) -> NativeStep | None:
    """The native step of a layer with these parts; ``None`` if its mixer is not native, or they do not fit
    together.

    Args:
        wiring: Of the layer.
        mixer: What its mixer is.
        feed: What follows it.
        scale: Factor of the mixer's result, before it is added.
    """
    part = getattr(vars(wiring.attention).get("forward"), "__dict__", {}).get("mixer")
    before = native_part(wiring.before)
    if part is None or not isinstance(before, _native.RmsNorm):
        return None
    try:
        run = mixer.step(before, part, feed.run, scale)
    except ValueError:
        return None

    def first_slot(_: int, generator: torch.Generator) -> StateLayer:
        slot = StateLayer()
        mixer.fill(slot, generator)
        return slot

    finish = feed.finish(run, mixer.hidden_size, mixer.dtype)
    places = Places(partial(places_of_states, mixer.places), lambda place: place)

    return NativeStep(
        wiring=wiring,
        feed=feed,
        run=run,
        dtype=mixer.dtype,
        hidden_size=mixer.hidden_size,
        angles=0,
        index=mixer.index,
        slots=(StateLayer,),
        exact=feed.exact,
        decode=decode_with_states(finish, places),
        places=places,
        first_slot=first_slot,
        keeps=(part, *forwards_of(wiring)),
    )
