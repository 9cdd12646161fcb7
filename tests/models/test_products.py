"""Layers that torch keeps, multiplied natively for a few tokens, and what is left to torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from moechat import _native
from moechat.models.decode.probe import close
from moechat.models.decode.products import native_rows, row_product
from moechat.models.linear import PackedLinear, StoredLinear

HALVES = [torch.bfloat16, torch.float16]


def linear(dtype: torch.dtype = torch.bfloat16, *, bias: bool = False) -> nn.Linear:
    torch.manual_seed(3)
    return nn.Linear(70, 33, bias=bias).to(dtype)


def packed() -> PackedLinear:
    layout = _native.LinearLayout(33, 70, 8)
    weights = torch.randn((33, 70), generator=torch.Generator().manual_seed(3))
    return PackedLinear(layout, _native.pack_linear(layout, weights.numpy()), None, 32, torch.bfloat16)


def stored() -> StoredLinear:
    return StoredLinear(linear().weight.detach().contiguous(), None, torch.bfloat16)


@pytest.mark.parametrize("dtype", HALVES)
@torch.inference_mode()
def test_a_few_tokens_have_the_products_of_torch(dtype: torch.dtype) -> None:
    module = linear(dtype)
    forward = native_rows(module)
    assert forward is not None
    for shape in ((70,), (1, 1, 70), (1, 5, 70), (_native.MOST_STEP_TOKENS, 70)):
        x = torch.randn(shape).to(dtype)
        assert close(forward(x), module(x))
        assert torch.equal(forward(x).view(-1, 33)[:1], forward(x.view(-1, 70)[:1]))


def test_what_native_code_does_not_serve_is_left_to_torch() -> None:
    module = linear()
    forward = native_rows(module)
    assert forward is not None
    many, apart = torch.randn(40, 70).bfloat16(), torch.randn(70, 4).bfloat16().T
    for x in (many, apart, torch.empty(0, 70, dtype=torch.bfloat16)):
        assert torch.equal(forward(x), module(x))
    for x in (torch.randn(2, 35).bfloat16(), torch.randn(1, 140).bfloat16(), torch.randn(1, 70)):
        with pytest.raises(RuntimeError):
            forward(x)
    asked = torch.randn(1, 70).bfloat16().requires_grad_()
    assert forward(asked).requires_grad
    module.weight = nn.Parameter(torch.zeros_like(module.weight))
    assert not forward(many[:1]).any(), "another weight is noticed"


def test_layers_with_a_bias_or_of_another_type_have_no_such_product() -> None:
    class Louder(nn.Linear):
        pass

    for module in (linear(bias=True), linear(torch.float32), Louder(70, 33, bias=False).bfloat16()):
        assert row_product(module) is None
        assert native_rows(module) is None
    assert row_product(stored()) is not None
    assert row_product(packed()) is not None


@pytest.mark.parametrize("make", [stored, packed])
def test_inputs_of_another_width_are_refused(make: Any) -> None:
    layer = make()
    for shape in ((2, 35), (1, 140), (1, 2, 35), (1, 71)):
        with pytest.raises((RuntimeError, ValueError)):
            layer(torch.randn(shape).bfloat16())
    assert layer(torch.randn(1, 2, 70).bfloat16()).shape == (1, 2, 33)
