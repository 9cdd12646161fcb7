"""A layer of the attention cache that also holds the keys of an indexer, in memory reserved once.

Families with sparse attention (DeepSeek-V3.2, GLM-5) choose the tokens that a token attends to by an indexer,
which has one short key of its own for each token.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import DynamicIndexedLayer

from moechat.models.cache_layers import ReservedLayer
from moechat.models.lazy_memory import unwritten


class IndexedLayer(ReservedLayer):  # type: ignore[no-untyped-call]
    """Keys and values as in :class:`ReservedLayer`, and the keys of an indexer.

    Invariant: ``indexer_keys`` is a prefix of the reserved tensor. It may be longer than the keys after an
    interrupted pass; the tokens beyond them do not count.

    Args:
        capacity: Tokens to reserve; appending more costs a copy.

    Attributes:
        indexer_keys: ``[1, tokens, dim]``; ``None``: none yet, or the layer has no indexer of its own.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.indexer_keys: torch.Tensor | None = None
        self.indexer_position_ids: torch.Tensor | None = None  # read by transformers' own methods
        self.is_indexer_initialized = False
        self._indexer_memory: torch.Tensor | None = None

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        """Append keys ``[1, tokens, dim]`` of the indexer; returns all of them.

        The pass may have appended its keys and values before.
        """
        held = 0 if self.indexer_keys is None else min(self.indexer_keys.shape[1], self.get_seq_length())
        length = held + indexer_key_states.shape[1]
        if self._indexer_memory is None or length > self._indexer_memory.shape[1]:
            batch, _, dim = indexer_key_states.shape
            shape = (batch, max(length, self._capacity), dim)
            fresh = unwritten(shape, indexer_key_states.dtype, indexer_key_states.device)
            if self.indexer_keys is not None:
                fresh[:, :held] = self.indexer_keys[:, :held]
            self._indexer_memory = fresh
        self._indexer_memory[:, held:length] = indexer_key_states
        self.indexer_keys, self.is_indexer_initialized = self._indexer_memory[:, :length], True
        return self.indexer_keys

    def crop(self, tokens_to_remove: int) -> None:
        """As transformers' own layer."""
        super().crop(tokens_to_remove)
        if self.indexer_keys is not None:
            self.indexer_keys = self.indexer_keys[:, : self.get_seq_length()]

    def _move(self, held: int, capacity: int) -> None:
        super()._move(held, capacity)
        if self.indexer_keys is not None:
            old = self.indexer_keys
            self._indexer_memory = unwritten((old.shape[0], capacity, old.shape[2]), old.dtype, old.device)
            self._indexer_memory[:, :held] = old[:, :held]
            self.indexer_keys = self._indexer_memory[:, :held]

    def reset(self) -> None:
        """Forget all tokens; the reserved memory stays."""
        super().reset()
        self.indexer_keys, self.is_indexer_initialized = None, False

    def reorder_cache(self, beam_idx: Any) -> None:
        """Not supported: the cache holds one text."""
        raise NotImplementedError("the tokens of this layer belong to one text")


INDEXED = (DynamicIndexedLayer, IndexedLayer)
