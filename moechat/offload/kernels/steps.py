"""Small steps of a decoded token on a GPU, one launch each.

Norms, rotary embedding, the choice of experts, and the request that the host reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from triton.runtime.interpreter import InterpretedFunction

from moechat.models.decode.norms import Norm
from moechat.models.decode.routers import Rule
from moechat.offload.kernels import triton_steps
from moechat.offload.kernels.launch import Kernel

INTERPRETED = isinstance(triton_steps.rms_norm, InterpretedFunction)
# Most elements of a row that a program holds in registers.
MOST_COLUMNS = 16384
MOST_EXPERTS = 512
MOST_CHOSEN = 16
# Elements of a row that a warp takes: 16 bytes of 16-bit elements for each thread.
_COLUMNS_OF_WARP = 256
_MOST_WARPS = 16
# Of a program that scores an expert: a thread reads 16 bytes at a time.
_REQUEST_WARPS = 4
_REQUEST_COLUMNS = 512
_SCORINGS = {
    "softmax": triton_steps.SOFTMAX.value,
    "sigmoid": triton_steps.SIGMOID.value,
    "softmax-chosen": triton_steps.SOFTMAX_CHOSEN.value,
}
_NAMES = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16"}


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
    stride, columns = row_stride(x), x.shape[-1]
    if stride is None:
        raise ValueError(f"rows of strides {x.stride()}")
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    triton_steps.rms_norm[(x.numel() // columns,)](
        x,
        weight,
        out,
        stride,
        norm.eps,
        norm.offset,
        num_warps=_norm_warps(columns),
        **_norm_constants(columns, round_first=norm.round_first),
    )
    return out


def rotate(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotated queries and keys, in fresh memory of the order ``[1, tokens, heads, dim]``.

    Args:
        q: ``[1, heads, tokens, dim]``; elements of a head are contiguous, heads and tokens in any order.
        k: The same with other heads.
        cos: ``[1, tokens, angles]`` of the same type, contiguous.
        sin: Likewise.
        width: First elements of a head that are rotated: ``angles``, or twice as many where the two elements
            of a pair share an angle. Even.
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
        **_rotate_constants(dim, cos.shape[-1], width),
    )
    return q_out.transpose(1, 2), k_out.transpose(1, 2)


def route(
    logits: torch.Tensor, rule: Rule, correction: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights ``[tokens, chosen]`` of the rule's type and experts, int64 ``[tokens, chosen]``, best first.

    Args:
        logits: ``[tokens, experts]``, contiguous; at most :data:`MOST_EXPERTS` experts.
        rule: At most :data:`MOST_CHOSEN` experts are chosen. Its correction is not used.
        correction: ``[experts]``, contiguous, on the device of the logits, or ``None``.
    """
    tokens, experts = logits.shape
    weights = torch.empty((tokens, rule.chosen), dtype=rule.weights_dtype, device=logits.device)
    index = torch.empty((tokens, rule.chosen), dtype=torch.int64, device=logits.device)
    triton_steps.route[(tokens,)](
        logits,
        logits if correction is None else correction,
        weights,
        index,
        rule.scale,
        num_warps=1,
        **_route_constants(rule, experts, corrected=correction is not None),
    )
    return weights, index


