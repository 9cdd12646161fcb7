"""Steps of a whole decoder layer for one token, one launch each: products, and what becomes of heads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from moechat.models.decode.norms import Norm
from moechat.models.packed_rows import ROW_TYPE
from moechat.offload.kernels import steps, triton_layer
from moechat.offload.kernels.attention import append
from moechat.offload.kernels.launch import POINTERS, Kernel

MOST_MATRICES = 4
# Columns that a program reads at a time, of all its rows, and those of a thread: 16 bytes of 16-bit elements.
_AT_ONCE = 1024
_LANE = 8
_WARPS = 4
# Rows of a program where there are many. A router has few: then each row is a program, as far as there are
# multiprocessors.
_ROWS, _MANY_ROWS = 4, 1024
# Given where heads have no norms; the kernel does not read it then.
_NO_NORM = Norm(0.0, 0.0, round_first=False)


def serves_product(module: nn.Module, x: torch.Tensor) -> bool:
    """Whether :func:`products` computes a module for ``x`` ``[1, in_features]``."""
    return type(module) is nn.Linear and serves_rows(module.weight, module.bias, x)


def serves_rows(
    weight: torch.Tensor, bias: torch.Tensor | None, x: torch.Tensor, *, wide: bool = False
) -> bool:
    """Whether :func:`products` takes these: plain rows of the type of ``x`` ``[1, columns]``; if ``wide``,
    also of float32.
    """
    return weight.shape[1] == x.shape[-1] and serves_weights(weight, bias, x, wide=wide)


def serves_weights(
    weight: torch.Tensor, bias: torch.Tensor | None, x: torch.Tensor, *, wide: bool = False
) -> bool:
    """As :func:`serves_rows`, for a row of another size."""
    given = [weight] if bias is None else [weight, bias]
    types = (x.dtype, torch.float32) if wide else (x.dtype,)
    return all(each.dtype in types and each.device == x.device and each.is_contiguous() for each in given)


def projected(x: torch.Tensor, modules: Sequence[Any]) -> list[torch.Tensor]:
    """``[1, out_features]`` of each module, contiguous: in one launch, or by the modules themselves.

    Args:
        x: ``[1, in_features]``, contiguous.
        modules: One to :data:`MOST_MATRICES` projections.
    """
    if all(serves_product(module, x) for module in modules):
        biases = [module.bias for module in modules]
        if len({bias is None for bias in biases}) == 1:
            return products(x, [module.weight for module in modules], biases, x.dtype)
    return [module(x).contiguous() for module in modules]


def products(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    dtype: torch.dtype,
    *,
    factors: torch.Tensor | None = None,
    head: int = 0,
) -> list[torch.Tensor]:
    """``x @ weight.T + bias`` for each matrix, ``[1, rows]``; products and sums are in float32.

    The results are parts of one tensor, one behind the other.

    Args:
        x: ``[1, columns]``, contiguous.
        weights: One to :data:`MOST_MATRICES` matrices ``[rows, columns]`` of one type, contiguous.
        biases: ``[rows]``, contiguous, or ``None``: for all or for none.
        dtype: Of the results.
        factors: The row is the SiLU of ``x`` times these, ``[1, columns]``, contiguous, of its type.
        head: Elements of a head: the row is ``x`` times the sigmoids of gates, one for each element;
            ``factors`` are ``[1, 2 * columns]``, those of a head behind as many other elements. 0: see there.
    """
    rows, columns = [len(weight) for weight in weights], x.shape[-1]
    out = torch.empty((1, sum(rows)), dtype=dtype, device=x.device)
    spare = MOST_MATRICES - len(weights)
    there = [weight if bias is None else bias for weight, bias in zip(weights, biases, strict=True)]
    constants = _product_constants(
        columns, rows, has_bias=biases[0] is not None, factors=factors is not None, head=head
    )
    programs = sum(-(-count // constants["ROWS"]) for count in rows)
    triton_layer.products[(programs,)](
        x,
        x if factors is None else factors,
        *weights,
        *[weights[0]] * spare,
        *there,
        *[there[0]] * spare,
        out,
        *rows,
        *[0] * spare,
        num_warps=_WARPS,
        **constants,
    )
    return list(torch.split(out, rows, dim=1))


def place_heads(
    states: Sequence[torch.Tensor],
    norms: tuple[tuple[torch.Tensor, Norm], tuple[torch.Tensor, Norm]] | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    width: int,
    dim: int,
    keys: torch.Tensor,
    values: torch.Tensor,
    numbers: torch.Tensor,
    place: int,
    *,
    gated: bool = False,
) -> torch.Tensor:
    """Write the keys and values of a token to the cache; returns its queries, ``[1, heads, 1, dim]``.

    Args:
        states: Queries, keys and values ``[1, heads * dim]``, contiguous, as projections return them.
        norms: Weights ``[dim]`` and norms of each query and of each key before their rotation, or ``None``.
        cos: ``[1, 1, angles]`` of the type of ``states``, contiguous.
        sin: Likewise.
        width: As of :func:`moechat.offload.kernels.steps.rotate`.
        dim: Elements of a head.
        keys: Reserved memory ``[1, kv_heads, slots, row]``, contiguous.
        values: The same for the values.
        numbers: int64 ``[1 + layers]``; see :mod:`moechat.offload.kernels.triton_attention`.
        place: The layer.
        gated: Each query has as many gates behind it, which are left out.
    """
    q, k, v = states
    q_stride = 2 * dim if gated else dim
    q_heads, kv_heads = q.numel() // q_stride, k.numel() // dim
    q_out = torch.empty((1, q_heads, 1, dim), dtype=q.dtype, device=q.device)
    packed = keys.dtype is ROW_TYPE
    # Packed rows are made by the kernel that does so everywhere, from keys that were rotated aside.
    k_to = torch.empty((1, kv_heads, 1, dim), dtype=k.dtype, device=k.device) if packed else keys
    (q_weight, q_norm), (k_weight, k_norm) = ((q, _NO_NORM), (k, _NO_NORM)) if norms is None else norms
    triton_layer.heads[(q_heads + (1 if packed else 2) * kv_heads,)](
        q,
        k,
        v,
        q_weight,
        k_weight,
        cos,
        sin,
        q_out,
        k_to,
        v if packed else values,
        numbers,
        place,
        dim if packed else keys.stride(1),
        dim if packed else values.stride(1),
        q_stride,
        q_heads,
        kv_heads,
        q_norm.eps,
        k_norm.eps,
        q_norm.offset,
        k_norm.offset,
        num_warps=1,
        **_heads_constants(
            dim, cos.shape[-1], width, None if norms is None else (q_norm, k_norm), placed=not packed
        ),
    )
    if packed:
        append(k_to, v.view(1, kv_heads, 1, dim), keys, values, numbers, place)
    return q_out


def add_shared(x: torch.Tensor, shared: torch.Tensor, gate: torch.Tensor | None) -> torch.Tensor:
    """``x`` plus the result of a shared expert, in memory of its own.

    Args:
        x: ``[1, columns]``, contiguous.
        shared: Likewise, of the same type.
        gate: A number whose sigmoid multiplies ``shared``, of the same type; ``None``: nothing does.
    """
    out, constants = torch.empty_like(x), _shared_constants(x.shape[-1], gated=gate is not None)
    triton_layer.add_shared[(-(-constants["COLUMNS"] // constants["AT_ONCE"]),)](
        x,
        shared,
        x if gate is None else gate,
        out,
        num_warps=_WARPS,
        **constants,
    )
    return out


def _shared_constants(columns: int, *, gated: bool) -> dict[str, Any]:
    return {"COLUMNS": columns, "AT_ONCE": min(_AT_ONCE, steps.power(columns)), "GATED": gated}


def _product_constants(
    columns: int, rows: Sequence[int], *, has_bias: bool, factors: bool = False, head: int = 0
) -> dict[str, Any]:
    at_once = min(_AT_ONCE, steps.power(columns))
    return {
        "COLUMNS": columns,
        "AT_ONCE": at_once,
        "LANE": min(_LANE, at_once),
        "ROWS": _ROWS if sum(rows) >= _MANY_ROWS else 1,
        "MATRICES": len(rows),
        "HAS_BIAS": has_bias,
        "FACTORS": factors,
        "HEAD": head,
    }


def _heads_constants(
    dim: int, angles: int, width: int, norms: tuple[Norm, Norm] | None, *, placed: bool
) -> dict[str, Any]:
    return {
        **steps.rotate_constants(dim, angles, width),
        "PADDED": steps.power(dim),
        "NORMED": norms is not None,
        "Q_ROUND_FIRST": norms is not None and norms[0].round_first,
        "K_ROUND_FIRST": norms is not None and norms[1].round_first,
        "PLACED": placed,
    }


def launches(
    hidden: int,
    rows: tuple[int, int, int],
    head: tuple[int, int, int],
    norm: Norm | None,
    dtype: torch.dtype,
    *,
    has_bias: bool,
) -> list[Kernel]:
    """The kernels of a layer, for compiling them ahead.

    Args:
        hidden: Size of the hidden states.
        rows: Of the projections to queries, keys and values.
        head: Elements of a head, angles, and elements that these rotate.
        norm: Of queries and keys.
        dtype: Of the model.
        has_bias: Projections have one.
    """
    name = POINTERS[dtype]
    matrices = dict.fromkeys(
        (
            "x",
            "factors",
            "out",
            *(f"{name}_{place}" for name in ("matrix", "bias") for place in range(MOST_MATRICES)),
        ),
        name,
    )
    states = dict.fromkeys(
        ("q", "k", "v", "q_weight", "k_weight", "cos", "sin", "q_out", "keys", "values"), name
    )
    norms = None if norm is None else (norm, norm)
    shapes = ((hidden, rows, dtype), (rows[0], (hidden,), dtype), (hidden, (_MANY_ROWS // 8,), torch.float32))
    return [
        *(
            Kernel(
                triton_layer.products,
                _product_constants(columns, sizes, has_bias=has_bias),
                {**matrices, "out": POINTERS[out]},
                _WARPS,
            )
            for columns, sizes, out in shapes
        ),
        *(
            Kernel(
                triton_layer.products,
                _product_constants(rows[1], (hidden,), has_bias=has_bias, factors=True, head=elements),
                matrices,
                _WARPS,
            )
            for elements in (0, head[0])
        ),
        Kernel(
            triton_layer.add_shared,
            _shared_constants(hidden, gated=True),
            dict.fromkeys(("x", "shared", "gate", "out"), name),
            _WARPS,
        ),
        *(
            Kernel(triton_layer.heads, _heads_constants(*head, norms, placed=placed), states, 1)
            for placed in (True, False)
        ),
    ]
