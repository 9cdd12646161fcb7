"""Small steps of a decoded token on a GPU, one launch each.

Norms and rotary embedding; for the choice of experts see :mod:`moechat.offload.kernels.routing`.
"""

from __future__ import annotations

from typing import Any

import torch
from triton.runtime.interpreter import InterpretedFunction

from moechat.models.decode.norms import Norm
from moechat.models.element_types import ELEMENTS
from moechat.offload.kernels import triton_steps
from moechat.offload.kernels.launch import POINTERS, Kernel

INTERPRETED = isinstance(triton_steps.rms_norm, InterpretedFunction)
# Most elements of a row that a program holds in registers.
MOST_COLUMNS = 16384
# Elements of a row that a warp takes: 16 bytes of 16-bit elements for each thread.
_COLUMNS_OF_WARP = 256
_MOST_WARPS = 16


def served(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether the kernels run on the device of ``x``, and it is of the weight's device and type."""
    device = x.device
    return (
        device == weight.device
        and x.dtype is weight.dtype
        and x.dtype in ELEMENTS
        and (device.type == "cuda" or (device.type == "cpu" and INTERPRETED))
    )


def row_stride(x: torch.Tensor) -> int | None:
    """Elements from one row of the last axis to the next; ``None``: rows lie otherwise in memory."""
    if x.ndim == 0 or x.numel() == 0 or (x.shape[-1] > 1 and x.stride(-1) != 1):
        return None
    found, count = None, 1
    for size, stride in zip(reversed(x.shape[:-1]), reversed(x.stride()[:-1]), strict=True):
        if size == 1:
            continue
        if found is None:
            found = stride
        elif stride != found * count:
            return None
        count *= size
    return x.shape[-1] if found is None else found


def rms_norm(x: torch.Tensor, weight: torch.Tensor, norm: Norm) -> torch.Tensor:
    """What :meth:`~moechat.models.decode.norms.Norm.apply` returns, contiguous.

    Args:
        x: ``[..., columns]``, with one :func:`row_stride`; at most :data:`MOST_COLUMNS` columns.
        weight: ``[columns]`` of the same type, contiguous.
        norm: The norm.

    Raises:
        ValueError: The rows have no single stride.
    """
    return _normed(x, None, weight, norm, None)


def add_rms_norm(
    x: torch.Tensor, added: torch.Tensor, weight: torch.Tensor, norm: Norm, total: torch.Tensor
) -> torch.Tensor:
    """:func:`rms_norm` of ``x + added``, which is written to ``total``.

    Args:
        x: ``[..., columns]``, with one :func:`row_stride`.
        added: Of the same shape and type, contiguous.
        weight: ``[columns]`` of the same type, contiguous.
        norm: The norm.
        total: Memory of the same shape and type, contiguous; may be that of ``added``.
    """
    return _normed(x, added, weight, norm, total)


def _normed(
    x: torch.Tensor,
    added: torch.Tensor | None,
    weight: torch.Tensor,
    norm: Norm,
    total: torch.Tensor | None,
) -> torch.Tensor:
    stride, columns = row_stride(x), x.shape[-1]
    if stride is None:
        raise ValueError(f"rows of strides {x.stride()}")
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    triton_steps.rms_norm[(x.numel() // columns,)](
        x,
        x if added is None else added,
        weight,
        out if total is None else total,
        out,
        stride,
        norm.eps,
        norm.offset,
        num_warps=_norm_warps(columns),
        **_norm_constants(columns, round_first=norm.round_first, adds=added is not None),
    )
    return out


def rotate(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    width: int,
    *,
    neighbours: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotated queries and keys, in fresh memory of the order ``[1, tokens, heads, dim]``.

    Args:
        q: ``[1, heads, tokens, dim]``; elements of a head are contiguous, heads and tokens in any order.
        k: The same with other heads.
        cos: ``[1, tokens, angles]`` of the same type, contiguous.
        sin: Likewise.
        width: First elements of a head that are rotated: ``angles``, or twice as many where the two elements
            of a pair share an angle. Even.
        neighbours: A pair are elements 2i and 2i + 1, not i and i + width / 2.
    """
    _, q_heads, tokens, dim = q.shape
    k_heads = k.shape[1]
    q_out = torch.empty((1, tokens, q_heads, dim), dtype=q.dtype, device=q.device)
    k_out = torch.empty((1, tokens, k_heads, dim), dtype=q.dtype, device=q.device)
    triton_steps.rotate[(q_heads + k_heads, tokens)](
        q,
        k,
        cos,
        sin,
        q_out,
        k_out,
        q_heads,
        k_heads,
        q.stride(1),
        q.stride(2),
        k.stride(1),
        k.stride(2),
        num_warps=1,
        NEIGHBOURS=neighbours,
        **rotate_constants(dim, cos.shape[-1], width),
    )
    return q_out.transpose(1, 2), k_out.transpose(1, 2)


def power(number: int) -> int:
    """The next power of two."""
    return 1 << max(0, number - 1).bit_length()


def _norm_warps(columns: int) -> int:
    return max(1, min(_MOST_WARPS, power(columns) // _COLUMNS_OF_WARP))


def _norm_constants(columns: int, *, round_first: bool, adds: bool) -> dict[str, Any]:
    return {"COLUMNS": columns, "PADDED": power(columns), "ROUND_FIRST": round_first, "ADDS": adds}


def rotate_constants(dim: int, angles: int, width: int) -> dict[str, Any]:
    return {
        "DIM": dim,
        "ANGLES": angles,
        "WIDTH": width,
        "HALF_PADDED": power(width // 2),
        "REST_PADDED": power(dim - width),
    }


def launches(norm: Norm, columns: int, head: tuple[int, int, int], dtype: torch.dtype) -> list[Kernel]:
    """The kernels of a model, for compiling them ahead.

    Args:
        norm: Its norms.
        columns: Elements of a row.
        head: Elements of a head, angles, and elements that these rotate.
        dtype: Of the model.
    """
    rows = dict.fromkeys(("x", "added", "weight", "total", "out"), POINTERS[dtype])
    states = dict.fromkeys(("q", "k", "cos", "sin", "q_out", "k_out"), POINTERS[dtype])
    norms = [_norm_constants(columns, round_first=norm.round_first, adds=adds) for adds in (False, True)]
    return [
        *(Kernel(triton_steps.rms_norm, constants, rows, _norm_warps(columns)) for constants in norms),
        *(
            Kernel(triton_steps.rotate, {**rotate_constants(*head), "NEIGHBOURS": neighbours}, states, 1)
            for neighbours in (False, True)
        ),
    ]
