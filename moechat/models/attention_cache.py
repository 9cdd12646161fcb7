"""The attention cache of one answer: what it costs, how it grows, whether a prompt may come in parts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from moechat.models.cache_memory import LayerMemory, Place

# Tokens of a prompt that are computed in one pass. A constant: with other parts a prompt's logits round
# differently, and they may not depend on a budget.
PREFILL_CHUNK = 1024
# Layers to which several tokens can be appended with the same meaning as in one pass.
_APPENDABLE = (DynamicLayer, DynamicSlidingWindowLayer)
# Tokens of the trial pass. No other dimension of a cache has this size, so the axis of the tokens shows.
_TRIAL = 1009
_UNLIMITED = 1 << 62


class ReservedLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """Keys and values of one layer in memory that is reserved once for the whole context.

    transformers' own layer copies everything it holds for each new token. Here a token costs its own bytes,
    and the system gives memory to a reserved part only when it is first written.

    Invariant: ``keys`` and ``values`` are the first tokens of the two reserved tensors, or both are cut
    shorter.

    Args:
        capacity: Tokens to reserve; more can be appended at the price of a copy.

    Attributes:
        memory: Where the memory comes from; ``None``: it is its own.
    """

    memory: LayerMemory | None = None

    def __init__(self, capacity: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._capacity = capacity
        self._reserved: tuple[torch.Tensor, torch.Tensor] | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append tokens; returns all keys ``[1, heads, tokens, dim]`` and all values."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        held = self.get_seq_length()
        length = held + key_states.shape[-2]
        if self._reserved is None or length > self._reserved[0].shape[-2]:
            self._reserve(key_states, value_states, held, max(length, self._capacity))
        assert self._reserved is not None
        keys, values = self._reserved
        # Not by indexing, which takes torch three times as long.
        keys.narrow(-2, held, length - held).copy_(key_states)
        values.narrow(-2, held, length - held).copy_(value_states)
        self.keys, self.values = keys.narrow(-2, 0, length), values.narrow(-2, 0, length)
        return self.keys, self.values

    def append_place(
        self, kv_heads: int, dim: int, dtype: torch.dtype
    ) -> tuple[int, int, int, int, int] | None:
        """Append one token whose keys and values the caller writes.

        Args:
            kv_heads: Of the caller's keys and values.
            dim: Elements of a head of both.
            dtype: Of both.

        Returns:
            Address of all keys and the stride of their heads in elements, the same for the values, and the
            tokens before this one; ``None``, and nothing is appended, where no token was ever appended by
            :meth:`update`, or others than such, or the reserved memory is full.
        """
        reserved = self._reserved
        if reserved is None or self.keys is None:
            return None
        keys, values = reserved
        capacity, held = keys.shape[-2], self.keys.shape[-2]
        shape = (1, kv_heads, capacity, dim)
        if held >= capacity or keys.shape != shape or values.shape != shape or keys.dtype is not dtype:
            return None
        self.keys, self.values = keys.narrow(-2, 0, held + 1), values.narrow(-2, 0, held + 1)
        head = capacity * dim
        return keys.data_ptr(), head, values.data_ptr(), head, held

    def next_place(self) -> Place | None:
        """Where the next token goes; ``None`` where no memory is reserved or it is full."""
        if self._reserved is None or self.keys is None:
            return None
        held = self.keys.shape[-2]
        return Place(*self._reserved, held) if held < self._reserved[0].shape[-2] else None

    def advance(self) -> None:
        """Hold one token more, which somebody has written to :meth:`next_place`."""
        assert self._reserved is not None
        assert self.keys is not None
        keys, values = self._reserved
        length = self.keys.shape[-2] + 1
        self.keys, self.values = keys.narrow(-2, 0, length), values.narrow(-2, 0, length)

    def _reserve(self, keys: torch.Tensor, values: torch.Tensor, held: int, capacity: int) -> None:
        fresh = _fresh(keys, values, capacity, self.memory)
        if held:
            # Never the same memory: there was less of it.
            for new, old in zip(fresh, (self.keys, self.values), strict=True):
                assert old is not None
                new[..., :held, :] = old
        self._reserved = fresh


class WindowLayer(DynamicSlidingWindowLayer):  # type: ignore[no-untyped-call]
    """Keys and values of one layer that sees a window, in memory that is reserved once.

    transformers' own layer copies the window for each new token. Here the window moves along a piece of
    memory, and is copied to its beginning when it has come to the end.

    Invariant: ``keys`` and ``values`` are tokens ``[start, start + held)`` of the two reserved tensors, at
    most one less than the window has; or there is no reserved memory, and this is transformers' own layer.

    Args:
        sliding_window: Tokens that a token sees, itself included.
        most: Tokens of the largest pass that the reserved memory is for; larger ones are copied.

    Attributes:
        memory: As of :class:`ReservedLayer`.
    """

    memory: LayerMemory | None = None

    def __init__(self, sliding_window: int, most: int) -> None:
        super().__init__(sliding_window)
        self._capacity = sliding_window - 1 + max(1, most)
        self._reserved: tuple[torch.Tensor, torch.Tensor] | None = None
        self._start = 0
        self._held = 0

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append tokens; returns the keys and values that the first of them sees, and those after it."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        count = key_states.shape[-2]
        if self._records_past() or count > self._capacity - (self.sliding_window - 1):
            # The window is what transformers makes of it from here on.
            self._reserved = None
            both: tuple[torch.Tensor, torch.Tensor] = super().update(key_states, value_states)
            return both
        if self._reserved is None:
            self._reserve(key_states, value_states)
        first, held = self._append(count)
        keys, values = self._tensors()
        keys.narrow(-2, first, count).copy_(key_states)
        values.narrow(-2, first, count).copy_(value_states)
        return keys.narrow(-2, first - held, held + count), values.narrow(-2, first - held, held + count)

    def append_place(
        self, kv_heads: int, dim: int, dtype: torch.dtype
    ) -> tuple[int, int, int, int, int] | None:
        """As :meth:`ReservedLayer.append_place`; what comes before the token is what it sees."""
        reserved = self._reserved
        if reserved is None or self._records_past():
            return None
        keys, values = reserved
        shape = (1, kv_heads, self._capacity, dim)
        if keys.shape != shape or values.shape != shape or keys.dtype is not dtype:
            return None
        first, held = self._append(1)
        at, head = (first - held) * dim * dtype.itemsize, self._capacity * dim
        return keys.data_ptr() + at, head, values.data_ptr() + at, head, held

    def _records_past(self) -> bool:
        return bool(getattr(self, "record_past", False))  # not every version of transformers can

    def next_place(self) -> Place | None:
        """As :meth:`ReservedLayer.next_place`; the window moves to the beginning where it has to."""
        if self._reserved is None or self._records_past():
            return None
        self._make_room(1)
        return Place(*self._reserved, self._start + self._held)

    def advance(self) -> None:
        """As :meth:`ReservedLayer.advance`."""
        self._append(1)

    def _make_room(self, count: int) -> None:
        """Move the window to the beginning of the memory if ``count`` tokens do not fit behind it."""
        held = self._held
        if self._start + held + count <= self._capacity:
            return
        for tensor in self._tensors():
            # By way of a copy, since the two places may overlap.
            tensor.narrow(-2, 0, held).copy_(tensor.narrow(-2, self._start, held).clone())
        self._start = 0
        self._show()

    def _append(self, count: int) -> tuple[int, int]:
        """Take ``count`` tokens more; returns where the first of them lies, and how many it sees before."""
        held = self._held
        self._make_room(count)
        first = self._start + held
        self.cumulative_length += count
        self._held = min(held + count, self.sliding_window - 1)
        self._start = first + count - self._held
        self._show()
        return first, held

    def _show(self) -> None:
        keys, values = self._tensors()
        self.keys = keys.narrow(-2, self._start, self._held)
        self.values = values.narrow(-2, self._start, self._held)

    def _tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        assert self._reserved is not None
        return self._reserved

    def _reserve(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        held = min(self.cumulative_length, self.sliding_window - 1)
        old = []
        for states in (self.keys, self.values) if held else ():
            assert states is not None
            # A copy, since it may lie in the memory that is taken again.
            old.append(states.narrow(-2, -held, held).clone())
        self._reserved = _fresh(keys, values, self._capacity, self.memory)
        self._start, self._held = 0, held
        for new, states in zip(self._reserved, old, strict=False):
            new.narrow(-2, 0, held).copy_(states)
        self._show()

    def reset(self) -> None:
        """As transformers' own layer does; the memory is reserved anew by the next pass, as after a crop."""
        self._reserved = None
        super().reset()

    def crop(self, tokens_to_remove: int) -> None:
        """As transformers' own layer does."""
        self._reserved = None
        super().crop(tokens_to_remove)


