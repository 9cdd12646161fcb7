"""Stand-ins for projections and experts, so that a module can be tried however these keep their weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from moechat.models.decode.routers import Rule
from moechat.models.experts_interface import is_experts_module
from moechat.models.skeleton import EXPERTS_RUNNER

# A prime, so that no two heads have the same rows.
_FEW_ROWS = 61


class RandomProjection(nn.Module):
    """Takes the place of a projection: its rows are multiples of a few random ones, so that it costs little.

    Args:
        own: The projection.
        normal: Makes random numbers.
    """

    def __init__(self, own: Any, normal: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.in_features, self.out_features = own.in_features, own.out_features
        self._few = normal(_FEW_ROWS, own.in_features) / own.in_features**0.5
        self._row = torch.arange(own.out_features) % _FEW_ROWS
        self._factor = normal(own.out_features)
        self._bias = normal(own.out_features) if own.bias is not None else torch.zeros_like(self._factor)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., out_features]``."""
        made: torch.Tensor = (x @ self._few.T)[..., self._row] * self._factor + self._bias
        return made


@contextmanager
def random_projections(
    module: nn.Module, names: Iterable[str], normal: Callable[..., torch.Tensor]
) -> Iterator[None]:
    """Replace projections of a module in the block.

    Args:
        module: The module.
        names: Of its projections.
        normal: Makes random numbers of the type of the hidden states.
    """
    own: dict[str, nn.Module | None] = {name: module._modules[name] for name in names}
    try:
        for name, projection in own.items():
            module._modules[name] = RandomProjection(projection, normal)
        yield
    finally:
        module._modules.update(own)


class StandIn:
    """Takes the place of experts, a feed-forward part or linear attention.

    Attributes:
        answer: What it returns.
        seen: Its last arguments.
    """

    def __init__(self, answer: torch.Tensor) -> None:
        self.answer = answer
        self.seen: tuple[torch.Tensor, ...] = ()

    def forward(self, x: torch.Tensor, *choice: torch.Tensor) -> torch.Tensor:
        """The answer, in the shape of ``x``."""
        self.seen = (x, *choice)
        return self.answer.view_as(x)

    @contextmanager
    def in_place_of(self, module: nn.Module) -> Iterator[None]:
        """Replace a module in the block: its ``forward``, or, of routed experts, what runs them."""
        held = vars(module)
        name, value = (EXPERTS_RUNNER, self) if is_experts_module(module) else ("forward", self.forward)
        missing = object()
        before = held.get(name, missing)
        held[name] = value
        try:
            yield
        finally:
            if before is missing:
                del held[name]
            else:
                held[name] = before


def chooses(router: nn.Module | None, rule: Rule, x: torch.Tensor, choice: Sequence[torch.Tensor]) -> bool:
    """Whether ``choice``, what experts were called with besides ``x``, is what the router chooses for it.

    For the experts' own inputs: one of two that nearly tie may be chosen for other rounding.
    """
    if router is None or len(choice) != 2:
        return False
    made = router(x) if rule.given is None else router(x, rule.given)
    return all(map(torch.equal, choice, (made[rule.order[2]], made[rule.order[1]])))
