"""Attention of recorded passes: our own kernels, in place of the attention functions of transformers.

While a pass is recorded, the model's configuration names this attention function, and its cache is a
:class:`~moechat.offload.replay_cache.ReplayCache`. The kernels read that cache in place, so no masks are
made. The model's own passes keep the function that it was loaded with, and replays are compared with them.

Anything that the kernels do not compute raises :class:`NotSupportedError`, and the model is decoded without
graphs: a mask other than causal or the layer's window, keys that are not those of the cache, further
arguments.

Latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1) is computed from the latents, which are not
expanded to keys and values of all heads: see :mod:`moechat.models.decode.latent`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from moechat.models.decode.attention import registered, without_effect
from moechat.models.decode.install import compares_attention_name
from moechat.models.decode.latent import Latent, recognise_latent
from moechat.offload.kernels.attention import MOST_TOKENS, AttentionShape, CacheAttention
from moechat.offload.replay_cache import ReplayCache, ReplayLayer

NAME = "moechat-replay"
_OURS = frozenset({"scaling", "softcap", "s_aux"})


class NotSupportedError(Exception):
    """The kernels do not compute the attention of this model."""


class ReplayAttention:
    """Makes a model attend by our kernels.

    Args:
        model: The model, on the GPU.
    """

    def __init__(self, model: nn.Module) -> None:
        AttentionInterface.register(NAME, _attention)
        AttentionMaskInterface.register(NAME, _no_mask)
        self._model: Any = model
        self._latent: dict[nn.Module, Latent] = {}
        for module in model.modules():
            latent = recognise_latent(module)
            if latent is not None:
                self._latent[module] = latent

    @contextmanager
    def over(self, cache: ReplayCache) -> Iterator[None]:
        """Compute passes in the block by the kernels, over ``cache``.

        Raises:
            NotSupportedError: The model's attention functions cannot be replaced.
        """
        config = self._model.config
        before = config._attn_implementation
        if registered(before) is None:
            raise NotSupportedError(f"its attention function {before!r} has no replacement")
        if compares_attention_name(self._model):
            raise NotSupportedError("it computes something else with another attention function")
        token = _ACTIVE.set(_Active(cache, self._latent))
        try:
            config._attn_implementation = NAME
            for module in self._latent:
                module.__dict__["expand_kv"] = lambda kept, rotated: (kept, rotated)
            yield
        finally:
            for module in self._latent:
                module.__dict__.pop("expand_kv", None)
            config._attn_implementation = before
            _ACTIVE.reset(token)


class _Active:
    """The cache of the pass that is recorded."""

    def __init__(self, cache: ReplayCache, latent: dict[nn.Module, Latent]) -> None:
        self.layers = list(cache.replayed.values())
        self.latent = latent

    def layer(self, key: torch.Tensor, value: torch.Tensor) -> ReplayLayer:
        """The layer whose keys and values these are.

        Raises:
            NotSupportedError: There is none.
        """
        for layer in self.layers:
            if layer.keys is key and layer.values is value:
                return layer
        raise NotSupportedError("its attention changes keys or values of the cache before it uses them")


@dataclass(frozen=True)
class _OtherMask:
    """Stands for a mask that the kernels do not know."""

    reason: str


_ACTIVE: ContextVar[_Active] = ContextVar("replay")


def _no_mask(
    *,
    q_length: int,
    attention_mask: torch.Tensor | None = None,
    allow_is_causal_skip: bool = True,
    local_size: int | None = None,
    config: Any = None,
    **_: Any,
) -> _OtherMask | None:
    """No mask, if it would say what the kernels assume: see transformers' mask functions for the arguments.

    Otherwise an object in its place, which attention refuses: families also make masks that no layer uses.
    """
    layers = _ACTIVE.get().layers
    if attention_mask is not None or not allow_is_causal_skip or q_length > MOST_TOKENS:
        return _OtherMask("its attention has a mask of its own")
    if local_size is None:
        return None
    if getattr(config, "attention_chunk_size", None) is not None:
        return _OtherMask("its attention is chunked")
    windows = {layer.window for layer in layers if layer.window}
    # Without layers that have a window, no token is further away than the memory has slots.
    if windows - {local_size} or (not windows and local_size < max(layer.slots for layer in layers)):
        return _OtherMask(f"its window of {local_size} tokens is not that of its cache")
    return None


def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | _OtherMask | None,
    **named: Any,
) -> tuple[torch.Tensor, None]:
    """An attention function of transformers: ``[1, tokens, heads, value_dim]``, and no weights."""
    active = _ACTIVE.get()
    layer = active.layer(key, value)
    if attention_mask is not None:
        if isinstance(attention_mask, _OtherMask):
            raise NotSupportedError(attention_mask.reason)
        raise NotSupportedError("its attention has a mask of its own")
    unknown = [name for name, given in named.items() if name not in _OURS and not without_effect(name, given)]
    if unknown:
        raise NotSupportedError(f"its attention takes {', '.join(sorted(unknown))}")
    batch, heads, tokens, dim = query.shape
    if batch != 1 or tokens > MOST_TOKENS or heads % key.shape[1]:
        raise NotSupportedError(f"queries {tuple(query.shape)} for {key.shape[1]} heads of keys")
    scaling, latent = named.get("scaling"), active.latent.get(module)
    numbers: dict[str, Any] = {
        "scaling": dim**-0.5 if scaling is None else float(scaling),
        "softcap": named.get("softcap"),
        "sinks": named.get("s_aux"),
    }
    shape = AttentionShape(
        kv_heads=key.shape[1],
        group=heads // key.shape[1],
        key_dim=layer.key_dim,
        value_dim=layer.value_dim if latent is None else layer.key_dim,
        dtype=query.dtype,
        tail_dim=0 if latent is None else layer.value_dim,
        shared=latent is not None,
        packed=layer.packed,
        window=layer.window,
    )
    if shape.key_dim + shape.tail_dim != (dim if latent is None else latent.rank + latent.rotated):
        raise NotSupportedError(f"queries of {dim} elements for keys of {shape.key_dim + shape.tail_dim}")
    kernels = CacheAttention(shape)
    if latent is None:
        return kernels.attend(query, key, value, layer.numbers, layer.ordinal, **numbers), None
    sums = kernels.attend(
        latent.to_latents(query), key, key, layer.numbers, layer.ordinal, tails=value, **numbers
    )
    return latent.to_values(sums), None