def _fresh(
    keys: torch.Tensor, values: torch.Tensor, capacity: int, memory: LayerMemory | None
) -> tuple[torch.Tensor, torch.Tensor]:
    if memory is not None:
        return memory.take(keys, values, capacity)
    shapes = [(*states.shape[:-2], capacity, states.shape[-1]) for states in (keys, values)]
    return keys.new_empty(shapes[0]), values.new_empty(shapes[1])


@dataclass(frozen=True)
class CacheShape:
    """What a model's attention cache looks like.

    Attributes:
        exact: Learnt from a trial pass of the model itself; else computed from the configuration, upwards.
        reserved: The cache is transformers' ``DynamicCache``, so plain layers of it can be
            :class:`ReservedLayer` and windows :class:`WindowLayer`.
        appendable: Most tokens of a prompt that may be computed in parts; 0: none may.
        fixed_bytes: Bytes that do not depend on the tokens.
        growing: For each tensor that grows: bytes a token, and the tokens after which it stops growing (or
            ``None``).
        copied: The same pairs for layers that are copied whenever they grow, one at a time.
    """

    exact: bool
    reserved: bool
    appendable: int
    fixed_bytes: int
    growing: tuple[tuple[int, int | None], ...]
    copied: tuple[tuple[int, int | None], ...] = ()

    @property
    def unlimited(self) -> bool:
        """Whether prompts of any length may be computed in parts."""
        return self.appendable >= _UNLIMITED

    def nbytes(self, tokens: int) -> int:
        """Bytes of the cache when it holds ``tokens`` tokens, the copy of a growing layer included."""

        def held(pair: tuple[int, int | None]) -> int:
            each, most = pair
            return each * (tokens if most is None else min(tokens, most))

        return self.fixed_bytes + sum(map(held, self.growing)) + max(map(held, self.copied), default=0)

    def new(self, config: Any, capacity: int) -> Any:
        """A fresh cache for ``capacity`` tokens; ``None`` where the model makes its own."""
        if not self.reserved:
            return None
        cache = DynamicCache(config=config.get_text_config())
        cache.layers = [_reserving(layer, capacity) for layer in cache.layers]
        return cache


