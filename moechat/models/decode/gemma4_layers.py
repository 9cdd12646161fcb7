"""Gemma 4's decoder layers, whose step for one token is a native call.

A layer has routed experts and a dense feed-forward part, which the native step computes as a shared expert.
Router, experts and dense part each normalise the same residual. The results of both, their sum, and the
result of attention are normalised too, as are values, by a norm without a weight. In layers without a
window, values are the keys before their norm.

Recognised as other layers are: by the names that their code uses, and by the results of both ways for random
tokens, bit by bit.
"""

from __future__ import annotations

from typing import Any

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
    native_part,
)
from moechat.models.decode.products import native_products
from moechat.models.decode.wiring import ATTENTION_NAMES, Wiring, uses_only
from moechat.models.element_types import ELEMENTS

_BEFORE, _BEFORE_DENSE, _BEFORE_EXPERTS = (
    "input_layernorm",
    "pre_feedforward_layernorm",
    "pre_feedforward_layernorm_2",
)
_AFTER_ATTENTION, _AFTER_BOTH, _AFTER_DENSE, _AFTER_EXPERTS = (
    "post_attention_layernorm",
    "post_feedforward_layernorm",
    "post_feedforward_layernorm_1",
    "post_feedforward_layernorm_2",
)
_NORMS = (
    *(_BEFORE, _BEFORE_DENSE, _BEFORE_EXPERTS),
    *(_AFTER_ATTENTION, _AFTER_DENSE, _AFTER_EXPERTS, _AFTER_BOTH),
)
_PARTS = frozenset({"self_attn", "mlp", "router", "experts", *_NORMS})
_VALUE_NORM, _SCALE = "v_norm", "layer_scalar"
_NAMES = frozenset(
    {
        *(*_PARTS, _SCALE, "enable_moe_block", "reshape", "shape"),
        # Of layers with inputs of their own, which are left to the family's code.
        *("hidden_size_per_layer_input", "per_layer_input_gate", "act_fn", "per_layer_projection"),
        "post_per_layer_input_norm",
    }
)
_ATTENTION_NAMES = frozenset(
    {
        *(*ATTENTION_NAMES, _VALUE_NORM, "layer_type"),
        # Of layers that share keys and values, likewise.
        *("is_kv_shared_layer", "store_full_length_kv"),
        *("device", "to"),  # until transformers 5.22
    }
)


def gemma4_step(layer: Any) -> NativeStep | None:
    """The native step of one of Gemma 4's decoder layers; ``None`` if the layer is not recognised.

    The result still has to be verified by :func:`moechat.models.decode.layer_check.agrees`.

    Args:
        layer: Any module.
    """
    wiring = _wiring(layer)
    if wiring is None:
        return None
    attention, scale = wiring.attention, layer._buffers[_SCALE]
    norms = {name: native_part(layer._modules[name]) for name in _NORMS}
    head_norms = [native_part(getattr(attention, name)) for name in wiring.head_norms]
    router, shared = native_part(wiring.router), native_part(wiring.mlp)
    weight = layer.input_layernorm.weight
    dtype, hidden_size = weight.dtype, weight.shape[0]
    shares_keys = attention.v_proj is None
    names = [name for name in wiring.projections if not (shares_keys and name == "v_proj")]
    products = native_products(getattr(attention, name) for name in names)
    value_norm = getattr(vars(attention.v_norm).get("forward"), "__dict__", {}).get("part")
    if not all(isinstance(norm, _native.RmsNorm) for norm in (*norms.values(), *head_norms)):
        return None
    if products is None or value_norm is None or not isinstance(shared, _native.Mlp):
        return None
    if dtype not in ELEMENTS or scale.dtype is not dtype or not scale.is_cpu:
        return None
    dim, kind = attention.head_dim, ELEMENTS[dtype]
    heads, kv_heads = (
        attention._modules[wiring.projections[-1]].in_features // dim,
        attention.k_proj.out_features // dim,
    )
    if not kv_heads or heads % kv_heads:
        return None
    value_part, ones = value_norm(dtype, dim)
    query, key, *value, output = products
    try:
        run_feed = _native.FeedStep(
            norms[_BEFORE_DENSE],
            router,
            shared,
            None,
            (
                *(norms[name] for name in (_BEFORE_EXPERTS, _AFTER_DENSE, _AFTER_EXPERTS, _AFTER_BOTH)),
                scale.data_ptr(),
            ),
        )
        run = _native.LayerStep(
            kind,
            norms[_BEFORE],
            query,
            key,
            value[0] if value else None,
            output,
            False,
            (head_norms[0], head_norms[1]),
            _native.Attention(kind, kv_heads, heads // kv_heads, dim, 0, dim, attention.scaling, 0),
            dim,
            dim,
            run_feed,
            value_part,
            norms[_AFTER_ATTENTION],
        )
    except ValueError:  # the shapes of the parts do not match
        return None
    assert wiring.router is not None
    feed = Feed(
        run_feed,
        wiring.mlp,
        wiring.experts,
        vars(wiring.router)["forward"].chosen,
        shared=True,
        exact=True,
        bypassed=tuple(part for part in layer.modules() if part is not layer),
    )
    places = key_places(SLOTS, (kv_heads, dim, dtype, dim), packed=True)
    return NativeStep(
        wiring=wiring,
        feed=feed,
        run=run,
        dtype=dtype,
        hidden_size=hidden_size,
        angles=dim,
        index=attention.layer_idx,
        slots=SLOTS,
        exact=True,
        decode=decode_at_places(feed.finish(run, hidden_size, dtype), places),
        places=places,
        first_slot=first_keys(kv_heads, dim, dtype),
        keeps=(
            scale,
            ones,
            vars(wiring.router)["forward"],
            *forwards_of(wiring),
            *(vars(layer._modules[name])["forward"] for name in _NORMS),
        ),
    )


def _wiring(layer: Any) -> Wiring | None:
    """The parts of a layer; ``None`` if its code does anything else with them."""
    parts = dict(layer.named_children())
    if set(parts) != _PARTS or "forward" in vars(layer) or layer.training or not uses_only(layer, _NAMES):
        return None
    attention, router = parts["self_attn"], parts["router"]
    if attention._parameters or not uses_only(attention, _ATTENTION_NAMES):
        return None
    scale = layer._buffers.get(_SCALE)
    if scale is None or scale.shape != (1,) or not getattr(layer, "enable_moe_block", False):
        return None
    if getattr(layer, "hidden_size_per_layer_input", None) or not is_native_router(router):
        return None
    shares = (getattr(attention, name, True) for name in ("is_kv_shared_layer", "store_full_length_kv"))
    if any(shares) or "forward" in vars(attention):
        return None
    if type(attention.scaling) is not float or type(attention.layer_idx) is not int:
        return None
    before, after = parts[_BEFORE], parts[_BEFORE_DENSE]
    wiring = Wiring(before, attention, after, parts["mlp"], router, parts["experts"], gated=False)
    children = set(dict(attention.named_children()))
    known = {*wiring.projections, *wiring.head_norms, _VALUE_NORM}
    return wiring if children | {"v_proj"} == known else None
