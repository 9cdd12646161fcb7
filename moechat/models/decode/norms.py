"""Root-mean-square norms, recognised by their results.

Families differ: some multiply by the weight, some by the weight plus one; some round the normalised row to
the model's type before the product, some after it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import nn

from moechat import _native
from moechat.models.decode.probe import close, probing, takes_hidden_states_only
from moechat.models.element_types import ELEMENTS

_BARE_WIDTH = 48  # of the rows that a norm without a weight is tried with


@dataclass(frozen=True)
class Norm:
    """``(offset + weight) * x / sqrt(mean(x²) + eps)`` over the last axis.

    Attributes:
        eps: Added to the mean.
        offset: 0 or 1.
        round_first: The normalised row is rounded to the model's type before the product.
    """

    eps: float
    offset: float
    round_first: bool

    def apply(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Reference implementation in torch."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        if self.round_first:
            wide = wide.to(x.dtype).float()
        return ((self.offset + weight.float()) * wide).to(x.dtype)


def recognise_norm(module: nn.Module) -> Norm | None:
    """The norm that ``module`` computes; ``None`` if it is not one of the native code's."""
    weight = module._parameters.get("weight")
    others = [value for name, value in module.named_parameters() if name != "weight"]
    if weight is None or others or weight.ndim != 1 or weight.dtype not in ELEMENTS or not weight.is_cpu:
        return None
    if any(True for _ in module.children()) or any(True for _ in module.buffers()):
        return None
    if not takes_hidden_states_only(module):
        return None
    with probing() as generator:
        probe = _probe(generator, weight.shape[0]).to(weight.dtype)
        try:
            wanted = module(probe.clone())
        except Exception:  # it needs other inputs than hidden states
            return None
        if not isinstance(wanted, torch.Tensor):
            return None
        candidates = [
            (0.0 if exact else 1.0, norm)
            for norm in _candidates(module)
            for found in [norm.apply(probe, weight)]
            if all(map(close, found, wanted))
            for exact in [torch.equal(found, wanted)]
        ]
        return min(candidates, key=lambda pair: pair[0])[1] if candidates else None


def _probe(generator: torch.Generator, columns: int) -> torch.Tensor:
    """Rows of ordinary size, and rows so small that eps matters. Half of them have a mean other than 0:
    otherwise a norm that subtracts the mean would differ by less than bfloat16 rounding.
    """
    probe = torch.randn((8, columns), generator=generator)
    probe[4:] += 1.0
    return probe * torch.tensor([[1.0], [30.0], [1e-3], [1e-2]]).repeat(2, 1)


def _candidates(module: nn.Module) -> Iterable[Norm]:
    numbers = {float(value) for value in vars(module).values() if type(value) is float and 0 <= value < 0.1}
    for eps in sorted(numbers):
        for offset in (0.0, 1.0):
            for round_first in (True, False):
                yield Norm(eps, offset, round_first)


def recognise_bare_norm(module: nn.Module) -> Norm | None:
    """The norm without a weight that ``module`` computes; ``None`` if it is not one of the native code's."""
    parts = (module.parameters(), module.buffers(), module.children())
    if any(True for part in parts for _ in part) or not takes_hidden_states_only(module):
        return None
    with probing() as generator:
        probe = _probe(generator, _BARE_WIDTH)
        for norm in _candidates(module):
            if norm.offset or norm.round_first:
                continue
            try:
                if all(_computes(module, norm, probe.to(dtype)) for dtype in ELEMENTS):
                    return norm
            except Exception:  # it needs other inputs than hidden states
                return None
    return None


def _computes(module: nn.Module, norm: Norm, probe: torch.Tensor) -> bool:
    wanted = module(probe.clone())
    found = norm.apply(probe, torch.ones(probe.shape[-1]))
    return isinstance(wanted, torch.Tensor) and all(map(close, found, wanted))


def native_bare_norm(module: nn.Module, norm: Norm) -> Callable[[torch.Tensor], torch.Tensor]:
    """A native ``forward`` for ``module``, which computes ``norm`` of rows of any width.

    Its attribute ``part`` is a function from a type and a width to the native part and the weight it reads.
    """
    own = module.forward

    @functools.cache
    def part(dtype: torch.dtype, columns: int) -> tuple[_native.RmsNorm, torch.Tensor]:
        ones = torch.ones(columns, dtype=dtype)
        return _native.RmsNorm(ELEMENTS[dtype], ones.data_ptr(), columns, norm.eps, 0.0, False), ones

    def forward(x: torch.Tensor) -> torch.Tensor:
        dtype, columns = x.dtype, x.shape[-1]
        if dtype not in ELEMENTS or not (x.is_contiguous() and x.is_cpu and x.numel()):
            result: torch.Tensor = own(x)
            return result
        out = torch.empty_like(x)
        part(dtype, columns)[0](x.data_ptr(), out.data_ptr(), x.numel() // columns)
        return out

    forward.__dict__["part"] = part
    return forward


def native_norm(module: nn.Module, norm: Norm) -> Callable[[torch.Tensor], torch.Tensor]:
    """A native ``forward`` for ``module``, which computes ``norm``."""
    weight, own = module.weight, module.forward
    assert isinstance(weight, torch.Tensor)
    if not weight.is_contiguous():
        raise ValueError("the weight of a norm is not contiguous")
    columns, dtype = weight.shape[0], weight.dtype
    run = _native.RmsNorm(
        ELEMENTS[dtype], weight.data_ptr(), columns, norm.eps, norm.offset, norm.round_first
    )
    empty_like = torch.empty_like

    def forward(x: torch.Tensor) -> torch.Tensor:
        if x.dtype is not dtype or not x.is_contiguous() or x.shape[-1] != columns or not x.is_cpu:
            result: torch.Tensor = own(x)
            return result
        out = empty_like(x)
        run(x.data_ptr(), out.data_ptr(), x.numel() // columns)
        return out

    forward.__dict__["weight"] = weight  # keeps the memory alive that ``run`` reads
    forward.__dict__["run"] = run
    return forward
