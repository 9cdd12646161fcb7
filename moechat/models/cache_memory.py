"""Memory for keys and values that attention caches use after one another, so that its addresses stay."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch


class Place(NamedTuple):
    """Where the next token of a layer goes.

    Attributes:
        keys: All reserved memory of the layer's keys, ``[1, heads, slots, dim]``.
        values: The same of its values.
        slot: Where in it the token lies; what it sees lies in the slots before.
    """

    keys: torch.Tensor
    values: torch.Tensor
    slot: int


class LayerMemory:
    """Memory of one layer; whoever takes it is the only one to use it."""

    def __init__(self) -> None:
        self._tensors: tuple[torch.Tensor, torch.Tensor] | None = None

    def take(
        self, key_states: torch.Tensor, value_states: torch.Tensor, slots: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Zeros ``[..., slots, dim]``, for keys and for values: the memory of the last time if that fits.

        Zeros, since attention over masked slots multiplies what they hold by nothing: it must be finite.

        Args:
            key_states: ``[..., tokens, dim]``; shape, type and device of the keys.
            value_states: The same of the values.
            slots: Tokens to make room for.
        """
        both = (key_states, value_states)
        shapes = [(*states.shape[:-2], slots, states.shape[-1]) for states in both]
        if self._tensors is not None and all(
            tensor.shape == shape and tensor.dtype is states.dtype and tensor.device == states.device
            for tensor, shape, states in zip(self._tensors, shapes, both, strict=True)
        ):
            for tensor in self._tensors:
                tensor.zero_()
            return self._tensors
        self._tensors = None  # its memory goes before more is taken
        keys, values = (states.new_zeros(shape) for states, shape in zip(both, shapes, strict=True))
        self._tensors = keys, values
        return self._tensors


class CacheMemory:
    """Memory of all layers of a cache, lent to one cache at a time.

    Invariant: no more than one cache that anything refers to uses it.
    """

    def __init__(self) -> None:
        self._layers: list[LayerMemory] = []
        self._borrower: Callable[[], Any] = lambda: None

    def lend(self, cache: Any) -> bool:
        """Let a cache have its memory from here, if it can.

        Args:
            cache: Its layers are :class:`~moechat.models.attention_cache.ReservedLayer` or ``WindowLayer``.

        Returns:
            Whether it has it. A cache that holds tokens already gets none, nor one of other layers, nor any
            while the cache before is in use.
        """
        borrower = self._borrower()
        if borrower is not None:
            return borrower is cache
        layers = getattr(cache, "layers", None)
        if not layers or not all(hasattr(layer, "memory") for layer in layers):
            return False
        if any(layer.is_initialized for layer in layers):
            return False
        while len(self._layers) < len(layers):
            self._layers.append(LayerMemory())
        for layer, memory in zip(layers, self._layers, strict=False):
            layer.memory = memory
        self._borrower = weakref.ref(cache)
        return True
