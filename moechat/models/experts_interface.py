"""Gives experts modules without transformers' experts interface the same attributes and calls.

The decorator ``use_experts_implementation`` marks most families' experts, and calls a registered function in
place of their loop. Some families were written before it, or arrange their experts otherwise. Here their
modules get classes that look as if they had been decorated; parameters stay as they are.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from moechat.errors import UnsupportedModelError

_FUSED = ("gate_up_proj", "down_proj")


def is_experts_module(module: nn.Module) -> bool:
    """Whether a module has the attributes that transformers' decorator for experts sets."""
    return hasattr(module, "is_transposed") and hasattr(module, "has_gate")


def adapt_experts(model: PreTrainedModel, implementation: str) -> None:
    """Change the classes of experts modules that have no interface.

    Args:
        model: On the meta device.
        implementation: Name in ``ALL_EXPERTS_FUNCTIONS`` of the function that computes experts.

    Raises:
        UnsupportedModelError: The experts of a known family are used in a way that cannot be adapted.
    """
    for module in list(model.modules()):
        if type(module).__name__ == "Llama4TextMoe":
            _adapt_llama4(module, implementation)
        elif _computes_like_the_interface(module):
            _become(module, _call(implementation), is_transposed=False)


def _computes_like_the_interface(module: nn.Module) -> bool:
    """Whether fused parameters, gate and arguments are those of decorated experts."""
    if is_experts_module(module) or {name for name, _ in module.named_parameters()} != set(_FUSED):
        return False
    arguments = list(inspect.signature(module.forward).parameters)
    return hasattr(module, "_apply_gate") and arguments == ["hidden_states", "top_k_index", "top_k_weights"]


def _adapt_llama4(moe: Any, implementation: str) -> None:
    """Llama 4 weighs the inputs of its experts, not their outputs; with one expert a token that is a product
    before the layer.
    """
    if moe.top_k != 1:
        raise UnsupportedModelError(
            f"the model weighs the inputs of {moe.top_k} experts for each token, and moechat their outputs"
        )

    def apply_gate(self: Any, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        active: torch.Tensor = up * self.act_fn(gate)
        return active

    def forward(self: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        flat = hidden_states.reshape(-1, self.hidden_dim)
        scores, logits = self.router(flat)
        weights, index = scores.max(dim=-1, keepdim=True)
        routed = self.experts(flat * weights, index, torch.ones_like(weights))
        return self.shared_expert(flat) + routed, logits

    _become(moe.experts, _call(implementation), is_transposed=True, _apply_gate=apply_gate)
    _with_class(moe, forward=forward)


def _call(implementation: str) -> Any:
    def forward(
        self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> Any:
        compute = ALL_EXPERTS_FUNCTIONS[implementation]
        return compute(self, hidden_states, top_k_index, top_k_weights)

    return forward


def _become(module: nn.Module, forward: Any, **members: Any) -> None:
    _with_class(module, forward=forward, has_gate=True, has_bias=False, **members)


def _with_class(module: nn.Module, **members: Any) -> None:
    """Give a module a class of its own; an attribute ``forward`` of the module still comes first."""
    module.__class__ = type(type(module).__name__, (type(module),), members)
