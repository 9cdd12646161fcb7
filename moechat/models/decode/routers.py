"""Routers, recognised by the experts that they choose and their weights.

A router is a module that takes hidden states, and possibly a correction of the scores that its block keeps,
and returns logits, indices and weights of the chosen experts, in any order. Routers that first choose groups
of experts stay torch modules.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import nn

from moechat import _native
from moechat.models.decode.probe import FEW_TOKENS, probing, takes_hidden_states_only, tolerance
from moechat.models.decode.wiring import names_of
from moechat.models.element_types import ELEMENTS
from moechat.models.experts_interface import is_experts_module

_PROBES = 48
_SCORINGS = ("softmax", "sigmoid", "softmax-chosen")


@dataclass(frozen=True)
class Rule:
    """Computes choice and weights from a router's logits.

    Attributes:
        scoring: ``softmax`` over all experts, ``sigmoid``, or ``softmax-chosen`` over the chosen ones only.
        chosen: Experts per token.
        correction: float32 ``[experts]``, added to the scores for the choice only, or ``None``.
        normalise: The weights of a token sum up to ``scale``.
        scale: Factor of the weights.
        order: Positions of logits, weights and indices in the module's result.
        logits_dtype: Type of the logits.
        weights_dtype: Type of the weights.
        rounds: Scores are rounded to the type of the logits.
        given: What the router takes beside hidden states, if it takes anything.
        inputs: Type of the hidden states: that of the router's weight, or the weight is float32.
    """

    scoring: str
    chosen: int
    correction: torch.Tensor | None
    normalise: bool
    scale: float
    order: tuple[int, int, int]
    logits_dtype: torch.dtype
    weights_dtype: torch.dtype
    rounds: bool = False
    given: torch.Tensor | None = None
    inputs: torch.dtype = torch.float32

    def apply(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Reference implementation in torch: float32 weights and indices ``[tokens, chosen]``."""
        scores = logits.float()
        if self.scoring == "softmax":
            scores = scores.softmax(dim=-1)
        elif self.scoring == "sigmoid":
            scores = scores.sigmoid()
        if self.rounds:
            scores = scores.to(logits.dtype).float()
        ranks = scores if self.correction is None else scores + self.correction
        index = ranks.topk(self.chosen, dim=-1).indices
        weights = scores.gather(1, index)
        if self.scoring == "softmax-chosen":
            weights = weights.softmax(dim=-1)
        elif self.normalise:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return weights * self.scale, index


def given_corrections(model: nn.Module) -> dict[nn.Module, torch.Tensor]:
    """Modules with experts beside them that also take a vector of their block, with this vector."""
    found = {}
    for block in model.modules():
        children = list(block.children())
        if not any(map(is_experts_module, children)):
            continue
        for module in children:
            weight = module._parameters.get("weight")
            if weight is None or weight.ndim != 2 or _parameter_count(module) != 2:
                continue
            held = [*block._buffers.values(), *block._parameters.values()]
            vectors = [each for each in held if each is not None and each.shape == weight.shape[:1]]
            if len(vectors) == 1 and vectors[0].dtype in ELEMENTS and vectors[0].is_cpu:
                found[module] = vectors[0]
    return found


def _parameter_count(module: nn.Module) -> int:
    try:
        return len(inspect.signature(module.forward).parameters)
    except (TypeError, ValueError):
        return 0


def recognise_router(
    module: nn.Module, given: torch.Tensor | None = None, inputs: torch.dtype | None = None
) -> Rule | None:
    """The rule of ``module``; ``None`` if it is not a router of the native code.

    Args:
        module: Any module.
        given: What it takes beside hidden states; see :func:`given_corrections`.
        inputs: Type of hidden states; ``None``: that of its weight.
    """
    weight = module._parameters.get("weight")
    if isinstance(module, nn.Linear | nn.Embedding):
        return None
    if weight is None or weight.ndim != 2 or weight.dtype not in ELEMENTS or not weight.is_cpu:
        return None
    if any(True for _ in module.children()) or not weight.is_contiguous():
        return None
    inputs = weight.dtype if inputs is None else inputs
    if inputs not in ELEMENTS or weight.dtype not in (inputs, torch.float32):
        return None
    if not takes_hidden_states_only(module) and given is None:
        return None
    bias = module._parameters.get("bias")
    if bias is not None and (bias.dtype is not weight.dtype or bias.shape != weight.shape[:1]):
        return None
    with probing() as generator:
        hidden = torch.randn((_PROBES, weight.shape[1]), generator=generator)
        spread = float((hidden @ weight.float().T).std(dim=-1).mean())
        hidden = (hidden / spread if spread > 0 else hidden).to(inputs)
        try:
            found = module(hidden.clone()) if given is None else module(hidden.clone(), given)
        except Exception:  # it needs other inputs than hidden states
            return None
        parts = _parts(found, len(weight))
        if parts is None:
            return None
        order, (logits, weights, index) = parts
        wanted = torch.nn.functional.linear(
            hidden.float(), weight.float(), None if bias is None else bias.float()
        )
        if not _near(logits, wanted, weight.dtype):
            return None
        vectors = [
            tensor.detach().float().reshape(-1)
            for tensor in [*module.buffers(), *module.parameters()]
            if tensor is not bias and tensor.numel() == len(weight)
        ]
        vectors += [] if given is None else [given.detach().float()]
        # In 16 bits the scores of a probe rarely tie, so that its choice would seldom tell.
        rounds = {"float", "float32"}.isdisjoint(names_of(module)) and logits.dtype is not torch.float32
        for rule in _rules(order, logits, weights, index, vectors, rounds):
            mine, chosen = rule.apply(logits)
            scale = float((weights.float().sum() / mine.sum()).nan_to_num(1.0))
            rule = replace(rule, scale=1.0 if abs(scale - 1) < 1e-3 else scale)
            if _agrees(rule, logits, mine * rule.scale, chosen, weights.float(), index):
                return replace(rule, given=given, inputs=inputs)
    return None


