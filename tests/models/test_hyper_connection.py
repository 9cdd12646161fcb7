"""Hyper-connections of several residual streams: the native token against transformers' code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from families import tiny_family
from tiny import write_tiny_checkpoint
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HyperConnection

import moechat
from moechat.models.decode.hyper_connection import (
    HyperConnection,
    native_hyper_connection,
    recognise_hyper_connections,
)
from moechat.models.decode.norms import recognise_bare_norm
from moechat.models.decode.probe import close


def module_of(kind: type[DeepseekV4HyperConnection] = DeepseekV4HyperConnection, **more: Any) -> Any:
    config = tiny_family("deepseek_v4")
    for name, value in more.items():
        setattr(config, name, value)
    torch.manual_seed(8)
    module = kind(config).eval().requires_grad_(False)
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape)
    return module


def found_in(module: Any) -> dict[Any, HyperConnection]:
    norms = {part: norm for part in module.modules() if (norm := recognise_bare_norm(part)) is not None}
    return recognise_hyper_connections(module, norms)


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sizes", [{}, {"hc_mult": 3, "hidden_size": 40, "hc_sinkhorn_iters": 1}])
def test_a_token_is_that_of_the_family(dtype: torch.dtype, sizes: dict[str, int]) -> None:
    module = module_of(**sizes)
    native = native_hyper_connection(found_in(module)[module])
    assert native is not None
    streams, hidden = module.hc_mult, module.fn.shape[1] // module.hc_mult
    for size in (0.01, 1.0, 30.0):
        x = (torch.randn(1, 1, streams, hidden) * size).to(dtype)
        theirs = module(x)
        ours = native(x)
        assert all(map(close, ours, theirs))
        assert ours[1].sum(-2).allclose(torch.ones(streams), atol=1e-4), "columns are divided last"
    several = torch.randn(1, 3, streams, hidden).to(dtype)
    assert all(map(torch.equal, native(several), module(several))), "left to the module"


def test_modules_that_compute_anything_else_are_left_alone() -> None:
    class Mild(DeepseekV4HyperConnection):
        def forward(self, hidden_streams: torch.Tensor) -> Any:
            post, comb, collapsed = super().forward(hidden_streams)
            return post * 1.01, comb, collapsed

    assert found_in(module_of(Mild)) == {}
    assert recognise_hyper_connections(module_of(), {}) == {}, "its norm is not known"
    many = module_of(hc_mult=9)
    assert native_hyper_connection(found_in(many)[many]) is None
    half = module_of()
    half.fn.data = half.fn.data.bfloat16()
    assert found_in(half) == {}, "its weights are not float32"


def test_tokens_of_a_model_are_those_of_transformers_code(tmp_path: Path, moechat_home: Path) -> None:
    config = tiny_family("deepseek_v4")
    # All experts, since rounding would choose others where two are nearly alike.
    config.num_experts_per_tok = config.n_routed_experts
    write_tiny_checkpoint(tmp_path / "model", config)
    with moechat.load(tmp_path / "model", ctx=64, bits=16, dtype="float32") as engine:
        names = engine.loaded.native_modules.mixings
        assert len(names) == 8

        def logits() -> torch.Tensor:
            cache = engine.decoder.new_cache()
            rows = [[5, 17, 9], [3], [44], [80]]
            return torch.stack([engine.passes.run(torch.tensor([row]), cache).logits[0, -1] for row in rows])

        ours = logits()
        for name in names:
            del vars(engine.loaded.model.get_submodule(name))["forward"]
        assert torch.allclose(ours, logits(), atol=1e-4 * float(ours.abs().max()))
