"""Finds the routers of a model by their choices, not by the name of its family.

A router is a parameter ``[experts, hidden]`` in the module that also has the experts module. Some families
add a bias to its output, some a correction for the choice only (DeepSeek-V3 and others). The variant, and the
scoring function before the correction, are found by comparing with the experts that the model's own module
chooses for known hidden states. A router whose choices cannot be reproduced is left out, as it cannot be used
for prediction.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Protocol

import torch
from torch import nn

_PROBES = 64
# Least agreement with the model's choices, above chance. Routers that first choose groups of experts
# (DeepSeek-V2 and -V3) agree only in part, because groups are not modelled.
_LEAST_AGREEMENT = 0.25


class ExpertLayer(Protocol):
    """The part of :class:`moechat.models.skeleton.ExpertsModule` that is used here.

    Attributes:
        name: Name of the experts module inside the model.
        module: The module.
        num_experts: Experts in the layer.
        hidden_size: Width of the hidden states.
    """

    @property
    def name(self) -> str: ...
    @property
    def module(self) -> nn.Module: ...
    @property
    def num_experts(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...


class Scoring(StrEnum):
    """Function applied to a router's output before the correction is added."""

    NONE = "none"
    SIGMOID = "sigmoid"
    SOFTMAX = "softmax"


@dataclass(frozen=True)
class Router:
    """Ranks the experts of a layer.

    Attributes:
        weight: float32 ``[experts, hidden]``, contiguous; a copy unless the model has it in this form.
        bias: float32 ``[experts]`` added to the product, or ``None``.
        scoring: Applied before the correction; ``NONE`` without one, as it does not change the ranking then.
        correction: float32 ``[experts]`` added after the scoring, for the choice only, or ``None``.
        agreement: Share of the model's choices for random hidden states that are among the top k of
            :meth:`scores`.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None = None
    scoring: Scoring = Scoring.NONE
    correction: torch.Tensor | None = None
    agreement: float = 0.0

    def scores(self, hidden: torch.Tensor) -> torch.Tensor:
        """Scores of the experts, float32 ``[tokens, experts]``, for hidden states ``[tokens, hidden]``."""
        logits = torch.nn.functional.linear(hidden.float(), self.weight, self.bias)
        if self.scoring is Scoring.SIGMOID:
            logits = logits.sigmoid()
        elif self.scoring is Scoring.SOFTMAX:
            logits = logits.softmax(dim=-1)
        return logits if self.correction is None else logits + self.correction

    def distribution(self, hidden: torch.Tensor) -> torch.Tensor:
        """Probabilities of the experts, float32 ``[tokens, experts]``, for inputs ``[tokens, hidden]``.

        The softmax of the output; where the choice goes by a sigmoid, the scores divided by their sum, before
        the correction.
        """
        logits = torch.nn.functional.linear(hidden.float(), self.weight, self.bias)
        if self.scoring is Scoring.SIGMOID:
            scores = logits.sigmoid()
            return scores / scores.sum(dim=-1, keepdim=True)
        return logits.softmax(dim=-1)


def find_routers(model: nn.Module, experts: Iterable[ExpertLayer]) -> list[Router | None]:
    """The router of each expert layer.

    Args:
        model: The model with its dense weights loaded.
        experts: Its expert layers, in order.

    Returns:
        One router per layer; ``None`` if no router agrees with the model's choices.
    """
    # Not inference tensors, as they are used inside and outside of inference mode.
    with torch.inference_mode(False), torch.no_grad():
        return [_find(_owner(model, entry), entry) for entry in experts]


def copied_bytes(model: nn.Module, experts: Iterable[ExpertLayer]) -> int:
    """Most bytes of the float32 copies of routers that :func:`find_routers` makes.

    A router is a candidate only if it reads the input of its experts. Where that is narrower than the hidden
    states (experts in a latent space), no layer has one.

    Args:
        model: The model; its weights may be on the meta device.
        experts: Its expert layers.
    """
    total = 0
    for entry in experts:
        shapes = {tuple(tensor.shape) for _, tensor in _beside(_owner(model, entry), entry)}
        if shapes & {(entry.num_experts, entry.hidden_size), (entry.hidden_size, entry.num_experts)}:
            total += entry.num_experts * entry.hidden_size * torch.float32.itemsize
    return total


def _owner(model: nn.Module, entry: ExpertLayer) -> nn.Module:
    return model.get_submodule(entry.name.rpartition(".")[0])


def _beside(owner: nn.Module, entry: ExpertLayer) -> list[tuple[str, torch.Tensor]]:
    """Tensors of the module that has the experts, without theirs."""
    own = entry.name.rpartition(".")[2] + "."
    tensors = [*owner.named_parameters(), *owner.named_buffers()]
    return [(name, tensor) for name, tensor in tensors if not name.startswith(own)]


def _find(owner: nn.Module, entry: ExpertLayer) -> Router | None:
    named = [(name, tensor) for name, tensor in _beside(owner, entry) if not tensor.is_meta]
    weights = [(name, _weight(tensor, entry)) for name, tensor in named]
    vectors = [
        (name, _float32(tensor.reshape(-1)))
        for name, tensor in named
        if tensor.is_floating_point() and tensor.numel() == entry.num_experts and tensor.ndim <= 2
    ]
    candidates = [
        candidate
        for name, weight in weights
        if weight is not None
        for candidate in _candidates(name, weight, vectors)
    ]
    if not candidates:
        return None
    hidden, chosen = _probe(owner, entry, candidates[0].weight)
    if chosen is None:
        return None
    rated = [replace(item, agreement=_agreement(item, hidden, chosen)) for item in candidates]
    # Of equal candidates (a correction of zeros, for example) max takes the first, which is the simplest.
    best = max(rated, key=lambda item: item.agreement)
    chance = chosen.shape[-1] / entry.num_experts
    return best if best.agreement >= chance + _LEAST_AGREEMENT * (1 - chance) else None


def _weight(tensor: torch.Tensor, entry: ExpertLayer) -> torch.Tensor | None:
    """The tensor as ``[experts, hidden]``; ``None`` if it has another shape."""
    if tensor.shape == (entry.num_experts, entry.hidden_size):
        return _float32(tensor)
    if tensor.shape == (entry.hidden_size, entry.num_experts):
        return _float32(tensor.T)
    return None


def _float32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().float().contiguous()


def _candidates(name: str, weight: torch.Tensor, vectors: Sequence[tuple[str, torch.Tensor]]) -> list[Router]:
    """All routers that the weight can form with the vectors in its module, simplest first."""
    own = name.rpartition(".")[0]
    biases = [vector for key, vector in vectors if key == (f"{own}.bias" if own else "bias")]
    found = [Router(weight), *(Router(weight, bias) for bias in biases)]
    for plain in list(found):
        for _, vector in vectors:
            if not any(vector is bias for bias in biases):
                found += [replace(plain, scoring=kind, correction=vector) for kind in Scoring]
    return found


class _ChosenError(Exception):
    """Ends a pass at the experts module and carries the chosen experts out."""

    def __init__(self, index: torch.Tensor | None) -> None:
        super().__init__()
        self.index = index


def _probe(
    owner: nn.Module, entry: ExpertLayer, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Hidden states ``[tokens, hidden]`` and the experts ``[tokens, k]`` that the module chooses for them."""
    generator = torch.Generator().manual_seed(20260)
    hidden = torch.randn((_PROBES, entry.hidden_size), generator=generator)
    # Scaled so that logits differ by about 1, as in trained routers; then neither rounding nor a saturated
    # sigmoid hides the order.
    spread = float((hidden @ weight.T).std(dim=-1).mean())
    hidden /= spread if spread > 0 else 1.0
    dtype = next((p.dtype for p in owner.parameters() if p.is_floating_point()), torch.float32)
    hidden = hidden.to(dtype)

    def catch(module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        index = named.get("top_k_index", arguments[1] if len(arguments) > 1 else None)
        raise _ChosenError(index)

    hook = entry.module.register_forward_pre_hook(catch, with_kwargs=True)
    try:
        owner(hidden[None].clone())
    except _ChosenError as caught:
        index = caught.index
        if isinstance(index, torch.Tensor) and index.numel() and index.numel() % _PROBES == 0:
            return hidden.float(), index.reshape(_PROBES, -1)
    except Exception:
        # The module needs more than hidden states (it may be a whole decoder layer), so no choice is known.
        return hidden.float(), None
    finally:
        hook.remove()
    return hidden.float(), None


def _agreement(router: Router, hidden: torch.Tensor, chosen: torch.Tensor) -> float:
    best = router.scores(hidden).topk(chosen.shape[-1], dim=-1).indices
    return float((chosen[:, :, None] == best[:, None, :]).any(dim=-1).float().mean())
