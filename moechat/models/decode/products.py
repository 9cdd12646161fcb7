"""Dense layers as native code multiplies by them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from moechat import _native
from moechat.models.element_types import ELEMENTS
from moechat.models.linear import PackedLinear, StoredLinear

_MOST_COPIED = 1 << 20  # elements


def native_products(modules: Iterable[Any]) -> list[_native.DenseProduct] | None:
    """The products of some layers; ``None`` if one of them keeps weights that native code does not read."""
    found = list(modules)
    if not all(isinstance(module, StoredLinear | PackedLinear) for module in found):
        return None
    return [module.product() for module in found]


def row_product(module: nn.Module) -> _native.DenseProduct | None:
    """The product of a layer with few rows, which is also left as torch has it; ``None`` as above."""
    products = native_products([module])
    if products is not None:
        return products[0]
    weight = module._parameters.get("weight")
    if type(module) is not nn.Linear or weight is None or module.bias is not None:
        return None
    halves = _in_halves(weight.detach())
    if halves is None:
        return None
    words = halves.view(torch.int16).numpy().view("uint16")
    return _native.rows16_product(words, halves.dtype is torch.float16, None)


def _in_halves(weight: torch.Tensor) -> torch.Tensor | None:
    """The same values in a type of 16 bits; ``None`` if they have none.

    Models that compute in float32 mostly have weights that were stored in 16 bits.
    """
    if not (weight.is_cpu and weight.is_contiguous()):
        return None
    if weight.dtype in (torch.bfloat16, torch.float16):
        return weight
    if weight.dtype is not torch.float32 or weight.numel() > _MOST_COPIED:
        return None
    made = (weight.to(dtype) for dtype in (torch.bfloat16, torch.float16))
    return next((each for each in made if torch.equal(each.float(), weight)), None)


def native_rows(module: nn.Linear) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """A ``forward`` for a layer that is left as torch has it, such as a router's, natively for a few tokens.

    torch multiplies a single token by it on one thread. ``None``: native code does not read its weights.
    """
    product = row_product(module)
    if product is None:
        return None
    own, weight, columns, rows = module.forward, module.weight, module.in_features, module.out_features
    parameters, most = module._parameters, _native.MOST_STEP_TOKENS

    def forward(input: torch.Tensor) -> torch.Tensor:
        tokens = input.numel() // columns
        if (
            not 0 < tokens <= most
            or input.shape[-1] != columns
            or input.dtype is not weight.dtype
            or not (input.is_cpu and input.is_contiguous())
            or input.requires_grad
            or parameters["weight"] is not weight  # another one since then
        ):
            return own(input)
        out = torch.empty((*input.shape[:-1], rows), dtype=input.dtype)
        product(ELEMENTS[input.dtype], input.data_ptr(), tokens, out.data_ptr())
        return out

    return forward


def is_sequence(hidden: torch.Tensor, size: int, dtype: torch.dtype) -> bool:
    """Whether hidden states are those of one sequence, ``[1, tokens, size]``, as native code reads them."""
    return (
        hidden.dim() == 3
        and hidden.shape[0] == 1
        and hidden.shape[1] > 0
        and hidden.shape[2] == size
        and hidden.dtype is dtype
        and hidden.is_cpu
        and hidden.is_contiguous()
        and not hidden.requires_grad
    )
