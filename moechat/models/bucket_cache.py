"""Attention cache for a pass that is captured once (CUDA graph) and replayed for every token.

Shapes and addresses do not depend on the number of tokens; only the contents of tensors do. Keys and values
are the first ``bucket`` slots of the reserved memory, and the slot of the new token is read from a tensor.
transformers makes the masks from the same tensors, as for its own ``StaticCache``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from moechat.models.cache_memory import Place


class BucketLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One layer.

    Slots after the token are masked and hold finite numbers (:meth:`LayerMemory.take`).

    Args:
        place: The memory; its ``slot`` is unused.
        bucket: Number of slots that attention sees.
        position: int64 scalar: number of tokens before this one.
        slot: int64 scalar: slot of the token. Masks depend only on differences of positions, so a window may
            count slots instead.
        sliding: Whether the layer has a sliding window mask.
    """

    is_compileable = True

    def __init__(
        self, place: Place, bucket: int, position: torch.Tensor, slot: torch.Tensor, *, sliding: bool
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._whole = place.keys, place.values
        self._seen = place.keys.narrow(-2, 0, bucket), place.values.narrow(-2, 0, bucket)
        self.keys, self.values = self._seen
        self.position, self.slot = position, slot
        self.bucket = bucket
        self.is_sliding = sliding
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing: the memory exists already."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write one token; returns the keys ``[1, heads, bucket, dim]`` and the values."""
        for tensor, states in zip(self._whole, (key_states, value_states), strict=True):
            tensor.index_copy_(2, self.slot.view(1), states)
        return self._seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Number of slots, and the first one's index."""
        return self.bucket, 0

    def get_seq_length(self) -> torch.Tensor:  # type: ignore[override]
        """Number of tokens before this one; a tensor, as in transformers' ``StaticLayer``."""
        return self.position

    def get_max_length(self) -> int:
        """Number of slots."""
        return self.bucket


class BucketCache(Cache):
    """The layers of a model."""

    def __init__(self, layers: Sequence[BucketLayer]) -> None:
        super().__init__(layers=list(layers))
        self._slots = [layer.slot for layer in layers]

    def get_query_offset(self, layer_idx: int = 0) -> torch.Tensor:  # type: ignore[override]
        """The slot of the token, from which the layer's mask counts."""
        return self._slots[layer_idx]
