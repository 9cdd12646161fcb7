"""Computes a decoder layer for one token, up to its experts, in a single native call.

For one token, the overhead of torch and Python between the parts of a layer (modules, views, copies into the
cache, sums) exceeds the cost of some parts. A layer is recognised in two steps: by the names that its code
uses (:mod:`moechat.models.decode.wiring`), and by the results of both ways for random tokens
(:mod:`moechat.models.decode.layer_check`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import DynamicCache

from moechat import _native
from moechat.models.cache_layers import AppendPlace, ReservedLayer, WindowLayer
from moechat.models.decode.attention import hides_nothing
from moechat.models.decode.probe import ELEMENTS
from moechat.models.decode.products import native_products
from moechat.models.decode.rotary import rotation_width
from moechat.models.decode.wiring import (
    HEAD_NORMS,
    PROJECTIONS,
    Wiring,
    only_known_arguments,
    recognise_wiring,
)
from moechat.models.skeleton import EXPERTS_RUNNER

Forward = Callable[..., Any]
# (hidden state, layer of the cache, cosines, sines) -> hidden state.
Decode = Callable[[torch.Tensor, Any, torch.Tensor, torch.Tensor], torch.Tensor | None]


@dataclass(frozen=True)
class LayerParts(Wiring):
    """The parts of a decoder layer.

    Attributes:
        width: Rotated elements of a head.
        angles: Number of rotary angles per token.
    """

    width: int
    angles: int


def recognise_layer(layer: Any, angles: int) -> Forward | None:
    """A ``forward`` for a decoder layer with native parts; ``None`` if the layer is not recognised.

    The result still has to be verified by :func:`moechat.models.decode.layer_check.agrees`.

    Args:
        layer: Any module.
        angles: Number of rotary angles per token in the model.
    """
    parts = _parts(layer, angles)
    if parts is None:
        return None
    try:
        return _forward(layer, parts)
    except ValueError:  # the shapes of the parts do not match
        return None


def native_part(module: nn.Module | None) -> Any:
    """The native object behind the ``forward`` of a norm or router; ``None`` if torch computes it."""
    forward = None if module is None else vars(module).get("forward")
    return None if forward is None else getattr(forward, "__dict__", {}).get("run")


def _parts(layer: Any, angles: int) -> LayerParts | None:
    wiring = recognise_wiring(layer, lambda module: isinstance(native_part(module), _native.Routing))
    if wiring is None or wiring.gated:
        return None
    if not all(isinstance(native_part(norm), _native.RmsNorm) for norm in (wiring.before, wiring.after)):
        return None
    attention = wiring.attention
    width = rotation_width(vars(attention).get("forward"), getattr(attention, "head_dim", 0), angles)
    return LayerParts(**vars(wiring), width=width, angles=angles) if width else None


@dataclass(frozen=True)
class _Step:
    """The native step of a layer and its sizes.

    Attributes:
        run: The step.
        dtype: Type of hidden states and cache.
        hidden_size: Hidden size of the model.
        kv_heads: Heads of keys and values.
        dim: Elements per head.
        sinks: Keeps the memory alive that ``run`` reads.
    """

    run: _native.LayerStep
    dtype: torch.dtype
    hidden_size: int
    kv_heads: int
    dim: int
    sinks: torch.Tensor | None


@dataclass(frozen=True)
class NativeStep:
    """A decoder layer for one token; ``forward.kept`` of a recognised layer.

    Attributes:
        parts: What it is made from.
        step: Its native part.
        decode: Computes the layer; REQUIRES: :meth:`takes`, and the token attends to all keys of the cache.
            Its result is ``None``, without any change, if the layer of the cache does not take the token.
    """

    parts: LayerParts
    step: _Step
    decode: Decode

    def takes(self, hidden: torch.Tensor, angles: Any) -> bool:
        """Whether hidden states and (cosines, sines) are those of one token, as the step reads them."""
        if type(angles) is not tuple or len(angles) != 2:
            return False
        cos, sin = angles
        return bool(
            hidden.dtype is cos.dtype is sin.dtype is self.step.dtype
            and hidden.shape == (1, 1, self.step.hidden_size)
            and cos.shape == sin.shape == (1, 1, self.parts.angles)
            and hidden.is_contiguous()
            and hidden.is_cpu
            and cos.is_contiguous()
            and sin.is_contiguous()
        )


def _step(parts: LayerParts) -> _Step | None:
    attention = parts.attention
    products = native_products(getattr(attention, name, None) for name in PROJECTIONS)
    norms = [getattr(attention, name, None) for name in HEAD_NORMS]
    head_norms = [native_part(norm) for norm in norms]
    weight = parts.before.weight
    assert isinstance(weight, torch.Tensor)
    dtype, hidden_size = weight.dtype, weight.shape[0]
    scaling = getattr(attention, "scaling", None)
    if products is None or dtype not in ELEMENTS or type(scaling) is not float:
        return None
    if type(getattr(attention, "layer_idx", None)) is not int:
        return None
    if any(norms) and not all(isinstance(norm, _native.RmsNorm) for norm in head_norms):
        return None
    if not parts.plain_attention():
        return None
    dim = attention.head_dim
    heads, kv_heads = attention.q_proj.out_features // dim, attention.k_proj.out_features // dim
    if not kv_heads or heads % kv_heads:
        return None
    sinks = attention._parameters.get("sinks")
    if sinks is not None:
        sinks = sinks.detach().float().contiguous()
    kind = ELEMENTS[dtype]
    at = 0 if sinks is None else sinks.data_ptr()
    query, key, value, output = products
    run = _native.LayerStep(
        kind,
        native_part(parts.before),
        query,
        key,
        value,
        output,
        (head_norms[0], head_norms[1]) if norms[0] is not None else None,
        _native.Attention(kind, kv_heads, heads // kv_heads, dim, 0, dim, scaling, at),
        parts.angles,
        parts.width,
        native_part(parts.after),
        native_part(parts.router),
    )
    return _Step(run, dtype, hidden_size, kv_heads, dim, sinks)


def _forward(layer: Any, parts: LayerParts) -> Forward | None:
    step = _step(parts)
    if step is None:
        return None
    own, index, hooks = layer.forward, parts.attention.layer_idx, parts.hooks()
    native = NativeStep(parts, step, _decode(parts, step))

    def forward(hidden_states: torch.Tensor, *rest: Any, **named: Any) -> Any:
        cache: Any = named.get("past_key_values")
        angles: Any = named.get("position_embeddings")
        out = None
        if (
            hides_nothing(named.get("attention_mask"))
            and type(cache) is DynamicCache
            and index < len(cache.layers)
            and not rest
            and not any(hooks)
            and only_known_arguments(named)
            and native.takes(hidden_states, angles)
        ):
            out = native.decode(hidden_states, cache.layers[index], *angles)
        return own(hidden_states, *rest, **named) if out is None else out

    forward.__dict__["kept"] = native
    return forward


def _decode(parts: LayerParts, step: _Step) -> Decode:
    """See :attr:`NativeStep.decode`."""
    # Called once per layer and decoded token; closure variables are faster than attributes.
    route, normalise, add = step.run.route, step.run.normalise, step.run.add
    dtype, hidden_size, kv_heads, dim = step.dtype, step.hidden_size, step.kv_heads, step.dim
    mlp, experts = parts.mlp, parts.experts
    chosen = 0 if parts.router is None else vars(parts.router)["forward"].chosen
    empty = torch.empty
    # Inputs of the experts, overwritten for each token. Inference tensors could not be used in other passes.
    with torch.inference_mode(False):
        x = empty((1, hidden_size), dtype=torch.float32)
        top_k_index = empty((1, chosen), dtype=torch.int64)
        top_k_weights = empty((1, chosen), dtype=torch.float32)
    chosen_at = (x.data_ptr(), top_k_index.data_ptr(), top_k_weights.data_ptr())

    def decode(hidden: torch.Tensor, slot: Any, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        if type(slot) not in (ReservedLayer, WindowLayer):
            return None
        place: AppendPlace | None = slot.append_place(kv_heads, dim, dtype)
        if place is None:
            return None
        residual = empty((1, 1, hidden_size), dtype=dtype)
        at = (hidden.data_ptr(), cos.data_ptr(), sin.data_ptr(), *place, residual.data_ptr())
        if experts is None:
            normed = empty((1, 1, hidden_size), dtype=dtype)
            normalise(*at, normed.data_ptr())
            out = mlp(normed)
            return residual + (out[0] if isinstance(out, tuple) else out)
        route(*at, *chosen_at)
        summed = vars(experts)[EXPERTS_RUNNER].forward(x, top_k_index, top_k_weights)
        add(summed.data_ptr(), residual.data_ptr())
        return residual

    return decode