def _parts(
    found: Any, experts: int
) -> tuple[tuple[int, int, int], tuple[torch.Tensor, torch.Tensor, torch.Tensor]] | None:
    if not isinstance(found, tuple) or len(found) != 3:
        return None
    if not all(isinstance(item, torch.Tensor) and item.ndim == 2 and len(item) == _PROBES for item in found):
        return None
    index = [i for i, item in enumerate(found) if item.dtype is torch.int64]
    floats = [i for i, item in enumerate(found) if item.dtype in ELEMENTS]
    if len(index) != 1 or len(floats) != 2 or found[index[0]].shape[1] >= experts:
        return None
    logits = [i for i in floats if found[i].shape[1] == experts]
    weights = [i for i in floats if found[i].shape == found[index[0]].shape]
    if len(logits) != 1 or len(weights) != 1:
        return None
    order = (logits[0], weights[0], index[0])
    return order, (found[order[0]], found[order[1]], found[order[2]])


def _rules(
    order: tuple[int, int, int],
    logits: torch.Tensor,
    weights: torch.Tensor,
    index: torch.Tensor,
    vectors: list[torch.Tensor],
    rounds_first: bool,
) -> Iterator[Rule]:
    for scoring in _SCORINGS:
        for correction in (None, *vectors):
            if scoring == "softmax-chosen" and correction is not None:
                continue
            for normalise, rounds in product((False, True), (rounds_first, not rounds_first)):
                if rounds and (scoring != "sigmoid" or logits.dtype is torch.float32):
                    continue
                yield Rule(
                    scoring,
                    index.shape[1],
                    correction,
                    normalise,
                    1.0,
                    order,
                    logits.dtype,
                    weights.dtype,
                    rounds,
                )


def _near(found: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype) -> bool:
    size = float(wanted.abs().max())
    return bool(((found.float() - wanted).abs() <= tolerance(dtype) * size).all())


def _agrees(
    rule: Rule,
    logits: torch.Tensor,
    mine: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    index: torch.Tensor,
) -> bool:
    """Whether the weights of every token and the logits of the chosen experts are equal.

    Logits are compared instead of indices, because either of two experts with equal logits, which are common
    in 16-bit types, may be chosen.
    """
    kind = torch.bfloat16 if torch.bfloat16 in (rule.logits_dtype, rule.weights_dtype) else rule.weights_dtype
    if not _near(weights.sort(dim=-1).values, mine.sort(dim=-1).values, kind):
        return False
    picked, wanted = logits.gather(1, chosen), logits.gather(1, index)
    return bool((picked.float().sort(dim=-1).values == wanted.float().sort(dim=-1).values).all())


def native_router(module: nn.Module, rule: Rule) -> Callable[..., Any]:
    """A native ``forward`` for ``module`` with the rule ``rule``."""
    weight, own, bias = module.weight, module.forward, module._parameters.get("bias")
    assert isinstance(weight, torch.Tensor)
    experts, hidden_size = weight.shape
    dtype, chosen, given = rule.inputs, rule.chosen, rule.given
    correction = None if rule.correction is None else rule.correction.contiguous()
    run = _native.Routing(
        ELEMENTS[dtype],
        weight.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        experts,
        hidden_size,
        rule.scoring,
        chosen,
        0 if correction is None else correction.data_ptr(),
        rule.normalise,
        rule.scale,
        ELEMENTS[rule.weights_dtype],
        ELEMENTS[rule.logits_dtype],
        rule.rounds,
        weight.dtype is not dtype,
    )
    most, empty = FEW_TOKENS * hidden_size, torch.empty
    places = [rule.order.index(place) for place in range(3)]

    def forward(hidden: torch.Tensor, *beside: torch.Tensor | None) -> Any:
        count = hidden.numel()
        if (
            hidden.dtype is not dtype
            or count > most
            or hidden.shape[-1] != hidden_size
            or not hidden.is_contiguous()
            or not hidden.is_cpu
            or (beside != () if given is None else len(beside) != 1 or beside[0] is not given)
        ):
            return own(hidden, *beside)
        tokens = count // hidden_size
        logits = empty((tokens, experts), dtype=rule.logits_dtype)
        weights = empty((tokens, chosen), dtype=rule.weights_dtype)
        index = empty((tokens, chosen), dtype=torch.int64)
        run(hidden.data_ptr(), tokens, logits.data_ptr(), index.data_ptr(), weights.data_ptr())
        made = (logits, weights, index)
        return made[places[0]], made[places[1]], made[places[2]]

    forward.__dict__["kept"] = (weight, bias, correction, given)  # keeps the memory alive that ``run`` reads
    forward.__dict__["run"] = run
    forward.__dict__["chosen"] = chosen
    forward.__dict__["rule"] = replace(rule, correction=None, given=None)
    return forward
