"""Attention cache of a pass that is recorded once (CUDA graph) and replayed for every token.

Its layers are the reserved memory of a real cache. Shapes and addresses do not depend on the number of
tokens; the kernels read that, and the slots of the new tokens, from the GPU's memory. States are the tensors
of the real cache, so every replay overwrites them.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from moechat.models.cache_layers import WindowLayer
from moechat.models.cache_memory import EMPTY, Place
from moechat.models.state_layer import StateLayer
from moechat.offload.kernels.attention import append
from moechat.offload.next_token import NextToken


class ReplayLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One layer.

    Args:
        place: The memory; its ``slot`` is unused.
        numbers: int64 ``[1 + layers]``: tokens before the new ones, then the slot of the first new token in
            each layer.
        ordinal: Number of the layer in ``numbers``.
        window: Tokens that a token attends to, itself included; 0: all.
        packed: The memory holds packed rows.

    Attributes:
        key_dim: Elements of a key, from the first :meth:`update` on.
        value_dim: Elements of a value.
    """

    key_dim = value_dim = 0

    def __init__(
        self, place: Place, numbers: torch.Tensor, ordinal: int, *, window: int, packed: bool
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.keys, self.values = place.keys, place.values
        self.slots = place.keys.shape[-2]
        self.numbers, self.ordinal = numbers, ordinal
        self.window, self.packed = window, packed
        self.is_sliding = bool(window)
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing: the memory exists already."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the new tokens; returns all reserved keys and values, ``[1, heads, slots, row]``."""
        assert self.keys is not None
        assert self.values is not None
        self.key_dim, self.value_dim = key_states.shape[-1], value_states.shape[-1]
        append(key_states, value_states, self.keys, self.values, self.numbers, self.ordinal)
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Number of slots, and the first one's index; no mask is made from them."""
        return self.slots, 0

    def get_seq_length(self) -> torch.Tensor:  # type: ignore[override]
        """Number of tokens before the new ones; a tensor, as in transformers' ``StaticLayer``."""
        return self.numbers[0]

    def get_max_length(self) -> int:
        """Number of slots."""
        return self.slots


class ReplayCache(Cache):
    """The layers of a model.

    Args:
        token: The memory of a real cache.
        numbers: See :class:`ReplayLayer`; the layers are those with keys and values.

    Attributes:
        replayed: The layers with keys and values, by their place in the cache.
    """

    def __init__(self, token: NextToken, numbers: torch.Tensor) -> None:
        self.replayed: dict[int, ReplayLayer] = {}
        self._states: dict[int, tuple[StateLayer, StateLayer]] = {}
        layers = list(token.layers)
        for number, layer in enumerate(token.layers):
            if isinstance(layer, StateLayer):
                self._states[number] = layer.sharing(), layer.sharing()
                layers[number] = self._states[number][1]
            elif type(layer) not in EMPTY:
                ordinal = len(self.replayed)
                layers[number] = self.replayed[number] = ReplayLayer(
                    token.places[ordinal],
                    numbers,
                    ordinal,
                    window=layer.sliding_window if isinstance(layer, WindowLayer) else 0,
                    packed=layer.packed,
                )
        super().__init__(layers=layers)
        self._position = numbers[0]

    def get_query_offset(self, layer_idx: int = 0) -> torch.Tensor:  # type: ignore[override]
        """Number of tokens before the new ones."""
        return self._position

    def require_states_in_place(self) -> None:
        """Compare the layers after a pass.

        Raises:
            RuntimeError: The pass has put states elsewhere, where no replay would find them.
        """
        for number, (before, after) in self._states.items():
            if not before.shares(after):
                raise RuntimeError(f"the states of layer {number} do not stay where they are")
