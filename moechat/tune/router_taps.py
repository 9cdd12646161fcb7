"""Observes a model's routers in training: the probabilities of all experts, with gradient, and choices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from moechat.errors import UnsupportedModelError
from moechat.models.router_search import Router, Scoring, find_routers
from moechat.models.skeleton import ExpertsModule


@dataclass(frozen=True)
class TappedLayer:
    """One expert layer of the model; an :class:`moechat.models.router_search.ExpertLayer`.

    Attributes:
        name: Name of the experts module inside the model.
        module: The module.
        num_experts: Experts in the layer.
        hidden_size: Width of the hidden states.
    """

    name: str
    module: nn.Module
    num_experts: int
    hidden_size: int


@dataclass(frozen=True)
class LiveRouter:
    """A router as it is trained.

    Attributes:
        weight: The model's parameter, ``[experts, hidden]``, or ``[hidden, experts]`` if ``transposed``.
        bias: The model's parameter ``[experts]``, or ``None``.
        transposed: See ``weight``.
        sigmoid: Choices go by a sigmoid of the output; else by its softmax.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    transposed: bool
    sigmoid: bool

    @property
    def parameters(self) -> list[nn.Parameter]:
        """All that is trained."""
        return [self.weight] if self.bias is None else [self.weight, self.bias]

    def probabilities(self, hidden: torch.Tensor) -> torch.Tensor:
        """Probabilities of the experts, float32 ``[tokens, experts]``, for inputs ``[tokens, hidden]``.

        The softmax of the output; where the choice goes by a sigmoid, its scores divided by their sum.
        """
        weight = self.weight.T if self.transposed else self.weight
        bias = None if self.bias is None else self.bias.float()
        with torch.autocast(hidden.device.type, enabled=False):  # differences of 1e-3 count here
            logits = nn.functional.linear(hidden.float(), weight.float(), bias)
        if self.sigmoid:
            scores = logits.sigmoid()
            return scores / scores.sum(dim=-1, keepdim=True)
        return logits.softmax(dim=-1)


@dataclass
class Routing:
    """The routing of one pass, by expert layer.

    Attributes:
        hidden: Inputs of the routers, ``[tokens, hidden]``.
        chosen: Chosen experts, int64 ``[tokens, K]``.
    """

    hidden: dict[int, torch.Tensor] = field(default_factory=dict)
    chosen: dict[int, torch.Tensor] = field(default_factory=dict)


class RouterTaps:
    """The routers of a model, and hooks that record a pass.

    Attributes:
        routers: One for each expert layer, in order.
        experts: Experts of a layer.
    """

    def __init__(self, model: nn.Module, entries: Sequence[ExpertsModule]) -> None:
        """Find the routers; call it before adapters are added.

        Args:
            model: With its weights.
            entries: Its expert layers.

        Raises:
            UnsupportedModelError: A layer's router was not found, or layers differ in their experts.
        """
        layers = [
            TappedLayer(e.name, model.get_submodule(e.name), e.num_experts, e.hidden_size) for e in entries
        ]
        sizes = {layer.num_experts for layer in layers}
        if len(sizes) != 1:
            raise UnsupportedModelError(f"the layers have different numbers of experts: {sorted(sizes)}")
        self.experts = sizes.pop()
        found = find_routers(model, layers)
        self.routers: list[LiveRouter] = []
        for layer, router in zip(layers, found, strict=True):
            if router is None:
                raise UnsupportedModelError(
                    f"the router beside {layer.name} was not found: its choices cannot be computed again"
                )
            self.routers.append(_live(model, layer, router))
        self._routing: Routing | None = None
        for ordinal, layer in enumerate(layers):
            layer.module.register_forward_pre_hook(self._hook(ordinal), with_kwargs=True)

    @contextmanager
    def recording(self) -> Iterator[Routing]:
        """Record the passes of the block; the last one counts."""
        self._routing = Routing()
        try:
            yield self._routing
        finally:
            self._routing = None

    def _hook(self, ordinal: int) -> Any:
        def record(module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
            if self._routing is None:
                return
            hidden = arguments[0] if arguments else named["hidden_states"]
            index = named["top_k_index"] if "top_k_index" in named else arguments[1]
            self._routing.hidden[ordinal] = hidden.reshape(-1, hidden.shape[-1])
            self._routing.chosen[ordinal] = index.reshape(-1, index.shape[-1]).long()

        return record

    def probabilities(self, routing: Routing, rows: int) -> torch.Tensor:
        """Probabilities that the current routers give the inputs of a pass.

        Args:
            routing: Of the pass.
            rows: Sequences of the pass.

        Returns:
            float32 ``[layers, rows, tokens, experts]``.
        """
        found = [
            router.probabilities(routing.hidden[ordinal]).reshape(rows, -1, self.experts)
            for ordinal, router in enumerate(self.routers)
        ]
        return torch.stack(found)

    def chosen(self, routing: Routing, rows: int) -> torch.Tensor:
        """Chosen experts of a pass, int64 ``[layers, rows, tokens, K]``."""
        found = [routing.chosen[ordinal] for ordinal in range(len(self.routers))]
        return torch.stack([index.reshape(rows, -1, index.shape[-1]) for index in found])


def _live(model: nn.Module, layer: TappedLayer, router: Router) -> LiveRouter:
    """The model's own parameters of a router that was found by its values."""
    owner = model.get_submodule(layer.name.rpartition(".")[0])
    own = layer.name.rpartition(".")[2] + "."
    weight, bias, transposed = None, None, False
    for name, parameter in owner.named_parameters():
        if name.startswith(own):
            continue
        values = parameter.detach().float()
        if values.shape == router.weight.shape and torch.equal(values, router.weight):
            weight, transposed = parameter, False
        elif (
            values.ndim == 2
            and values.T.shape == router.weight.shape
            and torch.equal(values.T, router.weight)
        ):
            weight, transposed = parameter, True
        elif router.bias is not None and torch.equal(values.reshape(-1), router.bias.reshape(-1)):
            bias = parameter
    if weight is None or (router.bias is not None and bias is None):
        raise UnsupportedModelError(
            f"the router beside {layer.name} is no parameter, so it cannot be trained"
        )
    return LiveRouter(weight, bias, transposed, router.scoring is Scoring.SIGMOID)
