"""The attention cache of a model: its size, its growth, and whether prompts may be computed in parts."""

from __future__ import annotations

import math
from copy import copy, deepcopy
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import (
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
)

from moechat.errors import UnsupportedModelError
from moechat.geometry import PACKED_KV_BITS, PLAIN_KV_BITS
from moechat.models.cache_argument import cache_of
from moechat.models.cache_layers import ReservedLayer, WindowLayer
from moechat.models.cache_memory import EMPTY
from moechat.models.cache_states import STATEFUL, can_cut
from moechat.models.compressing_layer import compact, compresses, entry_bytes, waiting_bytes
from moechat.models.indexed_layer import INDEXED, IndexedLayer
from moechat.models.light_meta import light_meta
from moechat.models.packed_rows import row_bytes
from moechat.models.rotary_scaling import part_limit, without_scaling
from moechat.models.skeleton import decoder_of
from moechat.models.state_layer import StateLayer
from moechat.models.state_probe import states_carry
from moechat.sizes.cache_shape import PREFILL_CHUNK, CacheShape
from moechat.sizes.layer_configs import layer_configs

# Layers of keys and values alone, and those for which appending several tokens has the same result as one
# pass.
_KEYS_AND_VALUES = (DynamicLayer, DynamicSlidingWindowLayer)
_APPENDABLE = (*_KEYS_AND_VALUES, *INDEXED)
# Layers over which graphs can replay tokens, in the form that :func:`_reserving` gives them.
_REPLAYED = (*_KEYS_AND_VALUES, LinearAttentionLayer, *EMPTY)
# Layers that take tokens without a copy in the form that :func:`_reserving` gives them.
_RESERVED = (DynamicLayer, *INDEXED)
# Tokens of the trial pass. No other dimension of a cache has this size, so it identifies the token axis.
_TRIAL = 1009


def new_cache(shape: CacheShape, config: Any, capacity: int) -> Any:
    """Create a cache for ``capacity`` tokens; ``None`` if the model has to create its own.

    Args:
        shape: Of the model's cache.
        config: Its configuration.
        capacity: Most tokens.
    """
    if not shape.reserved:
        return None
    cache = DynamicCache(config=config.get_text_config())
    packed = shape.bits == PACKED_KV_BITS
    cache.layers = [_reserving(layer, capacity, packed=packed) for layer in cache.layers]
    return cache


@torch.inference_mode()
def reserve_tokens(cache: Any, capacity: int) -> None:
    """Reserve memory for more tokens in a cache of :func:`new_cache`, which keeps those that it holds."""
    for layer in cache.layers:
        if isinstance(layer, ReservedLayer):
            layer.reserve(capacity)


def keep_first(cache: Any, tokens: int) -> None:
    """Cut the layers of a cache that hold more than so many tokens."""
    for layer in cache.layers:
        excess = layer.get_seq_length() - tokens
        if excess > 0:
            layer.crop(-excess)


@torch.inference_mode()
def copy_cache(cache: Any, tokens: int, capacity: int) -> Any:
    """A copy of a cache of :func:`new_cache`: the first ``tokens`` tokens of its reserved layers, and others.

    Args:
        cache: The cache, with at least so many tokens.
        tokens: Of the copy.
        capacity: Tokens that it reserves.
    """
    twin = copy(cache)
    twin.layers = [
        layer.copy_of(tokens, capacity) if isinstance(layer, ReservedLayer) else deepcopy(layer)
        for layer in cache.layers
    ]
    return twin


def _reserving(layer: Any, capacity: int, *, packed: bool) -> Any:
    if type(layer) is DynamicLayer:
        return ReservedLayer(capacity, packed=packed)
    if type(layer) is DynamicSlidingWindowLayer:
        return WindowLayer(layer.sliding_window, min(PREFILL_CHUNK, capacity), packed=packed)
    if type(layer) is LinearAttentionLayer:
        return StateLayer(layer.number_of_states)
    if compresses(type(layer)):
        compact(layer)
    return IndexedLayer(capacity) if type(layer) in INDEXED else layer


