"""The attention cache as a pass sees it that is recorded once and replayed for every token.

Nothing in it depends on how many tokens there are but the contents of tensors: keys and values are the first
slots of the reserved memory, as many as the bucket has, and where the new token goes is read from a tensor.
transformers makes the masks from the same tensors, as it does for its own ``StaticCache``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from moechat.models.cache_memory import Place


class BucketLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One layer.

    Slots after the token are masked, and hold finite numbers (:meth:`LayerMemory.take`).

    Args:
        place: The memory; its ``slot`` is not looked at.
        bucket: Slots that attention sees.
        position: int64, no dimension: tokens before this one.
        slot: int64, no dimension: where the token goes. A mask depends on differences of positions alone, so
            that a window may count in slots.
        sliding: Whether the mask is that of a window.
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
        """The memory is there."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write one token; returns the keys ``[1, heads, bucket, dim]`` and the values."""
        for tensor, states in zip(self._whole, (key_states, value_states), strict=True):
            tensor.index_copy_(2, self.slot.view(1), states)
        return self._seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Slots, and which is the first."""
        return self.bucket, 0

    def get_seq_length(self) -> torch.Tensor:  # type: ignore[override]
        """Tokens before this one; a tensor, as of transformers' ``StaticLayer``."""
        return self.position

    def get_max_length(self) -> int:
        """Slots."""
        return self.bucket


class BucketCache(Cache):
    """All layers."""

    def __init__(self, layers: Sequence[BucketLayer]) -> None:
        super().__init__(layers=list(layers))
        self._slots = [layer.slot for layer in layers]

    def get_query_offset(self, layer_idx: int = 0) -> torch.Tensor:  # type: ignore[override]
        """The slot of the token, which is what the mask of the layer counts from."""
        return self._slots[layer_idx]
