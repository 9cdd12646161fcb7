"""The choice of experts for a decoded token on a GPU, and the request to the host, one launch each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl

from moechat.models.decode.routers import Rule
from moechat.offload.kernels import triton_routing
from moechat.offload.kernels.launch import POINTERS, Kernel
from moechat.offload.kernels.steps import INTERPRETED, power

MOST_EXPERTS = 512
MOST_CHOSEN = 16
# Of a program that scores an expert: a thread reads 16 bytes at a time.
_REQUEST_WARPS = 4
_REQUEST_COLUMNS = 512
_SCORINGS = {
    "softmax": triton_routing.SOFTMAX.value,
    "sigmoid": triton_routing.SIGMOID.value,
    "softmax-chosen": triton_routing.SOFTMAX_CHOSEN.value,
}
_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


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
    triton_routing.route[(tokens,)](
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
        and x.dtype in POINTERS
        and weights.dtype in POINTERS
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
    picks = index.numel()
    packed = _request_memory(picks, x, routers, inputs=inputs)
    for place in range(max(1, len(routers))):
        _tell(index, weights, x, packed, picks, routers, place, inputs=inputs)
    return packed


def routed_request(
    x: torch.Tensor,
    logits: torch.Tensor,
    rule: Rule,
    correction: torch.Tensor | None,
    routers: Sequence[Ranks],
    *,
    inputs: bool,
) -> torch.Tensor:
    """:func:`request` of what :func:`route` chooses.

    Args:
        x: ``[1, hidden]``, contiguous.
        logits: ``[1, experts]``, contiguous.
        rule: As of :func:`route`.
        correction: As of :func:`route`.
        routers: As of :func:`request`.
        inputs: Likewise.
    """
    picks, experts = rule.chosen, logits.shape[1]
    packed = _request_memory(picks, x, routers, inputs=inputs)
    first = _place_constants(picks, x.shape[1], routers, 0, inputs=inputs)
    chosen = _route_constants(rule, experts, corrected=correction is not None)
    triton_routing.routed_request[(len(routers[0].weight) if routers else 1,)](
        logits,
        logits if correction is None else correction,
        rule.scale,
        x,
        *_place_arguments(x, routers, 0),
        packed,
        num_warps=_REQUEST_WARPS if routers else 1,
        **_routed_constants(first, chosen, rule),
    )
    for place in range(1, len(routers)):
        # What these read of the choice is nothing.
        _tell(packed, packed, x, packed, picks, routers, place, inputs=inputs)
    return packed


def _request_memory(picks: int, x: torch.Tensor, routers: Sequence[Ranks], *, inputs: bool) -> torch.Tensor:
    words = 2 * picks + sum(len(ranks.weight) for ranks in routers) + (x.shape[1] if inputs else 0)
    return torch.empty(words, dtype=torch.int32, device=x.device)


def _tell(
    index: torch.Tensor,
    weights: torch.Tensor,
    x: torch.Tensor,
    packed: torch.Tensor,
    picks: int,
    routers: Sequence[Ranks],
    place: int,
    *,
    inputs: bool,
) -> None:
    triton_routing.request[(len(routers[place].weight) if routers else 1,)](
        index,
        weights,
        x,
        *_place_arguments(x, routers, place),
        packed,
        num_warps=_REQUEST_WARPS,
        **_request_constants(_place_constants(picks, x.shape[1], routers, place, inputs=inputs), place),
    )


def _place_arguments(x: torch.Tensor, routers: Sequence[Ranks], place: int) -> tuple[torch.Tensor, ...]:
    """Router, bias and correction; where there is none, any tensor."""
    if not routers:
        return x, x, x
    ranks = routers[place]
    router = ranks.weight
    return (
        router,
        router if ranks.bias is None else ranks.bias,
        router if ranks.correction is None else ranks.correction,
    )


def _route_constants(rule: Rule, experts: int, *, corrected: bool) -> dict[str, Any]:
    return {
        "EXPERTS": experts,
        "PADDED": power(experts),
        "CHOSEN": rule.chosen,
        "SCORING": _SCORINGS[rule.scoring],
        "CORRECTED": corrected,
        "NORMALISE": rule.normalise,
    }


def _place_constants(
    picks: int, hidden: int, routers: Sequence[Ranks], place: int, *, inputs: bool
) -> dict[str, Any]:
    ranks = routers[place] if routers else None
    experts = 0 if ranks is None else len(ranks.weight)
    return {
        "PICKS": picks,
        "HIDDEN": hidden,
        "COLUMNS": min(_REQUEST_COLUMNS, power(hidden)),
        "SCORES_AT": 2 * picks + place * experts,
        "INPUTS_AT": 2 * picks + len(routers) * experts if inputs else -1,
        "SCORES": ranks is not None,
        "HAS_BIAS": ranks is not None and ranks.bias is not None,
        "SIGMOID_FIRST": ranks is not None and ranks.sigmoid,
        "CORRECTED": ranks is not None and ranks.correction is not None,
    }


def _request_constants(place_constants: dict[str, Any], place: int) -> dict[str, Any]:
    return {**place_constants, "PICKS_PADDED": power(place_constants["PICKS"]), "FIRST": place == 0}


def _routed_constants(
    place_constants: dict[str, Any], route_constants: dict[str, Any], rule: Rule
) -> dict[str, Any]:
    own = dict(route_constants)
    del own["CHOSEN"]  # PICKS of the request
    return {
        **place_constants,
        **own,
        "CORRECTED": place_constants["CORRECTED"],
        "OWN_CORRECTED": route_constants["CORRECTED"],
        "WEIGHTS": _TYPES[rule.weights_dtype],
    }


def launches(rule: Rule, hidden: int, experts: int, dtype: torch.dtype) -> list[Kernel]:
    """The kernels of a model, for compiling them ahead.

    Args:
        rule: Of its routers.
        hidden: Size of the hidden states.
        experts: Of a layer.
        dtype: Of the model.
    """
    some = torch.empty(0)  # it matters only whether there is one
    correction = None if rule.correction is None else some
    ranks = Ranks(torch.empty(experts, 0), some, rule.scoring == "sigmoid", correction)
    chosen = _route_constants(rule, experts, corrected=rule.correction is not None)
    place = _place_constants(rule.chosen, hidden, [ranks], 0, inputs=True)
    own = {
        "logits": POINTERS[rule.logits_dtype],
        "weights": POINTERS[rule.weights_dtype],
        "index": "*i64",
    }
    told = {
        **own,
        "x": POINTERS[dtype],
        **dict.fromkeys(("router", "bias", "correction", "own_correction"), "*fp32"),
        "packed": "*i32",
    }
    return [
        Kernel(triton_routing.route, chosen, {**own, "correction": "*fp32"}, 1),
        Kernel(triton_routing.request, _request_constants(place, 0), told, _REQUEST_WARPS),
        Kernel(triton_routing.routed_request, _routed_constants(place, chosen, rule), told, _REQUEST_WARPS),
    ]
