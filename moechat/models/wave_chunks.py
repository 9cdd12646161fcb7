"""The chunks of a prompt that go through a model in waves; see :mod:`moechat.models.waves`."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import (
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

from moechat.models.cache_layers import WindowLayer
from moechat.models.cache_memory import EMPTY
from moechat.models.cache_states import ALL_TOKENS, STATES_ALONE
from moechat.models.compressing_layer import compresses

_WINDOWS = (DynamicSlidingWindowLayer, WindowLayer)


class NotInWavesError(Exception):
    """The model does something that waves do not reproduce."""


@dataclass(frozen=True)
class HandedOn:
    """Stands for a result of a layer, before it is computed.

    Attributes:
        layer: Number of the layer.
        place: Place in what it returns; 0 are the hidden states.
    """

    layer: int
    place: int


@dataclass
class Chunk:
    """One chunk of a wave.

    Attributes:
        ids: int64 ``[1, tokens]``.
        begin: Number of its first token in the wave.
        ahead: See :func:`cache_ahead`; as long as the cache when this chunk reaches a layer.
        hidden: Input of the next layer, ``[1, tokens, hidden]``.
        handed_on: Results of the last layer, the hidden states first; the next one may have others of them as
            arguments.
        calls: Arguments of each layer besides the hidden states, with :class:`HandedOn` for such results.
        outputs: What the modules of the current layer returned in step 1, in order.
        request: Inputs of the experts of the current layer: hidden states, indices and weights.
        answer: Their result.
    """

    ids: torch.Tensor
    begin: int
    ahead: Any
    hidden: Any = None
    handed_on: tuple[Any, ...] = ()
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)
    outputs: deque[tuple[nn.Module, Any]] = field(default_factory=deque)
    request: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
    answer: torch.Tensor | None = None

    @property
    def tokens(self) -> int:
        """Number of its tokens."""
        return self.ids.shape[1]

    def arguments(self, layer: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments of a layer besides the hidden states, when the layer before is computed."""

        def known(item: Any) -> Any:
            return self.handed_on[item.place] if isinstance(item, HandedOn) else item

        args, named = self.calls[layer]
        return tuple(map(known, args)), {key: known(item) for key, item in named.items()}

    @property
    def end(self) -> int:
        """Number of the first token behind it."""
        return self.begin + self.tokens


class ExpertInputs:
    """Inputs of the experts of a layer for all tokens of a wave, in memory that all layers use.

    Attributes:
        x: ``[tokens, hidden]``.
    """

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self.x = torch.empty(0)

    def keep(self, part: Chunk) -> None:
        """Copy the hidden states of a chunk's request."""
        assert part.request is not None
        hidden, index, weights = part.request
        flat = hidden.reshape(-1, hidden.shape[-1])
        if len(self.x) == 0:
            self.x = torch.empty((self._tokens, flat.shape[1]), dtype=flat.dtype, device=flat.device)
        self.x[part.begin : part.end] = flat
        rows = part.tokens
        part.request = (self.x, index.reshape(rows, -1), weights.reshape(rows, -1))

    @staticmethod
    def choices(parts: Sequence[Chunk]) -> tuple[torch.Tensor, torch.Tensor]:
        """Indices and weights of all chunks, ``[tokens, k]`` each; forgets the requests."""
        requests = [part.request for part in parts if part.request is not None]
        for part in parts:
            part.request = None
        return torch.cat([index for _, index, _ in requests]), torch.cat([each for _, _, each in requests])


def cache_ahead(cache: Any, tokens: int) -> Any:
    """A cache as long as ``cache`` is after ``tokens`` more tokens, to make masks and positions with.

    Raises:
        NotInWavesError: The cache holds something else than keys, values and states.
    """
    if type(cache) is not DynamicCache:
        raise NotInWavesError(f"the attention cache is a {type(cache).__name__}")
    ahead = DynamicCache()
    ahead.layers = [_layer_ahead(layer, tokens) for layer in cache.layers]
    return ahead


def _layer_ahead(layer: Any, tokens: int) -> Any:
    kind = type(layer)
    if kind in EMPTY:
        return kind()
    length = 0 if kind in STATES_ALONE else layer.get_seq_length() + tokens
    ahead: Any
    if kind in ALL_TOKENS:
        return _LayerAhead(length)
    if kind in _WINDOWS or compresses(kind):
        ahead = DynamicSlidingWindowLayer(layer.sliding_window)
    elif kind in STATES_ALONE:
        ahead = LinearAttentionLayer(layer.number_of_states)
    elif kind is LinearAttentionAndFullAttentionLayer:
        ahead = _HybridAhead(layer.number_of_states, length)
    elif kind is LinearAttentionAndSlidingWindowAttentionLayer:
        ahead = kind(layer.sliding_window, layer.number_of_states)
    else:
        raise NotInWavesError(f"the attention cache has a {kind.__name__}")
    if hasattr(ahead, "cumulative_length"):
        ahead.cumulative_length = length
    if hasattr(ahead, "has_previous_state"):
        for number, known in layer.has_previous_state.items():
            ahead.has_previous_state[number] = known or tokens > 0
    return ahead


class _LayerAhead(DynamicLayer):  # type: ignore[no-untyped-call]
    """The length of a layer of keys and values, without them."""

    def __init__(self, length: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.length = length

    def get_seq_length(self) -> int:
        """Number of tokens."""
        return self.length


class _HybridAhead(LinearAttentionAndFullAttentionLayer):
    """The same of a layer that also has states."""

    def __init__(self, states: int, length: int) -> None:
        super().__init__(states)  # type: ignore[no-untyped-call]
        self.length = length

    def get_seq_length(self) -> int:
        """Number of tokens."""
        return self.length


def share_masks(part: Chunk, last: Chunk) -> None:
    """Replace masks of a chunk by parts of those of the last one, where the values are the same.

    A causal mask ends in a triangle of the chunk's tokens; before it there are as many columns as tokens, all
    of them seen. So a chunk's mask is the end of a later chunk's.
    """
    shared: dict[int, torch.Tensor] = {}

    def found(mask: torch.Tensor, whole: Any) -> torch.Tensor:
        rows, columns = mask.shape[-2:]
        if not isinstance(whole, torch.Tensor) or whole.ndim != 4 or whole.shape[-2] != rows:
            return mask
        end = whole[..., whole.shape[-1] - columns :] if whole.shape[-1] >= columns else whole
        return end if torch.equal(end, mask) else mask

    for (_, named), (_, whole) in zip(part.calls, last.calls, strict=True):
        for key, mask in named.items():
            if isinstance(mask, torch.Tensor) and mask.ndim == 4 and mask.shape[:2] == (1, 1):
                if id(mask) not in shared:
                    shared[id(mask)] = found(mask, whole.get(key))
                named[key] = shared[id(mask)]
