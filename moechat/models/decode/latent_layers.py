"""Decoder layers with latent attention whose step for one token is a native call.

Those of DeepSeek-V3 and GLM-4.7-Flash are recognised as layers with other attention are
(:mod:`moechat.models.decode.layers`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn

from moechat import _native
from moechat.models.cache_layers import ReservedLayer
from moechat.models.decode.latent import LATENT, Latent
from moechat.models.decode.native_step import (
    NativeStep,
    decode_at_places,
    forwards_of,
    is_native_router,
    key_places,
    native_feed,
    native_part,
)
from moechat.models.decode.products import native_products
from moechat.models.decode.rotary import rotation_width
from moechat.models.decode.shared_expert import SharedBlock
from moechat.models.decode.wiring import LATENT_PARTS, recognise_wiring
from moechat.models.element_types import ELEMENTS

_SLOTS = (ReservedLayer,)


def latent_step(
    layer: Any,
    angles: int,
    blocks: Mapping[nn.Module, SharedBlock],
    neighbours: Collection[nn.Module],
) -> NativeStep | None:
    """The native step of a decoder layer with native parts; ``None`` if the layer is not recognised.

    The result still has to be verified by :func:`moechat.models.decode.layer_check.agrees`.

    Args:
        layer: Any module.
        angles: Number of rotary angles per token in the model.
        blocks: Those of the model that have a shared expert.
        neighbours: Attention modules whose family has a known function that rotates neighbouring elements.
    """
    wiring = recognise_wiring(layer, is_native_router)
    latent = None if wiring is None else vars(wiring.attention).get(LATENT)
    if wiring is None or not isinstance(latent, Latent):
        return None
    attention, before = wiring.attention, native_part(wiring.before)
    scaling, index = getattr(attention, "scaling", None), getattr(attention, "layer_idx", None)
    weight = wiring.before.weight
    assert isinstance(weight, torch.Tensor)
    dtype, hidden_size = weight.dtype, weight.shape[0]
    if type(scaling) is not float or type(index) is not int or dtype not in ELEMENTS:
        return None
    rank, rotated = latent.rank, latent.rotated
    pairs = bool(getattr(attention.config, "rope_interleave", False))
    if pairs:
        turns = attention in neighbours and angles in (rotated, rotated // 2)
    else:
        turns = rotation_width(vars(attention).get("forward"), rotated, angles) == rotated
    if not turns:
        return None
    shortens = getattr(attention, "q_a_proj", None) is not None
    names = LATENT_PARTS["shortened" if shortens else "whole"]
    if {name for name, child in attention.named_children() if child is not None} != set(names):
        return None
    modules = {name: attention._modules[name] for name in names}
    norms = [native_part(modules[name]) for name in names if name.endswith("norm")]
    products = native_products(modules[name] for name in names if "norm" not in name and name != "kv_b_proj")
    if products is None or not all(isinstance(norm, _native.RmsNorm) for norm in (before, *norms)):
        return None
    *query, made, output = products
    try:
        feed = native_feed(wiring, blocks.get(wiring.mlp))
        if feed is None:
            return None
        run = _native.LatentStep(
            before,
            (query[0], norms[0]) if shortens else None,
            query[-1],
            made,
            norms[-1],
            latent.native(dtype, scaling),
            angles,
            pairs,
            output,
            feed.run,
        )
    except ValueError:  # the shapes of the parts do not match
        return None

    def first_slot(tokens: int, generator: torch.Generator) -> ReservedLayer:
        slot = ReservedLayer(2 * tokens)
        latents, turned = (
            torch.randn((1, 1, tokens, width), generator=generator).to(dtype) for width in (rank, rotated)
        )
        slot.update(latents, turned)
        return slot

    places = key_places(_SLOTS, (1, rank, dtype, rotated), packed=False)
    return NativeStep(
        wiring=wiring,
        feed=feed,
        run=run,
        dtype=dtype,
        hidden_size=hidden_size,
        angles=angles,
        index=index,
        slots=_SLOTS,
        exact=feed.exact,
        decode=decode_at_places(feed.finish(run, hidden_size, dtype), places),
        places=places,
        first_slot=first_slot,
        keeps=(latent, *forwards_of(wiring)),
    )
