"""Products and heads of a decoder layer in one launch each, in Triton's interpreter without a GPU.

The interpreter shows what they compute, not that they compile: for that see ``test_triton_compiles.py``.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

pytest.importorskip("triton")

from kernel_support import DEVICE
from step_support import TYPES, close, drawn

from moechat.models.decode.norms import Norm
from moechat.models.decode.routers import recognise_router
from moechat.models.packed_rows import ROW_TYPE, row_bytes
from moechat.offload.kernels import layer_steps, steps
from moechat.offload.kernels.attention import append
from moechat.offload.known_router import KnownRouter

SLOTS = 7


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(
    ("columns", "rows"),
    [(7, (3,)), (1024, (1026,)), (1500, (8, 5, 3)), (2048, (1024, 24, 8)), (96, (40, 8))],
)
def test_products_equal_those_of_linear_layers(columns, rows, biased, dtype) -> None:
    x = drawn(1, columns, dtype=dtype)
    weights = [drawn(count, columns, dtype=dtype, seed=2 + place) for place, count in enumerate(rows)]
    biases = [
        drawn(count, dtype=dtype, seed=9 + place) if biased else None for place, count in enumerate(rows)
    ]
    found = layer_steps.products(x, weights, biases, dtype)
    for one, weight, bias in zip(found, weights, biases, strict=True):
        wide = None if bias is None else bias.float()
        expected = nn.functional.linear(x.float(), weight.float(), wide).to(dtype)
        assert close(one, expected, columns if dtype is torch.float32 else 1)


def test_products_may_be_kept_in_float32() -> None:
    x, weight = drawn(1, 64, dtype=torch.bfloat16), drawn(5, 64, dtype=torch.bfloat16, seed=2)
    (found,) = layer_steps.products(x, [weight], [None], torch.float32)
    torch.testing.assert_close(found, x.float() @ weight.float().T)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_router_with_float32_weights_has_the_logits_of_its_family(dtype) -> None:
    class Router(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(drawn(24, 72, seed=2) / 8, requires_grad=False)

        def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            logits = nn.functional.linear(hidden.float(), self.weight.float())
            weights, index = logits.softmax(-1).topk(3, dim=-1)
            return logits, weights, index

    module, x = Router(), drawn(1, 72, dtype=dtype)
    rule = recognise_router(module.cpu(), inputs=dtype)
    assert rule is not None
    module.to(x.device)
    router = KnownRouter(rule, None, widened=True)
    assert router.serves(module, x)
    logits = router.logits(module, x)
    assert logits is not None
    torch.testing.assert_close(logits, module(x)[0])
    assert not router.serves(module, x.float()), "its hidden states have another type"
    assert not KnownRouter(rule, None, widened=False).serves(module, x)


def test_only_plain_layers_of_the_same_type_are_multiplied_so() -> None:
    x = drawn(1, 64, dtype=torch.bfloat16)
    plain = nn.Linear(64, 8, dtype=torch.bfloat16, device=DEVICE)
    assert layer_steps.serves_product(plain, x)
    assert not layer_steps.serves_product(plain, x.float())
    assert not layer_steps.serves_product(plain, drawn(1, 32, dtype=torch.bfloat16))
    assert not layer_steps.serves_product(nn.Identity(), x)
    turned = nn.Linear(64, 8, dtype=torch.bfloat16, device=DEVICE)
    turned.weight = nn.Parameter(drawn(64, 8, dtype=torch.bfloat16).T)
    assert not layer_steps.serves_product(turned, x)


def memory(kv_heads: int, row: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros((1, kv_heads, SLOTS, row), dtype=dtype, device=DEVICE)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("norm", [None, Norm(1e-6, 0.0, True), Norm(1e-5, 1.0, False)])
@pytest.mark.parametrize(
    ("dim", "angles", "width"), [(24, 24, 24), (128, 128, 128), (24, 12, 24), (42, 10, 10), (128, 64, 64)]
)
def test_heads_are_normed_rotated_and_written_as_by_single_steps(
    dim, angles, width, norm, packed, dtype
) -> None:
    heads, kv_heads, place = 4, 2, 1
    q, k, v = (
        drawn(1, count * dim, dtype=dtype, seed=place)
        for place, count in enumerate((heads, kv_heads, kv_heads))
    )
    cos, sin = drawn(2, 1, 1, angles, dtype=dtype, seed=3)
    numbers = torch.tensor([5, 1, 4], device=DEVICE)
    norms = None
    rows = [states.view(1, 1, -1, dim) for states in (q, k, v)]
    if norm is not None:
        norms = ((drawn(dim, dtype=dtype, seed=5), norm), (drawn(dim, dtype=dtype, seed=6), norm))
        rows[:2] = [
            steps.rms_norm(each, weight, norm) for each, (weight, _) in zip(rows[:2], norms, strict=True)
        ]
    query, key, value = (each.transpose(1, 2) for each in rows)
    query, key = steps.rotate(query, key, cos, sin, width)
    row, kind = (row_bytes(dim), ROW_TYPE) if packed else (dim, dtype)
    wanted, found = ([memory(kv_heads, row, kind) for _ in range(2)] for _ in range(2))
    append(key, value, *wanted, numbers, place)
    turned = layer_steps.place_heads((q, k, v), norms, cos, sin, width, dim, *found, numbers, place)
    assert close(turned, query.contiguous())
    if packed:
        # Keys may differ by the last bit before they are packed.
        assert (found[0].int() - wanted[0].int()).abs().max() <= 1
    else:
        assert close(found[0], wanted[0])
    assert torch.equal(found[1], wanted[1])
    for kept in found:
        assert kept[:, :, 4].any()
        assert not kept[:, :, [0, 1, 2, 3, 5, 6]].any()