@dataclass(frozen=True)
class Ranks:
    """A router that :func:`request` computes; see :class:`moechat.models.router_search.Router`.

    Attributes:
        weight: float32 ``[experts, hidden]``, contiguous.
        bias: float32 ``[experts]`` or ``None``.
        sigmoid: Applied before the correction.
        correction: float32 ``[experts]`` or ``None``.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    sigmoid: bool
    correction: torch.Tensor | None


def serves_request(x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> bool:
    """Whether :func:`request` takes these tensors of one token."""
    device = x.device
    return (
        (device.type == "cuda" or (device.type == "cpu" and INTERPRETED))
        and x.dtype in _NAMES
        and weights.dtype in _NAMES
        and index.dtype is torch.int64
        and x.shape[0] == 1
        and all(each.device == device and each.is_contiguous() for each in (x, index, weights))
    )


def request(
    x: torch.Tensor,
    index: torch.Tensor,
    weights: torch.Tensor,
    routers: Sequence[Ranks],
    *,
    inputs: bool,
) -> torch.Tensor:
    """The words of a layer's request, int32; see :class:`moechat.offload.gpu_layer.ExpertRequest`.

    Args:
        x: ``[1, hidden]``; :func:`serves_request`.
        index: ``[1, picks]``.
        weights: ``[1, picks]``.
        routers: Of the layers that are scored, with as many experts each.
        inputs: ``x`` is part of it.
    """
    picks, hidden = index.numel(), x.shape[1]
    experts = len(routers[0].weight) if routers else 0
    scored = 2 * picks + experts * len(routers)
    packed = torch.empty(scored + (hidden if inputs else 0), dtype=torch.int32, device=x.device)
    for place, ranks in enumerate(routers or (None,)):
        router = x if ranks is None else ranks.weight
        bias = None if ranks is None else ranks.bias
        correction = None if ranks is None else ranks.correction
        triton_steps.request[(max(1, experts),)](
            index,
            weights,
            x,
            router,
            router if bias is None else bias,
            router if correction is None else correction,
            packed,
            num_warps=_REQUEST_WARPS,
            **_request_constants(
                picks,
                hidden,
                scores_at=2 * picks + place * experts,
                inputs_at=scored if inputs else -1,
                first=place == 0,
                ranks=ranks,
            ),
        )
    return packed


def _power(number: int) -> int:
    """The next power of two."""
    return 1 << max(0, number - 1).bit_length()


def _norm_warps(columns: int) -> int:
    return max(1, min(_MOST_WARPS, _power(columns) // _COLUMNS_OF_WARP))


def _norm_constants(columns: int, *, round_first: bool) -> dict[str, Any]:
    return {"COLUMNS": columns, "PADDED": _power(columns), "ROUND_FIRST": round_first}


def _rotate_constants(dim: int, angles: int, width: int) -> dict[str, Any]:
    return {
        "DIM": dim,
        "ANGLES": angles,
        "WIDTH": width,
        "HALF_PADDED": _power(width // 2),
        "REST_PADDED": _power(dim - width),
    }


def _route_constants(rule: Rule, experts: int, *, corrected: bool) -> dict[str, Any]:
    return {
        "EXPERTS": experts,
        "PADDED": _power(experts),
        "CHOSEN": rule.chosen,
        "SCORING": _SCORINGS[rule.scoring],
        "CORRECTED": corrected,
        "NORMALISE": rule.normalise,
    }


def _request_constants(
    picks: int, hidden: int, *, scores_at: int, inputs_at: int, first: bool, ranks: Ranks | None
) -> dict[str, Any]:
    return {
        "PICKS": picks,
        "PICKS_PADDED": _power(picks),
        "HIDDEN": hidden,
        "COLUMNS": min(_REQUEST_COLUMNS, _power(hidden)),
        "SCORES_AT": scores_at,
        "INPUTS_AT": inputs_at,
        "FIRST": first,
        "SCORES": ranks is not None,
        "HAS_BIAS": ranks is not None and ranks.bias is not None,
        "SIGMOID_FIRST": ranks is not None and ranks.sigmoid,
        "CORRECTED": ranks is not None and ranks.correction is not None,
    }


def launches(
    norm: Norm, columns: int, head: tuple[int, int, int], rule: Rule, experts: int, dtype: torch.dtype
) -> list[Kernel]:
    """The kernels of a model, for compiling them ahead.

    Args:
        norm: Its norms.
        columns: Elements of a row.
        head: Elements of a head, angles, and elements that these rotate.
        rule: Of its routers.
        experts: Of a layer.
        dtype: Of the model.
    """
    name = _NAMES[dtype]
    norms = dict.fromkeys(("x", "weight", "out"), name)
    states = dict.fromkeys(("q", "k", "cos", "sin", "q_out", "k_out"), name)
    choice = {
        "logits": _NAMES[rule.logits_dtype],
        "correction": "*fp32",
        "weights": _NAMES[rule.weights_dtype],
        "index": "*i64",
    }
    some = torch.empty(0)  # it matters only whether there is one
    ranks = Ranks(some, some, rule.scoring == "sigmoid", None if rule.correction is None else some)
    told = {
        "index": "*i64",
        "weights": _NAMES[rule.weights_dtype],
        "x": name,
        **dict.fromkeys(("router", "bias", "correction"), "*fp32"),
        "packed": "*i32",
    }
    scored = 2 * rule.chosen + experts
    told_constants = _request_constants(
        rule.chosen, columns, scores_at=2 * rule.chosen, inputs_at=scored, first=True, ranks=ranks
    )
    norm_constants = _norm_constants(columns, round_first=norm.round_first)
    route_constants = _route_constants(rule, experts, corrected=rule.correction is not None)
    return [
        Kernel(triton_steps.rms_norm, norm_constants, norms, _norm_warps(columns)),
        Kernel(triton_steps.rotate, _rotate_constants(*head), states, 1),
        Kernel(triton_steps.route, route_constants, choice, 1),
        Kernel(triton_steps.request, told_constants, told, _REQUEST_WARPS),
    ]
