"""Where the next token of an attention cache goes, for replays of recorded passes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from moechat.models.cache_layers import ReservedLayer, WindowLayer
from moechat.models.cache_memory import EMPTY, Place
from moechat.models.state_layer import StateLayer


@dataclass(frozen=True)
class NextToken:
    """The memory that a token reads and writes.

    Attributes:
        layers: All layers of the cache.
        position: Number of tokens before it.
        attending: Layers of keys and values.
        places: Their memory and slots.
        states: Layers of states, which a token overwrites.
    """

    layers: Sequence[Any]
    position: int
    attending: Sequence[ReservedLayer | WindowLayer]
    places: Sequence[Place]
    states: Sequence[StateLayer]

    @classmethod
    def of(cls, cache: Any) -> NextToken | None:
        """The place of the next token; ``None``: replays do not support this cache, or no token is there."""
        layers = cache.layers
        states = [layer for layer in layers if isinstance(layer, StateLayer)]
        attending = [layer for layer in layers if not isinstance(layer, (StateLayer, *EMPTY))]
        # A layer of states may hold none: older versions of transformers create one for each layer without
        # attention. Should a pass create states after all, it is not recorded.
        if not attending or any(layer.record_past for layer in states):
            return None
        position = attending[0].get_seq_length()
        if any(layer.get_seq_length() != position for layer in attending):
            return None
        places = [place for layer in attending if (place := layer.next_place()) is not None]
        if len(places) < len(attending):
            return None
        return cls(layers, position, attending, places, states)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All states."""
        return [tensor for layer in self.states for tensor in layer.tensors()]

    def addresses(self) -> tuple[int, ...]:
        """Of the memory, and its slots."""
        kept = [
            number
            for keys, values, _ in self.places
            for number in (keys.data_ptr(), values.data_ptr(), keys.shape[-2])
        ]
        return (*kept, *(tensor.data_ptr() for tensor in self.tensors))

    def numbers(self) -> list[int]:
        """What recorded passes read: the position, and the slot in each layer of keys and values."""
        return [self.position, *(place.slot for place in self.places)]

    def advance(self) -> None:
        """Count the token, which is written."""
        for layer in self.attending:
            layer.advance()

    def copies(self) -> list[torch.Tensor]:
        """Copies of all states."""
        return [tensor.clone() for tensor in self.tensors]

    def copies_or_none(self) -> list[torch.Tensor] | None:
        """The same; ``None``: a GPU's memory does not suffice."""
        try:
            return self.copies()
        except torch.OutOfMemoryError:
            return None

    def restore(self, copies: Sequence[torch.Tensor]) -> None:
        """Take the states back to copies."""
        for tensor, copy in zip(self.tensors, copies, strict=True):
            tensor.copy_(copy)

    @contextmanager
    def states_kept(self) -> Iterator[None]:
        """Restore the states after the block, which computes the token for another purpose."""
        before = self.copies()
        try:
            yield
        finally:
            self.restore(before)
