"""Attention of decoded tokens over the reserved attention cache, on a GPU.

One launch writes the new keys and values, one computes the splits, one merges them. All three read from the
GPU's memory how many tokens there are, so they can be recorded in a CUDA graph once for every context.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch
from triton.runtime.interpreter import InterpretedFunction

from moechat.budget.gpu_sizes import ATTENTION_PROGRAMS, ATTENTION_SUMS
from moechat.models.packed_rows import ROW_TYPE, row_bytes
from moechat.offload.kernels import triton_attention
from moechat.offload.kernels.launch import POINTERS, Kernel
from moechat.offload.kernels.steps import power

INTERPRETED = isinstance(triton_attention.attend, InterpretedFunction)
# Most query tokens of a pass.
MOST_TOKENS = 8
# Programs of a launch over a long context.
PROGRAMS = ATTENTION_PROGRAMS
_MOST_SPLITS = 128
# Bytes of the keys that a program reads at a time: enough in flight for the memory while several programs
# share a multiprocessor.
TILE_BYTES = 16384
TILE_KEYS = (16, 64)
# Query rows of a program: at least as many as a tensor core multiplies.
_LEAST_ROWS, _MOST_ROWS = 16, 64
# Products of one tile that a warp makes element by element: 64 for each thread.
_PRODUCTS = 2048
_AT_ONCE = 16
_LOG2_E = 1.4426950408889634


@dataclass(frozen=True)
class AttentionShape:
    """The attention of one layer.

    Attributes:
        kv_heads: Heads of keys and values.
        group: Query heads of each.
        key_dim: Elements of a key, without ``tail_dim``.
        value_dim: Elements of a value.
        dtype: Type of queries and results, and of keys and values that are not packed.
        tail_dim: Last elements of a key that lie in a tensor of their own, which is the same for all heads.
        shared: Keys, without the tail, are the values.
        packed: Keys, values and tails are packed rows.
        window: Tokens that a token attends to, itself included; 0: all.
    """

    kv_heads: int
    group: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    tail_dim: int = 0
    shared: bool = False
    packed: bool = False
    window: int = 0

    def __post_init__(self) -> None:
        if self.shared and self.key_dim != self.value_dim:
            raise ValueError(f"keys of {self.key_dim} elements are not values of {self.value_dim}")

    @property
    def least(self) -> int:
        """Elements that a row is padded to at least."""
        return 32 if self.packed else 16

    @cached_property
    def main_dim(self) -> int:
        """Elements of the first part of a key: a power of two, or all if there is no second part."""
        if self.tail_dim or self.shared:
            return self.key_dim
        most = 1 << (self.key_dim.bit_length() - 1)
        return most if most >= self.least else self.key_dim

    @cached_property
    def second_dim(self) -> int:
        """Elements of the second part of a key."""
        return self.tail_dim or self.key_dim - self.main_dim

    def keys_shape(self, slots: int) -> tuple[int, ...]:
        """Shape of the reserved memory of the keys."""
        return self.kv_heads, slots, row_bytes(self.key_dim) if self.packed else self.key_dim

    @property
    def stored(self) -> torch.dtype:
        """Type of the reserved memory."""
        return ROW_TYPE if self.packed else self.dtype


@dataclass(frozen=True)
class Launch:
    """How one shape is computed for a number of query tokens.

    Attributes:
        dot: Products are made by tensor cores; else element by element in float32.
        rows: Query rows of a program.
        block: Keys that a program reads at a time.
        splits: Parts of the keys, at most.
        least: Blocks of a split, at least.
        warps: Of a program.
        stages: Of its loop.
    """

    dot: bool
    rows: int
    block: int
    splits: int
    least: int
    warps: int
    stages: int

    @classmethod
    def of(cls, shape: AttentionShape, tokens: int, *, tensor_cores: bool) -> Launch:
        """For ``tokens`` query tokens, on a GPU with or without tensor cores that Triton uses."""
        width = _padded(shape.main_dim, shape.least)
        value = _padded(shape.value_dim, shape.least)
        warps = 8 if width >= 512 else 4
        dot = tensor_cores and shape.dtype.itemsize == 2
        if dot:
            rows = max(_LEAST_ROWS, min(_MOST_ROWS, power(shape.group * tokens), ATTENTION_SUMS // value))
            # An unpacked tile is in the type of the queries.
            block = _between(TILE_BYTES // (width * shape.dtype.itemsize), *TILE_KEYS)
            warps = 4 if width * rows <= 4096 else 8
        else:
            block = TILE_KEYS[0]
            rows = _between(_PRODUCTS * warps // (block * width), 1, power(shape.group * tokens))
        itemsize = 1 if shape.packed else shape.dtype.itemsize
        parts = shape.kv_heads * -(-shape.group * tokens // rows)
        splits = _between(power(PROGRAMS // parts + 1) // 2, 1, _MOST_SPLITS)
        # Sums that are written and read again stay below the bytes of the keys and values of their split.
        read = block * itemsize * (shape.key_dim + shape.tail_dim + (0 if shape.shared else shape.value_dim))
        sums = 2 * 4 * shape.group * tokens * shape.value_dim
        if shape.window:
            splits = min(splits, power(-(-(shape.window + tokens) // block)))
        return cls(dot, rows, block, splits, power(-(-sums // read)), warps, stages=2)


def _padded(dim: int, least: int) -> int:
    return max(least, power(dim)) if dim else 0


def _between(number: int, least: int, most: int) -> int:
    return min(max(number, least), most)


class CacheAttention:
    """The kernels of one shape.

    Args:
        shape: The shape.
    """

    def __init__(self, shape: AttentionShape) -> None:
        self.shape = shape

    def append(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        numbers: torch.Tensor,
        place: int,
    ) -> None:
        """Write the keys and values of new tokens to the cache.

        Args:
            key: ``[1, heads, tokens, key_dim]`` in the type of the model.
            value: ``[1, heads, tokens, value_dim]``.
            keys: Reserved memory ``[1, heads, slots, row]``, contiguous.
            values: The same for the values.
            numbers: int64 ``[1 + layers]``; see :mod:`moechat.offload.kernels.triton_attention`.
            place: The layer.
        """
        append(key, value, keys, values, numbers, place)

    def attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        numbers: torch.Tensor,
        place: int,
        *,
        scaling: float,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
        tails: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of the new tokens, which :meth:`append` has written: ``[1, tokens, heads, value_dim]``.

        Args:
            query: ``[1, heads, tokens, key_dim + tail_dim]``, at most :data:`MOST_TOKENS` tokens.
            keys: Reserved memory ``[1, kv_heads, slots, row]``, contiguous.
            values: The same for the values; of a ``shared`` shape the keys again.
            numbers: As of :meth:`append`.
            place: The layer.
            scaling: Factor of the scores.
            softcap: Scores are limited by ``softcap * tanh(score / softcap)``.
            sinks: ``[heads]``: a further score of each head, without a value.
            tails: Reserved memory ``[1, 1, slots, row]`` of the last elements of the keys.
        """
        shape = self.shape
        if query.stride(-1) != 1:
            query = query.contiguous()
        _, heads, tokens, _ = query.shape
        device = query.device
        launch = Launch.of(shape, tokens, tensor_cores=has_tensor_cores(device))
        total_rows = heads * tokens
        partial = torch.empty(
            (launch.splits, total_rows, shape.value_dim), dtype=torch.float32, device=device
        )
        stats = torch.empty((launch.splits, total_rows, 2), dtype=torch.float32, device=device)
        tail_rows = keys if tails is None else tails
        programs = shape.kv_heads * -(-shape.group * tokens // launch.rows)
        triton_attention.attend[(programs, launch.splits)](
            query,
            keys,
            tail_rows,
            values,
            numbers,
            partial,
            stats,
            place,
            query.stride(1),
            query.stride(2),
            keys.stride(1),
            keys.stride(1) if tails is None else 0,
            values.stride(1),
            total_rows,
            scaling * _LOG2_E if softcap is None else scaling / softcap,
            0.0 if softcap is None else softcap * _LOG2_E,
            num_warps=launch.warps,
            num_stages=launch.stages,
            **_attend_constants(shape, launch, tokens, capped=softcap is not None),
        )
        out = torch.empty((1, tokens, heads, shape.value_dim), dtype=query.dtype, device=device)
        triton_attention.merge[(total_rows,)](
            partial,
            stats,
            stats if sinks is None else sinks,
            numbers,
            out,
            place,
            total_rows,
            num_warps=_MERGE_WARPS,
            **_merge_constants(shape, launch, tokens, sinks=sinks is not None),
        )
        return out


_MERGE_WARPS = 4


def append(
    key: torch.Tensor,
    value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    numbers: torch.Tensor,
    place: int,
) -> None:
    """See :meth:`CacheAttention.append`; keys and values may have different numbers of elements."""
    key, value = (states if states.stride(-1) == 1 else states.contiguous() for states in (key, value))
    _, heads, tokens, _ = key.shape
    triton_attention.append[(heads, tokens)](
        key,
        value,
        keys,
        values,
        numbers,
        place,
        key.stride(1),
        key.stride(2),
        value.stride(1),
        value.stride(2),
        keys.stride(1),
        values.stride(1),
        num_warps=1,
        **_append_constants(key.shape[-1], value.shape[-1], packed=keys.dtype is ROW_TYPE),
    )


@cache
def has_tensor_cores(device: torch.device) -> bool:
    """Whether Triton makes products with tensor cores there: from Ampere on. For Turing it multiplies padded
    rows element by element, in more registers than there are.
    """
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0)