def cache_lengths(cache: Any) -> list[int] | None:
    """Number of tokens in each layer of a cache; ``None`` if its layers do not tell."""
    if cache is None:
        return []
    try:
        return [int(layer.get_seq_length()) for layer in cache.layers]
    except (AttributeError, TypeError):
        return None


def restore_lengths(cache: Any, held: list[int] | None) -> bool:
    """Remove the tokens that an interrupted pass has appended.

    Args:
        cache: Cache of the pass.
        held: Result of :func:`cache_lengths` before the pass.

    Returns:
        Whether the cache is restored; a window that has moved cannot be.
    """
    now = cache_lengths(cache)
    if held is None or now is None or len(now) < len(held):
        return False
    excess = [after - before for before, after in zip(held + [0] * (len(now) - len(held)), now, strict=True)]
    if any(excess) and not can_cut(cache):
        return False
    for layer, tail in zip(cache.layers if cache is not None else [], excess, strict=True):
        if tail > 0:
            layer.crop(-tail)
    return True


def cache_shape(
    model: nn.Module, config: Any, dtype: torch.dtype, *, bits: int = PLAIN_KV_BITS
) -> CacheShape:
    """Determine the cache of a model by a pass on the meta device, without memory or computation.

    Args:
        model: The whole model on the meta device; its experts return tensors like their inputs.
        config: Its configuration.
        dtype: Type of keys and values, used by the formula if no trial pass is possible.
        bits: Of keys and values: 16, those of their type, or 8: packed.

    Raises:
        UnsupportedModelError: The cache cannot be packed.
    """
    text = config.get_text_config()
    try:
        cache = _trial(model)
        found = [type(layer) for layer in cache.layers]
        plain = type(cache) is DynamicCache and found == [
            type(layer) for layer in DynamicCache(config=text).layers
        ]
    except Exception:  # some families need tensor values, which meta tensors do not have
        if bits == PACKED_KV_BITS:
            raise _not_packed(config, "its size is not known before the model is loaded") from None
        return _from_config(text, dtype)
    if bits == PACKED_KV_BITS:
        _require_packable(config, cache, found, plain=plain)
    fixed = sum(tensor.nbytes for tensor in _tensors(cache))
    growing: list[tuple[int, int | None]] = []
    copied: list[tuple[int, int | None]] = []
    unpacked: list[tuple[int, int | None]] = []
    for layer in cache.layers:
        most = layer.sliding_window if getattr(layer, "is_sliding", False) else None
        packs = bits == PACKED_KV_BITS and type(layer) in _KEYS_AND_VALUES
        grows = whole = 0
        if compresses(type(layer)):
            fixed += waiting_bytes(layer)
            growing.append((entry_bytes(layer), None))
            copied.append(growing[-1])
        for tensor in [layer.keys] if compresses(type(layer)) else _tensors(layer):
            if most is None and _TRIAL not in tensor.shape:
                fixed += tensor.nbytes
                continue
            each = tensor.nbytes // (_TRIAL if _TRIAL in tensor.shape else tensor.shape[-2])
            whole += each
            dim = tensor.shape[-1]
            grows += each // (dim * tensor.itemsize) * row_bytes(dim) if packs else each
        if grows:
            # A window is a view of the tensor created by the previous pass.
            growing.append((grows, None if most is None else most - 1 + PREFILL_CHUNK))
            if most is not None or not (plain and type(layer) in _RESERVED):
                copied.append(growing[-1])
            if packs:
                unpacked.append((whole, growing[-1][1]))
    reason = _refused_layers(cache, found, plain=plain) or _refused_states(config, found)
    appendable = 0
    if not reason:
        appendable, reason = part_limit(model, config)
    has_states = any(map(_has_states, found))
    windows = sum(each * (most - PREFILL_CHUNK) for each, most in growing if most is not None)
    return CacheShape(
        True,
        plain,
        appendable,
        fixed,
        tuple(growing),
        tuple(copied),
        tuple(unpacked),
        bits,
        has_states=has_states,
        replays=all(kind in _REPLAYED for kind in found) and any(kind in _KEYS_AND_VALUES for kind in found),
        state_bytes=(fixed if has_states else 0) + windows,
        in_one_pass=reason,
    )


