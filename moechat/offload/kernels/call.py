"""A launch of a kernel of decoded tokens, through Triton, by the driver, or prepared for native code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from moechat import _native


@dataclass(frozen=True)
class Call:
    """A launch of a kernel of decoded tokens.

    Attributes:
        kernel: Triton's function.
        build: What tells its builds apart.
        grid: Programs.
        pointers: Its first arguments; names stand for those that are known later.
        numbers: Those behind them, likewise.
        options: Everything else that Triton needs to build it.
        table: Its last argument, if it has one.
    """

    kernel: Any
    build: tuple[object, ...]
    grid: tuple[int, int, int]
    pointers: Sequence[torch.Tensor | str]
    numbers: Sequence[float | str]
    options: Callable[[], dict[str, Any]]
    table: Sequence[torch.Tensor] = ()

    def addresses(self) -> list[Any]:
        """Those of the pointers, and names."""
        return [each if isinstance(each, str) else each.data_ptr() for each in self.pointers]

    def arguments(self, addresses: list[Any]) -> list[Any]:
        """All arguments for the driver."""
        return [*addresses, *self.numbers, *[each.data_ptr() for each in self.table]]


@dataclass(frozen=True)
class PreparedLayer:
    """The launches of an expert layer of a decoded token.

    Attributes:
        blocks: Adds blocks.
        total: The weighted sum.
        total_with_others: The same with what was computed elsewhere; ``None``: nothing is.
    """

    blocks: _native.PreparedLaunch
    total: _native.PreparedLaunch
    total_with_others: _native.PreparedLaunch | None
