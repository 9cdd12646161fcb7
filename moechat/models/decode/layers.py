"""Decoder layers with attention whose step for one token is a native call.

A layer is recognised in two steps: by the names that its code uses (:mod:`moechat.models.decode.wiring`), and
by the results of both ways for random tokens (:mod:`moechat.models.decode.layer_check`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from moechat import _native
from moechat.models.decode.native_step import (
    SLOTS,
    Feed,
    NativeStep,
    decode_at_places,
    first_keys,
    forwards_of,
    is_native_router,
    key_places,
    native_feed,
    native_part,
)
from moechat.models.decode.products import native_products
from moechat.models.decode.rotary import rotation_width
from moechat.models.decode.shared_expert import SharedBlock
from moechat.models.decode.wiring import Wiring, recognise_wiring
from moechat.models.element_types import ELEMENTS


def attention_step(layer: Any, angles: int, blocks: Mapping[nn.Module, SharedBlock]) -> NativeStep | None:
    """The native step of a decoder layer with native parts; ``None`` if the layer is not recognised.

    The result still has to be verified by :func:`moechat.models.decode.layer_check.agrees`.

    Args:
        layer: Any module.
        angles: Number of rotary angles per token in the model.
        blocks: Those of the model that have a shared expert.
    """
    wiring = recognise_wiring(layer, is_native_router)
    if wiring is None or not wiring.plain_attention():
        return None
    attention = wiring.attention
    width = rotation_width(vars(attention).get("forward"), getattr(attention, "head_dim", 0), angles)
    if not width:
        return None
    try:
        feed = native_feed(wiring, blocks.get(wiring.mlp))
    except ValueError:  # the shapes of the parts do not match
        return None
    return None if feed is None else step_with_attention(wiring, feed, angles, width)


def step_with_attention(
    wiring: Wiring, feed: Feed, angles: int, width: int, *, scale: float = 1.0
) -> NativeStep | None:
    """The native step of a layer with these parts; ``None`` if one is not native, or they do not fit.

    Args:
        wiring: Of the layer.
        feed: What follows its attention.
        angles: Number of rotary angles per token; 0: it does not rotate.
        width: Elements of a head that are rotated.
        scale: Factor of the result of attention, before it is added.
    """
    attention, before = wiring.attention, native_part(wiring.before)
    products = native_products(getattr(attention, name, None) for name in wiring.projections)
    norms = [getattr(attention, name, None) for name in wiring.head_norms]
    head_norms = [native_part(norm) for norm in norms]
    weight = wiring.before.weight
    assert isinstance(weight, torch.Tensor)
    dtype, hidden_size = weight.dtype, weight.shape[0]
    scaling = getattr(attention, "scaling", None)
    if not isinstance(before, _native.RmsNorm):
        return None
    if products is None or dtype not in ELEMENTS or type(scaling) is not float:
        return None
    if type(getattr(attention, "layer_idx", None)) is not int:
        return None
    if any(norms) and not all(isinstance(norm, _native.RmsNorm) for norm in head_norms):
        return None
    dim = attention.head_dim
    output_proj = attention._modules[wiring.projections[-1]]
    heads, kv_heads = output_proj.in_features // dim, attention.k_proj.out_features // dim
    if not kv_heads or heads % kv_heads:
        return None
    sinks = attention._parameters.get("sinks")
    if sinks is not None:
        sinks = sinks.detach().float().contiguous()
    kind = ELEMENTS[dtype]
    at = 0 if sinks is None else sinks.data_ptr()
    query, key, value, output = products
    gate = None
    if wiring.gate is not None:
        own = native_products([wiring.gate])
        if own is None:
            return None
        gate = own[0], wiring.softplus
    try:
        run = _native.LayerStep(
            kind,
            before,
            query,
            key,
            value,
            output,
            wiring.gated,
            (head_norms[0], head_norms[1]) if norms[0] is not None else None,
            _native.Attention(kind, kv_heads, heads // kv_heads, dim, 0, dim, scaling, at),
            angles,
            width,
            feed.run,
            gate=gate,
            scale=scale,
        )
    except ValueError:  # the shapes of the parts do not match
        return None

    places = key_places(SLOTS, (kv_heads, dim, dtype, dim), packed=True)
    return NativeStep(
        wiring=wiring,
        feed=feed,
        run=run,
        dtype=dtype,
        hidden_size=hidden_size,
        angles=angles,
        index=attention.layer_idx,
        slots=SLOTS,
        # torch's sigmoid and softplus round in another way.
        exact=feed.exact and not wiring.gated and gate is None,
        decode=decode_at_places(feed.finish(run, hidden_size, dtype), places),
        places=places,
        first_slot=first_keys(kv_heads, dim, dtype),
        keeps=(sinks, *forwards_of(wiring)),
    )
