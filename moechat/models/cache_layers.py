"""Layers of the attention cache in memory that is reserved ahead.

A layer holds keys and values as they are, or packed in 8 bits (:mod:`moechat.models.packed_rows`). The tokens
of packed layers are rows of bytes in the same places, so growing, cropping and moving do not differ. For
them ``update`` returns unpacked keys and values, including those of the pass itself. So all tokens of a
prompt see the same numbers, whether it is computed in parts or at once, and so does the native step, which
reads the packed rows.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from moechat.models.cache_memory import LayerMemory, Place
from moechat.models.lazy_memory import unwritten
from moechat.models.packed_rows import empty_rows, pack, row_bytes, unpack_like

# Address of all keys and the stride of their heads, the same of the values, the number of tokens before the
# new one, and whether they are packed. Strides are in elements, of packed rows in bytes.
AppendPlace = tuple[int, int, int, int, int, bool]


class ReservedLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """Keys and values of one layer in memory reserved for a number of tokens.

    transformers' own layer copies all its tokens for each new one. Here only the new token is written, and
    the system assigns physical memory to reserved pages at their first write.

    Invariant: ``keys`` and ``values`` are prefixes of the two reserved tensors.

    Args:
        capacity: Tokens to reserve; appending more costs a copy.
        packed: Keep them in 8 bits.

    Attributes:
        memory: Shared memory to use; ``None``: the layer allocates its own.
        dtype: Type of keys and values where they are not packed, from the first :meth:`update` on.
    """

    memory: LayerMemory | None = None
    memory_type = LayerMemory

    def __init__(self, capacity: int, *, packed: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._capacity = capacity
        self.packed = packed
        self._reserved: tuple[torch.Tensor, torch.Tensor] | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append tokens; returns all keys ``[1, heads, tokens, dim]`` and all values."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.dtype = key_states.dtype
        held = self.get_seq_length()
        length = held + key_states.shape[-2]
        if self._reserved is None or length > self._reserved[0].shape[-2]:
            self._reserve(key_states, value_states, held, max(length, self._capacity))
        assert self._reserved is not None
        keys, values = self._reserved
        # narrow is three times faster than indexing.
        _write(keys.narrow(-2, held, length - held), key_states, packed=self.packed)
        _write(values.narrow(-2, held, length - held), value_states, packed=self.packed)
        self.keys, self.values = keys.narrow(-2, 0, length), values.narrow(-2, 0, length)
        if not self.packed:
            return self.keys, self.values
        return unpack_like(self.keys, key_states), unpack_like(self.values, value_states)

    def takes_token(self, kv_heads: int, dim: int, dtype: torch.dtype, value_dim: int = 0) -> bool:
        """Whether native code may append a token, by :meth:`append_place`. It may not before the first
        :meth:`update`, or if the reserved memory is full.

        Args:
            kv_heads: Heads of keys and values.
            dim: Elements of a key.
            dtype: Type of both.
            value_dim: Elements of a value, if it has others.
        """
        if self._reserved is None or self.keys is None:
            return False
        keys, values = self._reserved
        capacity = keys.shape[-2]
        rows = [row_bytes(each) if self.packed else each for each in (dim, value_dim or dim)]
        fits = all(
            held.shape == (1, kv_heads, capacity, row) for held, row in zip((keys, values), rows, strict=True)
        )
        return fits and self.dtype is dtype and self.keys.shape[-2] < capacity

    def append_place(self) -> AppendPlace:
        """Append one token whose keys and values the caller writes. REQUIRES: :meth:`takes_token`."""
        assert self._reserved is not None
        assert self.keys is not None
        keys, values = self._reserved
        held = self.keys.shape[-2]
        self.keys, self.values = keys.narrow(-2, 0, held + 1), values.narrow(-2, 0, held + 1)
        return keys.data_ptr(), keys.stride(1), values.data_ptr(), values.stride(1), held, self.packed

    def make_room(self, count: int) -> bool:
        """Whether so many tokens fit into the reserved memory; see :meth:`takes_token`."""
        if self._reserved is None or self.keys is None:
            return False
        return self.keys.shape[-2] + count <= self._reserved[0].shape[-2]

    def roll_back(self, count: int) -> None:
        """Forget the last ``count`` tokens."""
        assert self._reserved is not None
        assert self.keys is not None
        keys, values = self._reserved
        length = self.keys.shape[-2] - count
        self.keys, self.values = keys.narrow(-2, 0, length), values.narrow(-2, 0, length)

    def next_place(self) -> Place | None:
        """Memory for the next token; ``None`` if none is reserved, or it is full."""
        if self._reserved is None or self.keys is None:
            return None
        held = self.keys.shape[-2]
        return Place(*self._reserved, held) if held < self._reserved[0].shape[-2] else None

    def advance(self) -> None:
        """Count one more token, which the caller has written to :meth:`next_place`."""
        assert self._reserved is not None
        assert self.keys is not None
        keys, values = self._reserved
        length = self.keys.shape[-2] + 1
        self.keys, self.values = keys.narrow(-2, 0, length), values.narrow(-2, 0, length)

    def reset(self) -> None:
        """Forget all tokens; the reserved memory stays."""
        _forget(self)
        super().reset()

    def reserve(self, capacity: int) -> None:
        """Reserve memory for more tokens; those that are there are copied. Not with shared memory."""
        self._capacity = max(self._capacity, capacity)
        if self._reserved is not None and capacity > self._reserved[0].shape[-2]:
            self._move(self.get_seq_length(), capacity)

    def copy_of(self, tokens: int, capacity: int) -> ReservedLayer:
        """A layer with the first ``tokens`` tokens of this one, in its own memory. Not with shared memory."""
        twin = type(self).__new__(type(self))
        vars(twin).update(vars(self))
        twin._capacity = capacity
        if self._reserved is not None:
            twin._move(tokens, max(tokens, capacity))
        return twin

    def _move(self, held: int, capacity: int) -> None:
        """Take the first ``held`` tokens to other memory, and leave that where they are."""
        assert self._reserved is not None
        old = list(self._reserved)
        self._reserved = _rows(old[0], capacity), _rows(old[1], capacity)
        # The old keys are free before values are written.
        self.keys = _moved(old.pop(0), self._reserved[0], held)
        self.values = _moved(old.pop(0), self._reserved[1], held)

    def _reserve(self, keys: torch.Tensor, values: torch.Tensor, held: int, capacity: int) -> None:
        fresh = _fresh(keys, values, capacity, self.memory, packed=self.packed)
        if held:
            # Never the same memory, because its capacity has grown.
            for new, old in zip(fresh, (self.keys, self.values), strict=True):
                assert old is not None
                new[..., :held, :] = old
        self._reserved = fresh


class WindowLayer(DynamicSlidingWindowLayer):  # type: ignore[no-untyped-call]
    """Keys and values of one layer with a sliding window, in memory reserved once.

    transformers' own layer copies the window for each new token. Here the window moves along the reserved
    memory and is copied to its beginning when it reaches the end.

    Invariant: ``keys`` and ``values`` are slots ``[start, start + held)`` of the two reserved tensors, with
    ``held < sliding_window``; or no memory is reserved, and the layer behaves like transformers' own until
    the next pass that fits. Of packed layers only a crop gives the reserved memory up, until the next pass.

    Args:
        sliding_window: Tokens that a token attends to, itself included.
        most: Tokens of the largest pass that uses the reserved memory; larger passes are copied.
        packed: Keep them in 8 bits.

    Attributes:
        memory, dtype: As of :class:`ReservedLayer`.
    """

    memory: LayerMemory | None = None
    memory_type = LayerMemory

    def __init__(self, sliding_window: int, most: int, *, packed: bool = False) -> None:
        super().__init__(sliding_window)
        self.packed = packed
        self._capacity = sliding_window - 1 + max(1, most)
        self._reserved: tuple[torch.Tensor, torch.Tensor] | None = None
        self._start = 0
        self._held = 0

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append tokens; returns all keys and values from the first that the first new token attends to."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.dtype = key_states.dtype
        count = key_states.shape[-2]
        too_long = count > self._capacity - (self.sliding_window - 1)
        if too_long and self.packed:
            return self._update_at_once(key_states, value_states)
        if too_long or self._records_past():
            # From here on the layer behaves like transformers' own.
            self._reserved = None
            both: tuple[torch.Tensor, torch.Tensor] = super().update(key_states, value_states)
            return both
        if self._reserved is None:
            self._reserve(key_states, value_states)
        first, held = self._append(count)
        keys, values = self._tensors()
        _write(keys.narrow(-2, first, count), key_states, packed=self.packed)
        _write(values.narrow(-2, first, count), value_states, packed=self.packed)
        keys, values = (rows.narrow(-2, first - held, held + count) for rows in (keys, values))
        if not self.packed:
            return keys, values
        return unpack_like(keys, key_states), unpack_like(values, value_states)

    def _update_at_once(
        self, key_states: torch.Tensor, value_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """:meth:`update` for more packed tokens than the reserved memory holds; uses temporary memory."""
        if self._reserved is None:
            self._reserve(key_states, value_states)
        count, held = key_states.shape[-2], self._held
        kept = min(held + count, self.sliding_window - 1)
        seen = []
        for rows, states in zip(self._tensors(), (key_states, value_states), strict=True):
            whole = rows.new_empty((*rows.shape[:-2], held + count, rows.shape[-1]))
            whole.narrow(-2, 0, held).copy_(rows.narrow(-2, self._start, held))
            _write(whole.narrow(-2, held, count), states, packed=True)
            rows.narrow(-2, 0, kept).copy_(whole.narrow(-2, held + count - kept, kept))
            seen.append(unpack_like(whole, states))
        self.cumulative_length += count
        self._start, self._held = 0, kept
        self._show()
        return seen[0], seen[1]

    def takes_token(self, kv_heads: int, dim: int, dtype: torch.dtype, value_dim: int = 0) -> bool:
        """As :meth:`ReservedLayer.takes_token`."""
        if self._reserved is None or self._records_past() or value_dim not in (0, dim):
            return False
        keys, values = self._reserved
        shape = (1, kv_heads, self._capacity, row_bytes(dim) if self.packed else dim)
        return keys.shape == shape == values.shape and self.dtype is dtype

    def append_place(self) -> AppendPlace:
        """As :meth:`ReservedLayer.append_place`, for the tokens of the window."""
        assert self._reserved is not None
        keys, values = self._reserved
        row = keys.shape[-1]
        first, held = self._append(1)
        at, head = (first - held) * row * keys.itemsize, self._capacity * row
        return keys.data_ptr() + at, head, values.data_ptr() + at, head, held, self.packed

    def make_room(self, count: int) -> bool:
        """Make room for so many tokens; returns whether they fit and can be rolled back."""
        if (
            self._reserved is None
            or self._records_past()
            or count > self._capacity - (self.sliding_window - 1)
        ):
            return False
        self._make_room(count)
        return True

    def roll_back(self, count: int) -> None:
        """Forget the last ``count`` tokens. REQUIRES: :meth:`make_room` before them."""
        end = self._start + self._held - count
        self.cumulative_length -= count
        # The tokens that had left the window are still in front of it.
        self._held = min(self.cumulative_length, self.sliding_window - 1)
        self._start = end - self._held
        assert self._start >= 0
        self._show()

    def activate_past_recording(self) -> None:
        """As transformers' own layer; not for packed tokens."""
        if self.packed:
            raise ValueError("a layer with packed tokens does not record those that leave its window")
        super().activate_past_recording()  # type: ignore[no-untyped-call]

    def _records_past(self) -> bool:
        return bool(getattr(self, "record_past", False))  # missing in some versions of transformers

    def next_place(self) -> Place | None:
        """As :meth:`ReservedLayer.next_place`; moves the window to the beginning if necessary."""
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
            # Through a temporary copy, because the two ranges may overlap.
            tensor.narrow(-2, 0, held).copy_(tensor.narrow(-2, self._start, held).clone())
        self._start = 0
        self._show()

    def _append(self, count: int) -> tuple[int, int]:
        """Count ``count`` more tokens; returns the first one's slot and the number of tokens before it."""
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
            # A copy, because it may be in the memory that is reused.
            old.append(states.narrow(-2, -held, held).clone())
        self._reserved = _fresh(keys, values, self._capacity, self.memory, packed=self.packed)
        self._start, self._held = 0, held
        for new, states in zip(self._reserved, old, strict=False):
            new.narrow(-2, 0, held).copy_(states)
        self._show()

    def reset(self) -> None:
        """Forget all tokens; the next pass reserves memory again, as after :meth:`crop`."""
        self._reserved = None
        _forget(self)
        super().reset()

    def crop(self, tokens_to_remove: int) -> None:
        """As transformers' own layer."""
        self.leave_memory()
        super().crop(tokens_to_remove)

    def leave_memory(self) -> None:
        """Give the reserved memory up, until the next pass."""
        self._reserved = None


def _forget(layer: DynamicLayer) -> None:
    # transformers before 5.18 fills the tensors with zeros instead, which leaves them in front of new tokens.
    layer.keys = layer.values = None
    layer.is_initialized = False


def _write(rows: torch.Tensor, states: torch.Tensor, *, packed: bool) -> None:
    if packed:
        pack(states, rows)
    else:
        rows.copy_(states)


def _fresh(
    keys: torch.Tensor, values: torch.Tensor, capacity: int, memory: LayerMemory | None, *, packed: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    if memory is not None:
        return memory.take(keys, values, capacity, packed=packed)
    if packed:
        return empty_rows(keys, capacity), empty_rows(values, capacity)
    return _rows(keys, capacity), _rows(values, capacity)


def _moved(old: torch.Tensor, new: torch.Tensor, held: int) -> torch.Tensor:
    rows = new.narrow(-2, 0, held)
    rows.copy_(old.narrow(-2, 0, held))
    return rows


def _rows(like: torch.Tensor, capacity: int) -> torch.Tensor:
    return unwritten((*like.shape[:-2], capacity, like.shape[-1]), like.dtype, like.device)