def _reserving(layer: Any, capacity: int) -> Any:
    if type(layer) is DynamicLayer:
        return ReservedLayer(capacity)
    if type(layer) is DynamicSlidingWindowLayer:
        return WindowLayer(layer.sliding_window, min(PREFILL_CHUNK, capacity))
    return layer


def can_crop(cache: Any) -> bool:
    """Plain attention layers can be cut anywhere and extended by several tokens; windows and states not."""
    return type(cache) is DynamicCache and all(
        type(layer) in (DynamicLayer, ReservedLayer) for layer in cache.layers
    )


def lengths(cache: Any) -> list[int] | None:
    """Tokens that each layer of a cache holds; ``None`` for one whose layers do not say."""
    if cache is None:
        return []
    try:
        return [int(layer.get_seq_length()) for layer in cache.layers]
    except (AttributeError, TypeError):
        return None


def cut(cache: Any, held: list[int] | None) -> bool:
    """Let every layer hold as many tokens as it did: what an interrupted pass has appended goes.

    Args:
        cache: Of the pass.
        held: From :func:`lengths`, before the pass.

    Returns:
        Whether it is so now; a window that has moved on cannot be brought back.
    """
    now = lengths(cache)
    if held is None or now is None or len(now) < len(held):
        return False
    excess = [after - before for before, after in zip(held + [0] * (len(now) - len(held)), now, strict=True)]
    if any(excess) and not can_crop(cache):
        return False
    for layer, tail in zip(cache.layers if cache is not None else [], excess, strict=True):
        if tail > 0:
            layer.crop(-tail)
    return True