def _attend_constants(shape: AttentionShape, launch: Launch, tokens: int, *, capped: bool) -> dict[str, Any]:
    second, own = shape.second_dim, bool(shape.tail_dim)
    return {
        "GROUP": shape.group,
        "TOKENS": tokens,
        "WINDOW": shape.window,
        "MAIN_DIM": shape.main_dim,
        "MAIN": _padded(shape.main_dim, shape.least),
        "TAIL_DIM": second,
        "TAIL": _padded(second, shape.least),
        "TAIL_START": 0 if own else shape.main_dim,
        "VALUE_DIM": shape.value_dim,
        "VALUE": _padded(shape.value_dim, shape.least),
        "KEY_ALL": shape.key_dim,
        "TAIL_ALL": shape.tail_dim if own else shape.key_dim,
        "SHARED": shape.shared,
        "PACKED": shape.packed,
        "CAPPED": capped,
        "DOT": launch.dot,
        # The interpreter does not know the arithmetic of bfloat16.
        "EXACT": not launch.dot or (INTERPRETED and shape.dtype is torch.bfloat16),
        "ROWS": launch.rows,
        "BLOCK": launch.block,
        "SPLITS": launch.splits,
        "LEAST": launch.least,
    }


def _merge_constants(shape: AttentionShape, launch: Launch, tokens: int, *, sinks: bool) -> dict[str, Any]:
    return {
        "GROUP": shape.group,
        "TOKENS": tokens,
        "WINDOW": shape.window,
        "VALUE_DIM": shape.value_dim,
        "VALUE": power(shape.value_dim),
        "SINKS": sinks,
        "BLOCK": launch.block,
        "SPLITS": launch.splits,
        "LEAST": launch.least,
        "AT_ONCE": min(launch.splits, _AT_ONCE),
    }


