"""Stand-ins for projections, so that a module can be tried wherever and however these keep their weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

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
