"""Copies of what a layer of the attention cache overwrites, so that a cache can go back to an earlier token.

Keys and values of all tokens are cut back. States of linear attention and convolutions, and windows of keys
and values, change in place; going back to a token needs a copy that was taken there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.cache_utils import (
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

from moechat.models.cache_layers import ReservedLayer, WindowLayer
from moechat.models.cache_memory import EMPTY
from moechat.models.compressing_layer import (
    ENTRIES,
    compresses,
    copy_compressing,
    other_tensors,
    restore_compressing,
)
from moechat.models.indexed_layer import INDEXED
from moechat.models.state_layer import STATES, StateLayer

# States alone.
STATES_ALONE = (LinearAttentionLayer, StateLayer)
STATEFUL = (
    *STATES_ALONE,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
)
# Keys and values of all tokens, and no more than can be cut with them.
ALL_TOKENS = (DynamicLayer, ReservedLayer, *INDEXED)
_CUT = (*ALL_TOKENS, LinearAttentionAndFullAttentionLayer)
_WINDOWS = (DynamicSlidingWindowLayer, WindowLayer, LinearAttentionAndSlidingWindowAttentionLayer)
_KNOWN = {*STATEFUL, *_CUT, *_WINDOWS, *EMPTY}


def states_of(layer: Any, kind: str) -> list[torch.Tensor]:
    """The states of one of :data:`STATES`, or compressed keys, that a layer holds; none for other layers and
    names.
    """
    held = getattr(layer, kind, None) if kind in (*STATES, ENTRIES) else None
    return [state for state in held.values() if isinstance(state, torch.Tensor)] if held else []


def tensors_of(layer: Any) -> list[torch.Tensor]:
    """Keys, values, keys of an indexer, compressed keys, and states that a layer holds."""
    held = [getattr(layer, name, None) for name in ("keys", "values", "indexer_keys")]
    states = [state for kind in STATES for state in states_of(layer, kind)]
    if compresses(type(layer)):
        states += other_tensors(layer)
    return [rows for rows in held if isinstance(rows, torch.Tensor)] + states


def can_cut(cache: Any) -> bool:
    """Whether a cache can be cut back to any token: it holds keys and values of all tokens, and no more."""
    return type(cache) is DynamicCache and all(type(layer) in ALL_TOKENS for layer in cache.layers)


def can_copy(cache: Any) -> bool:
    """Whether a cache can go back to a token at which its layers were copied."""
    if type(cache) is not DynamicCache:
        return False
    return all(type(layer) in _KNOWN or compresses(type(layer)) for layer in cache.layers)


@dataclass(frozen=True)
class LayerCopy:
    """What one layer overwrites.

    Attributes:
        states: Copies of its states, by kind and number.
        window: Copies of keys and values in its window; ``None``: it has none.
        length: Number of tokens that its window has seen.
        compressing: Of a layer that compresses keys, everything.
    """

    states: dict[tuple[str, int], torch.Tensor]
    window: tuple[torch.Tensor, torch.Tensor] | None = None
    length: int = 0
    compressing: dict[str, Any] = field(default_factory=dict)


@torch.inference_mode()
def copy_layer(layer: Any) -> LayerCopy:
    """Copy what a layer overwrites. REQUIRES: :func:`can_copy`."""
    if compresses(type(layer)):
        return LayerCopy({}, compressing=copy_compressing(layer))
    states = {
        (kind, number): state.clone()
        for kind in STATES
        for number, state in (getattr(layer, kind, None) or {}).items()
        if isinstance(state, torch.Tensor)
    }
    if type(layer) not in _WINDOWS or layer.keys is None:
        return LayerCopy(states)
    return LayerCopy(states, (layer.keys.clone(), layer.values.clone()), layer.cumulative_length)


@torch.inference_mode()
def restore_layer(layer: Any, copy: LayerCopy, tokens: int) -> None:
    """Take a layer back to a copy.

    Args:
        layer: The layer that was copied, with at least the tokens of then.
        copy: From :func:`copy_layer`; stays usable.
        tokens: Number of tokens then.
    """
    if copy.compressing:
        restore_compressing(layer, copy.compressing)
        return
    for (kind, number), state in copy.states.items():
        getattr(layer, kind)[number].copy_(state)
    if type(layer) in STATEFUL and not copy.states:
        LinearAttentionLayer.reset(layer)
    if type(layer) in _WINDOWS:
        if type(layer) is WindowLayer:
            layer.leave_memory()
        layer.keys = layer.values = None
        if copy.window is not None:
            layer.keys, layer.values = (rows.clone() for rows in copy.window)
        layer.is_initialized, layer.cumulative_length = copy.window is not None, copy.length
    elif type(layer) in _CUT and layer.get_seq_length() > tokens:
        excess = layer.get_seq_length() - tokens
        if type(layer) in ALL_TOKENS:
            layer.crop(-excess)
        else:
            DynamicLayer.crop(layer, -excess)  # not that of its states


@dataclass
class CacheCopy:
    """A copy of what a whole cache overwrites at one token; complete when every layer is in it.

    Attributes:
        layers: Copies of the first layers, in order.
    """

    layers: list[LayerCopy] = field(default_factory=list)

    @classmethod
    def of(cls, cache: Any) -> CacheCopy:
        """Copy every layer. REQUIRES: :func:`can_copy`."""
        return cls([copy_layer(layer) for layer in cache.layers])

    def restore(self, cache: Any, tokens: int) -> None:
        """Take a cache back.

        Args:
            cache: The cache that was copied.
            tokens: Number of tokens that it held then.
        """
        for layer, copy in zip(cache.layers, self.layers, strict=True):
            restore_layer(layer, copy, tokens)