def _refused_layers(cache: Any, found: list[type], *, plain: bool) -> str:
    """Why a prompt may not be computed in parts with a cache of these layers; empty: nothing is known."""
    if type(cache) is not DynamicCache:
        return f"its attention cache is a {type(cache).__name__}"
    known = (*_APPENDABLE, *STATEFUL, *EMPTY)
    others = sorted({kind.__name__ for kind in found if kind not in known and not compresses(kind)})
    if others:
        return f"its attention cache has layers of type {', '.join(others)}"
    return "" if plain else "its attention cache has other layers than its configuration names"


def _has_states(kind: type) -> bool:
    return kind in STATEFUL or compresses(kind)


def _refused_states(config: Any, found: list[type]) -> str:
    return states_carry(config).reason if any(map(_has_states, found)) else ""


def _require_packable(config: Any, cache: Any, found: list[type], *, plain: bool) -> None:
    """Refuse a cache with anything that grows besides keys and values.

    States, which do not grow, stay as they are.
    """
    if type(cache) is not DynamicCache:
        raise _not_packed(config, f"it is a {type(cache).__name__}, not layers of keys and values")
    others = {
        type(layer).__name__
        for layer in cache.layers
        if type(layer) not in _KEYS_AND_VALUES and any(_TRIAL in tensor.shape for tensor in _tensors(layer))
    }
    if others:
        raise _not_packed(config, f"its layers of type {', '.join(sorted(others))} hold other things besides")
    if not plain:
        raise _not_packed(config, "its layers are not those that transformers' configuration names")
    if not any(kind in _KEYS_AND_VALUES for kind in found):
        raise _not_packed(config, "no layer of it holds keys and values of all tokens")


def _not_packed(config: Any, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"keys and values of a {config.model_type} model cannot be kept in 8 bits: {reason}",
        hint="keep its attention cache in the type of the model: --kv-bits 16 (kv_bits=16)",
    )


def _trial(model: nn.Module) -> Any:
    """The cache after a pass of :data:`_TRIAL` tokens on the meta device."""
    with light_meta(), without_scaling(model), torch.inference_mode():
        ids = torch.zeros((1, _TRIAL), dtype=torch.int64, device="meta")
        return cache_of(decoder_of(model)(input_ids=ids, use_cache=True))


def _tensors(holder: Any) -> list[torch.Tensor]:
    """Tensors of at least two dimensions that a cache or a layer holds on the meta device."""
    found: list[torch.Tensor] = []
    for value in vars(holder).values():
        values = value.values() if isinstance(value, dict) else value if isinstance(value, list) else [value]
        found += [
            item for item in values if isinstance(item, torch.Tensor) and item.is_meta and item.ndim > 1
        ]
    return found


def _from_config(text: Any, dtype: torch.dtype) -> CacheShape:
    """Upper bound: keys and values of every head in every layer, and a state per head."""
    growing, state = [], 0
    for layer in layer_configs(text):
        heads = int(layer.num_attention_heads)
        head = getattr(layer, "head_dim", None) or math.ceil(int(layer.hidden_size) / heads)
        kv_heads = getattr(layer, "num_key_value_heads", None) or heads
        growing.append(2 * int(kv_heads) * int(head) * dtype.itemsize)
        # Linear attention has one state matrix per head.
        state += heads * max(int(head), 128) ** 2 * torch.float32.itemsize
    reason = "its attention cache is not known before it is loaded"
    return CacheShape(
        False, False, 0, state, ((sum(growing), None),), ((max(growing), None),), in_one_pass=reason
    )
