"""Routers with float32 weights in models of 16 bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from families import tiny_family
from tiny import write_tiny_checkpoint
from torch import nn
from torch.nn import functional

import moechat
from moechat.models.decode.routers import native_router, recognise_router
from moechat.models.wide_routers import widening_routers

HALVES = [torch.bfloat16, torch.float16]


class Router(nn.Module):
    """As many families write it."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        weight = torch.randn((24, 72), generator=torch.Generator().manual_seed(5)) / 8
        self.weight = nn.Parameter(weight.to(dtype), requires_grad=False)

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = functional.linear(hidden_states.type(torch.float32), self.wide())
        values, index = logits.sigmoid().topk(3, dim=-1)
        return logits, values / values.sum(-1, keepdim=True), index

    def wide(self) -> torch.Tensor:
        return self.weight.type(torch.float32)


class OnlyHidden(Router):
    """Makes hidden states float32 and takes the weight as it is."""

    def wide(self) -> torch.Tensor:
        return self.weight


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("tokens", [1, 5])
def test_float32_weights_are_read_natively_beside_hidden_states_of_16_bits(
    dtype: torch.dtype, tokens: int
) -> None:
    router = Router(torch.float32)
    rule = recognise_router(router, inputs=dtype)
    assert rule is not None
    assert rule.inputs is dtype
    native = native_router(router, rule)
    x = torch.randn((tokens, 72), generator=torch.Generator().manual_seed(tokens)).to(dtype)
    found, wanted = native(x), router(x)
    assert torch.equal(found[2], wanted[2])
    for ours, theirs in zip(found[:2], wanted[:2], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    rounded = functional.linear(x.float(), router.weight.to(dtype).float())
    assert not torch.allclose(found[0], rounded, rtol=1e-5, atol=1e-5), "the weights were rounded"
    assert torch.equal(native(x.float())[0], router(x.float())[0]), "other types are left to the module"


def test_a_router_that_takes_no_weights_of_16_bits_is_not_narrowed() -> None:
    both, hidden_only = Router(torch.float32).to("meta"), OnlyHidden(torch.float32).to("meta")
    for dtype in HALVES:
        assert widening_routers(
            nn.ModuleList([both, hidden_only, nn.Linear(4, 4, device="meta")]), dtype
        ) == {both}
    assert widening_routers(nn.ModuleList([Router(torch.bfloat16).to("meta")]), torch.bfloat16) == set()


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v3", "nemotron_h"])
def test_a_router_keeps_its_stored_values_and_its_layer_is_native(
    family: str, stored: torch.dtype, tmp_path: Path, moechat_home: Path
) -> None:
    write_tiny_checkpoint(tmp_path, tiny_family(family), dtype=stored)
    with moechat.load(tmp_path, bits=16, dtype="bfloat16") as engine:
        model: Any = engine.loaded.model
        gates = [module for name, module in model.named_modules() if name.endswith(".gate")]
        assert gates
        wide = model._keep_in_fp32_modules_strict or ()
        kept = stored if any("gate" in name for name in wide) else torch.bfloat16
        assert {gate.weight.dtype for gate in gates} == {kept}
        assert engine.loaded.native_modules.whole
        assert {name.rpartition(".")[2] for name in engine.loaded.native_modules.routers} == {"gate"}