def _append_constants(key_dim: int, value_dim: int, *, packed: bool) -> dict[str, Any]:
    least = 32 if packed else 1
    return {
        "KEY_DIM": key_dim,
        "KEY": _padded(key_dim, least),
        "VALUE_DIM": value_dim,
        "VALUE": _padded(value_dim, least),
        "PACKED": packed,
    }


def launches(
    shape: AttentionShape, tokens: int, *, tensor_cores: bool = True, sinks: bool = False
) -> list[Kernel]:
    """The kernels of a shape, for compiling them ahead.

    Args:
        shape: The shape.
        tokens: Query tokens.
        tensor_cores: As of :meth:`Launch.of`.
        sinks: Heads have sinks.
    """
    launch = Launch.of(shape, tokens, tensor_cores=tensor_cores)
    name, stored = POINTERS[shape.dtype], "*u8" if shape.packed else POINTERS[shape.dtype]
    rows = dict.fromkeys(("keys", "tails", "values"), stored)
    return [
        Kernel(
            triton_attention.append,
            _append_constants(shape.key_dim, shape.tail_dim or shape.value_dim, packed=shape.packed),
            {"key": name, "value": name, **rows},
            1,
        ),
        Kernel(
            triton_attention.attend,
            _attend_constants(shape, launch, tokens, capped=False),
            {"query": name, **rows},
            launch.warps,
        ),
        Kernel(
            triton_attention.merge,
            _merge_constants(shape, launch, tokens, sinks=sinks),
            {"out": name, "sinks": name if sinks else "*fp32"},
            _MERGE_WARPS,
        ),
    ]
