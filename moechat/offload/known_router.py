"""What a router computes, for the kernels that compute it in its place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from moechat.models.decode.probe import FEW_TOKENS
from moechat.models.decode.routers import Rule
from moechat.models.skeleton import EXPERTS_RUNNER
from moechat.offload.gpu_layer import GpuExpertLayer
from moechat.offload.kernels import layer_steps, routing
from moechat.offload.kernels.steps import served


@dataclass(frozen=True)
class KnownRouter:
    """What a router computes.

    Attributes:
        rule: Without its correction.
        correction: Name of its parameter or buffer; ``None``: it has none.
        widened: Hidden states and weights are converted to float32 before the product.
    """

    rule: Rule
    correction: str | None
    widened: bool

    def correction_of(self, module: nn.Module) -> torch.Tensor | None:
        """The correction that ``module`` adds now."""
        return None if self.correction is None else getattr(module, self.correction)

    def serves(self, module: nn.Module, hidden: torch.Tensor) -> bool:
        """Whether the kernels compute what ``module`` does, for these hidden states."""
        weight, correction = module._parameters.get("weight"), self.correction_of(module)
        return (
            weight is not None
            and served(hidden, hidden)
            and hidden.device == weight.device
            and hidden.dtype is self.rule.inputs
            and (weight.dtype is hidden.dtype or (self.widened and weight.dtype is torch.float32))
            and hidden.is_contiguous()
            and hidden.shape[-1] == weight.shape[-1]
            and hidden.numel() <= FEW_TOKENS * weight.shape[-1]
            and (correction is None or (correction.device == hidden.device and correction.is_contiguous()))
        )

    def logits(self, module: nn.Module, x: torch.Tensor) -> torch.Tensor | None:
        """Of ``x`` ``[1, hidden]``, in one launch; ``None``: the product does not take the weights."""
        weight, bias = module.get_parameter("weight"), module._parameters.get("bias")
        if not layer_steps.serves_rows(weight, bias, x, wide=self.widened):
            return None
        dtype = torch.float32 if self.widened else x.dtype
        (logits,) = layer_steps.products(x, [weight], [bias], dtype)
        return logits

    def joins(self, module: nn.Module, others: Sequence[nn.Module], x: torch.Tensor) -> bool:
        """Whether one launch can have the logits of ``x`` ``[1, hidden]`` and products of ``others``."""
        return (
            not self.widened
            and len(others) < layer_steps.MOST_MATRICES
            and module._parameters.get("bias") is None
            and layer_steps.serves_rows(module.get_parameter("weight"), None, x)
            and all(layer_steps.serves_product(other, x) and other.bias is None for other in others)
        )

    def routed(
        self,
        module: nn.Module,
        experts: nn.Module,
        x: torch.Tensor,
        logits: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Sum of the experts that the router ``module`` chooses for ``x`` ``[1, hidden]``.

        Args:
            module: The router.
            experts: The experts.
            x: Contiguous.
            logits: ``[1, experts]``, if they are there already.
        """
        runner: GpuExpertLayer = vars(experts)[EXPERTS_RUNNER]
        if self.serves(module, x):
            logits = self.logits(module, x) if logits is None else logits
            if logits is not None:
                return runner.forward_routed(x, logits, self.rule, self.correction_of(module))
        made = module(x)
        _, weights, index = (made[self.rule.order[place]] for place in range(3))
        return runner.forward(x, index, weights)

    def launch_first(self, module: nn.Module, x: torch.Tensor, logits: torch.Tensor | None = None) -> None:
        """Launch what :meth:`routed` launches before the experts, so that it is built; arguments as there."""
        if logits is None and self.serves(module, x):
            logits = self.logits(module, x)
        if logits is not None:
            routing.routed_request(x, logits, self.rule, self.correction_of(module), [], inputs=False)
