"""Routers that norm and scale their inputs, and scale the weights of chosen experts, as Gemma 4's do.

``logits = proj(norm(x) * scale * factor)``; the softmax over all experts gives the chosen ones and their
weights, which are divided by their sum and multiplied by ``per_expert_scale`` of each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from moechat import _native
from moechat.models.decode.norms import Norm
from moechat.models.decode.probe import FEW_TOKENS, close, hooks_of, probing, takes_hidden_states_only
from moechat.models.element_types import ELEMENTS

_PROBES = 16
_NORM, _PROJECTION, _INPUTS, _EXPERTS, _FACTOR = (
    "norm",
    "proj",
    "scale",
    "per_expert_scale",
    "scalar_root_size",
)


@dataclass(frozen=True)
class ScaledRouter:
    """A router.

    Attributes:
        module: The module. It returns the softmax of all experts, weights and indices of the chosen ones.
        norm: Of its inputs, without a weight.
        chosen: Experts per token.
        factor: Of its normalised and scaled inputs.
    """

    module: Any
    norm: Norm
    chosen: int
    factor: float

    @property
    def weight(self) -> torch.Tensor:
        """Of the product, ``[experts, hidden]``."""
        weight: torch.Tensor = self.module._modules[_PROJECTION].weight
        return weight

    @property
    def inputs(self) -> torch.Tensor:
        """Factors of the normalised elements, ``[hidden]``."""
        inputs: torch.Tensor = self.module._parameters[_INPUTS]
        return inputs

    @property
    def experts(self) -> torch.Tensor:
        """Factors of the experts' weights, ``[experts]``."""
        experts: torch.Tensor = self.module._parameters[_EXPERTS]
        return experts

    def apply(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Reference implementation in torch, of ``[tokens, hidden]``."""
        rows = self.norm.apply(hidden, torch.ones(hidden.shape[-1])) * self.inputs * self.factor
        scores = nn.functional.linear(rows, self.weight).softmax(-1, dtype=torch.float32)
        weights, index = scores.topk(self.chosen, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        return scores, weights * self.experts[index], index


def recognise_scaled_router(module: nn.Module, bare_norms: Mapping[nn.Module, Norm]) -> ScaledRouter | None:
    """``module`` as such a router; ``None`` if it is none.

    Args:
        module: Any module.
        bare_norms: Norms without a weight.
    """
    children, parameters = dict(module.named_children()), dict(module._parameters)
    norm, projection = children.get(_NORM), children.get(_PROJECTION)
    factor = getattr(module, _FACTOR, None)
    if set(children) != {_NORM, _PROJECTION} or set(parameters) != {_INPUTS, _EXPERTS}:
        return None
    if norm not in bare_norms or type(projection) is not nn.Linear or projection.bias is not None:
        return None
    weight = projection.weight
    tensors = (weight, *parameters.values())
    if type(factor) is not float or weight.dtype not in ELEMENTS or any(True for _ in module.buffers()):
        return None
    if any(each is None or each.dtype is not weight.dtype for each in tensors):
        return None
    if not all(each.is_cpu and each.is_contiguous() for each in tensors) or "forward" in vars(module):
        return None
    shapes = [tuple(parameters[name].shape) for name in (_INPUTS, _EXPERTS)]
    if shapes != [weight.shape[1:], weight.shape[:1]] or not takes_hidden_states_only(module):
        return None
    with probing() as generator:
        hidden = torch.randn((_PROBES, weight.shape[1]), generator=generator).to(weight.dtype)
        try:
            found = module(hidden.clone())
        except Exception:  # it needs other inputs than hidden states
            return None
        if not isinstance(found, tuple) or len(found) != 3 or found[2].dtype is not torch.int64:
            return None
        if found[2].ndim != 2 or not 0 < found[2].shape[1] < len(weight):
            return None
        router = ScaledRouter(module, bare_norms[norm], found[2].shape[1], factor)
        wanted = router.apply(hidden)
        # Scores are compared instead of indices: either of two experts with equal ones may be chosen.
        theirs, ours = (
            (scores, weights, scores.gather(1, index)) for scores, weights, index in (found, wanted)
        )
        return router if all(map(close, theirs, ours)) else None


def native_scaled_router(router: ScaledRouter) -> Callable[[torch.Tensor], Any]:
    """A native ``forward`` for ``router.module``."""
    weight, inputs, own = router.weight, router.inputs, router.module.forward
    experts, hidden_size = weight.shape
    dtype, kind, chosen = weight.dtype, ELEMENTS[weight.dtype], router.chosen
    ones, factors = torch.ones(hidden_size, dtype=dtype), router.experts.detach().float().contiguous()
    norm = _native.RmsNorm(kind, ones.data_ptr(), hidden_size, router.norm.eps, 0.0, False)
    run = _native.Routing(
        kind, weight.data_ptr(), 0, experts, hidden_size, "softmax", chosen, 0, True, 1.0, "float32", kind
    ).scaled(norm, inputs.data_ptr(), router.factor, factors.data_ptr())
    most, empty = FEW_TOKENS * hidden_size, torch.empty
    hooks = hooks_of(router.module.children())

    def forward(hidden: torch.Tensor) -> Any:
        count = hidden.numel()
        if (
            any(hooks)
            or hidden.dtype is not dtype
            or not 0 < count <= most
            or hidden.shape[-1] != hidden_size
            or not hidden.is_contiguous()
            or not hidden.is_cpu
        ):
            return own(hidden)
        tokens = count // hidden_size
        logits, weights = empty((tokens, experts), dtype=dtype), empty((tokens, chosen), dtype=torch.float32)
        index = empty((tokens, chosen), dtype=torch.int64)
        run(hidden.data_ptr(), tokens, logits.data_ptr(), index.data_ptr(), weights.data_ptr())
        return logits.softmax(-1, dtype=torch.float32), weights, index

    forward.__dict__.update(kept=(weight, inputs, ones, factors), run=run, chosen=chosen)
    return forward
