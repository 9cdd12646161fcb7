"""Memory that successive attention caches reuse, so that its addresses stay the same."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from transformers import cache_utils

from moechat.models.packed_rows import ROW_TYPE, row_bytes
from moechat.models.state_layer import StateMemory

# Takes the place of a decoder layer without attention or states, and holds nothing; older versions of
# transformers do not have it.
EMPTY: tuple[type, ...] = (cache_utils.DummyLayer,) if hasattr(cache_utils, "DummyLayer") else ()


class Place(NamedTuple):
    """Memory for the next token of a layer.

    Attributes:
        keys: All reserved memory of the layer's keys, ``[1, heads, slots, dim]``, or packed rows.
        values: All reserved memory of its values.
        slot: The token's slot; it attends to the slots before.
    """

    keys: torch.Tensor
    values: torch.Tensor
    slot: int


class LayerMemory:
    """Memory of one layer, with one user at a time."""

    def __init__(self) -> None:
        self._tensors: tuple[torch.Tensor, torch.Tensor] | None = None

    def take(
        self, key_states: torch.Tensor, value_states: torch.Tensor, slots: int, *, packed: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``[..., slots, row]`` tensors for keys and values, uninitialised; the last memory again if it fits.

        Args:
            key_states: ``[..., tokens, dim]``; gives shape, type and device of the keys.
            value_states: The same for the values.
            slots: Capacity in tokens.
            packed: For packed rows.
        """
        both = (key_states, value_states)
        dtypes = [ROW_TYPE if packed else states.dtype for states in both]
        shapes = [
            (*states.shape[:-2], slots, row_bytes(states.shape[-1]) if packed else states.shape[-1])
            for states in both
        ]
        if self._tensors is not None and all(
            tensor.shape == shape and tensor.dtype is dtype and tensor.device == states.device
            for tensor, shape, dtype, states in zip(self._tensors, shapes, dtypes, both, strict=True)
        ):
            return self._tensors
        self._tensors = None  # free the old memory first
        keys, values = (
            states.new_empty(shape, dtype=dtype)
            for states, shape, dtype in zip(both, shapes, dtypes, strict=True)
        )
        self._tensors = keys, values
        return self._tensors


class CacheMemory:
    """Memory of all layers of a cache, lent to one cache at a time.

    Invariant: at most one living cache uses it.
    """

    def __init__(self) -> None:
        self._layers: dict[int, LayerMemory | StateMemory] = {}
        self._borrower: Callable[[], Any] = lambda: None

    def lend(self, cache: Any) -> bool:
        """Lend the memory to a cache, if possible.

        Args:
            cache: A cache whose layers all have a ``memory`` of their ``memory_type``, or hold nothing.

        Returns:
            Whether the cache has the memory. ``False`` if it holds tokens already, has other layers, or the
            previous cache is still alive.
        """
        borrower = self._borrower()
        if borrower is not None:
            return borrower is cache
        layers = {
            number: layer
            for number, layer in enumerate(getattr(cache, "layers", None) or [])
            if type(layer) not in EMPTY
        }
        if not layers or not all(hasattr(layer, "memory_type") for layer in layers.values()):
            return False
        if any(layer.is_initialized for layer in layers.values()):
            return False
        for number, layer in layers.items():
            if type(self._layers.get(number)) is not layer.memory_type:
                self._layers[number] = layer.memory_type()
            layer.memory = self._layers[number]
        self._borrower = weakref.ref(cache)
        return True
