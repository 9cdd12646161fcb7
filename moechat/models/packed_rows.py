"""Keys and values in 8 bits: rows of codes, as native/src/kernels/isa/decode_api.h describes them."""

from __future__ import annotations

from functools import cache
from typing import Protocol

import torch

from moechat import _native
from moechat.models.lazy_memory import unwritten

# What a row with fewer bits than an element of the model's type holds.
ROW_TYPE = torch.uint8


class RowCodec(Protocol):
    """Packs and unpacks rows on a kind of device; takes checked arguments of :func:`pack`, :func:`unpack`."""

    def pack(self, states: torch.Tensor, rows: torch.Tensor) -> None:
        """Write ``states``, whose last axis is contiguous, to packed rows."""
        ...

    def unpack(self, rows: torch.Tensor, dim: int, dtype: torch.dtype) -> torch.Tensor:
        """The elements of packed rows."""
        ...


# By kind of device; the native code serves the CPU.
_CODECS: dict[str, RowCodec] = {}


def register_codec(device: str, codec: RowCodec) -> None:
    """Use ``codec`` for tensors on devices of a kind, such as ``cuda``."""
    _CODECS[device] = codec


@cache
def row_bytes(dim: int) -> int:
    """Bytes of the row of ``dim`` elements."""
    return _native.packed_row_bytes(dim)


def pack(states: torch.Tensor, rows: torch.Tensor) -> None:
    """Write ``states`` to packed rows.

    Args:
        states: ``[1, heads, tokens, dim]`` in float32, bfloat16 or float16, at least one token.
        rows: uint8 ``[1, heads, tokens, row_bytes(dim)]``; the rows of a head are contiguous.
    """
    if states.stride(-1) != 1:
        states = states.contiguous()
    batch, heads, tokens, dim = states.shape
    _check(rows, batch, heads, tokens, dim)
    codec = _CODECS.get(rows.device.type)
    if codec is not None:
        codec.pack(states, rows)
        return
    _native.pack_rows(
        _name(states.dtype),
        states.data_ptr(),
        states.stride(1),
        states.stride(2),
        heads,
        tokens,
        dim,
        rows.data_ptr(),
        rows.stride(1),
    )


def unpack(rows: torch.Tensor, dim: int, dtype: torch.dtype) -> torch.Tensor:
    """The elements of packed rows: ``[1, heads, tokens, dim]`` in ``dtype``; exact in the type they had.

    Args:
        rows: As of :func:`pack`.
        dim: Elements of a row.
        dtype: Type of the result.
    """
    batch, heads, tokens, _ = rows.shape
    _check(rows, batch, heads, tokens, dim)
    codec = _CODECS.get(rows.device.type)
    if codec is not None:
        return codec.unpack(rows, dim, dtype)
    out = torch.empty((1, heads, tokens, dim), dtype=dtype)
    _native.unpack_rows(_name(dtype), rows.data_ptr(), rows.stride(1), heads, tokens, dim, out.data_ptr())
    return out


def unpack_like(rows: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
    """As :func:`unpack`, in the type and with the elements of ``states``."""
    return unpack(rows, states.shape[-1], states.dtype)


def empty_rows(states: torch.Tensor, tokens: int) -> torch.Tensor:
    """Memory for packed rows of the heads of ``states``, uninitialised."""
    return unwritten((*states.shape[:-2], tokens, row_bytes(states.shape[-1])), ROW_TYPE, states.device)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _check(rows: torch.Tensor, batch: int, heads: int, tokens: int, dim: int) -> None:
    """The code of a device takes addresses; a layer that gave it others would write over other memory."""
    length = row_bytes(dim)
    if (
        batch != 1
        or rows.shape != (1, heads, tokens, length)
        or rows.dtype is not ROW_TYPE
        or rows.stride()[2:] != (length, 1)
        or not (rows.is_cpu or rows.device.type in _CODECS)
    ):
        raise ValueError(
            f"packed rows {tuple(rows.shape)} {rows.dtype} do not hold {tokens} tokens of {heads} heads of "
            f"{dim} elements"
        )