def cache_shape(model: nn.Module, config: Any, dtype: torch.dtype) -> CacheShape:
    """Find out what cache a model makes, by a pass on the meta device: nothing is allocated or computed.

    Args:
        model: The whole model on the meta device; its experts return tensors like what they receive.
        config: Its configuration.
        dtype: Type of the keys and values, for the formula that stands in where no trial pass is possible.
    """
    text = config.get_text_config()
    try:
        cache = _trial(model)
        found = [type(layer) for layer in cache.layers]
        plain = type(cache) is DynamicCache and found == [
            type(layer) for layer in DynamicCache(config=text).layers
        ]
    except Exception:  # whatever a family does that needs real numbers
        return _from_config(text, dtype)
    fixed = sum(tensor.nbytes for tensor in _tensors(cache))
    growing: list[tuple[int, int | None]] = []
    copied: list[tuple[int, int | None]] = []
    for layer in cache.layers:
        most = layer.sliding_window if getattr(layer, "is_sliding", False) else None
        grows = 0
        for tensor in _tensors(layer):
            if _TRIAL in tensor.shape:
                grows += tensor.nbytes // _TRIAL
            elif most is not None:
                grows += tensor.nbytes // tensor.shape[-2]
            else:
                fixed += tensor.nbytes
        if grows:
            # A window is a part of the tensor that the pass before has made.
            growing.append((grows, None if most is None else most - 1 + PREFILL_CHUNK))
            if most is not None or not (plain and type(layer) is DynamicLayer):
                copied.append(growing[-1])
    appendable = _appendable(model, config) if plain and all(kind in _APPENDABLE for kind in found) else 0
    return CacheShape(True, plain, appendable, fixed, tuple(growing), tuple(copied))


def _appendable(model: nn.Module, config: Any) -> int:
    """Most tokens of a prompt whose meaning does not depend on how many more come after them."""
    text = config.get_text_config()
    if getattr(text, "attention_chunk_size", None) is not None:
        return 0
    kinds = {kind for kind, _, _ in _rotary_scaling(model)}
    if "dynamic" in kinds:
        return 0
    if "longrope" in kinds:
        # Beyond this length all tokens of a pass are rotated by other frequencies.
        parameters = getattr(text, "rope_parameters", None) or {}
        limit = parameters.get("original_max_position_embeddings")
        limit = limit or getattr(text, "original_max_position_embeddings", None)
        return limit if isinstance(limit, int) else 0
    return _UNLIMITED


def _rotary_scaling(model: nn.Module) -> list[tuple[str, Any, dict[str, Any]]]:
    """Modules whose rotary frequencies depend on the longest position: kind, module, its parameters."""
    found = []
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        kinds = set(kind.values()) if isinstance(kind, dict) else {kind}
        for name in [kind for kind in kinds if kind in ("longrope", "dynamic")]:
            parameters = getattr(getattr(module, "config", None), "rope_parameters", None)
            found.append((name, module, parameters if isinstance(parameters, dict) else {}))
    return found


@contextmanager
def _without_scaling(model: nn.Module) -> Iterator[None]:
    """Choosing frequencies by the longest position needs a number that meta tensors do not have."""
    with ExitStack() as undo:
        for _, module, parameters in _rotary_scaling(model):
            before = dict(vars(module))
            undo.callback(vars(module).update, before)
            undo.callback(parameters.update, dict(parameters))
            module.rope_type = "default"
            module.rope_init_fn = module.compute_default_rope_parameters
            parameters["rope_type"] = "default"
        yield


def _trial(model: nn.Module) -> Any:
    """The cache after a pass of :data:`_TRIAL` tokens on the meta device."""
    ids = torch.zeros((1, _TRIAL), dtype=torch.int64, device="meta")
    with _without_scaling(model), torch.inference_mode():
        return model(input_ids=ids, use_cache=True).past_key_values


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
    """Keys and values of every head in every layer: no family keeps more for a token."""
    heads = int(text.num_attention_heads)
    head = getattr(text, "head_dim", None) or math.ceil(int(text.hidden_size) / heads)
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    each = 2 * int(kv_heads) * int(head) * dtype.itemsize
    layers = int(text.num_hidden_layers)
    # A state of linear attention is a matrix a head.
    state = layers * heads * max(int(head), 128) ** 2 * torch.float32.itemsize
    return CacheShape(False, False, 0, state, ((each * layers, None),), ((each, None),))
