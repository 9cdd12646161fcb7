"""Gated feed-forward parts, alone and beside routed experts, recognised by their results."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from families import tiny_family
from tiny import write_tiny_checkpoint
from torch import nn
from transformers import AutoModelForCausalLM

import moechat
from moechat.models.decode.probe import close
from moechat.models.decode.routers import recognise_router
from moechat.models.decode.shared_expert import fed, recognise_mlps, recognise_shared_blocks

TYPES = [torch.float32, torch.bfloat16, torch.float16]


def model_of(family: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(3)
    return AutoModelForCausalLM.from_config(tiny_family(family)).to(dtype).eval()


@pytest.mark.parametrize("dtype", TYPES)
def test_a_gated_part_is_recognised(dtype: torch.dtype) -> None:
    model = model_of("glm4_moe", dtype)
    found = recognise_mlps(model)
    # One dense layer, and the shared expert of each other.
    assert list(found) == [
        model.model.layers[0].mlp,
        *(layer.mlp.shared_experts for layer in model.model.layers[1:]),
    ]
    for module, mlp in found.items():
        x = torch.randn(1, 64).to(dtype)
        assert close(fed(mlp, x), module(x))


def test_parts_that_compute_anything_else_are_not() -> None:
    class Scales(nn.Module):
        def __init__(self, inner: nn.Module, factor: float, most: float) -> None:
            super().__init__()
            self.gate_proj, self.up_proj, self.down_proj = inner.gate_proj, inner.up_proj, inner.down_proj
            self.factor, self.most = factor, most

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            gate = nn.functional.silu(self.gate_proj(x)).clamp(max=self.most)
            return self.down_proj(gate * self.up_proj(x)) * self.factor

    inner = model_of("glm4_moe").model.layers[0].mlp
    assert list(recognise_mlps(Scales(inner, 1.0, 1e9))) != []
    assert recognise_mlps(Scales(inner, 1.1, 1e9)) == {}
    assert recognise_mlps(Scales(inner, 1.0, 7.0)) == {}
    inner.act_fn = nn.GELU()
    assert recognise_mlps(inner) == {}
    # GELU, and squares of ReLU without a gate.
    for family in ("gemma4_text", "nemotron_h"):
        assert recognise_mlps(model_of(family)) == {}


@pytest.mark.parametrize(
    ("family", "gated"),
    [("qwen2_moe", True), ("qwen3_next", True), ("glm4_moe", False), ("deepseek_v3", False)],
)
def test_blocks_with_a_shared_expert_are_recognised(
    family: str, gated: bool, tmp_path: Path, moechat_home: Path
) -> None:
    write_tiny_checkpoint(tmp_path / family, tiny_family(family))
    with moechat.load(tmp_path / family, ctx=64, dtype="bfloat16", dense_bits=16) as engine:
        loaded = engine.loaded
        loaded.native_modules.undo()
        model = loaded.model
        rules = {module: rule for module in model.modules() if (rule := recognise_router(module)) is not None}
        mlps = recognise_mlps(model)
        found = recognise_shared_blocks(model, mlps, rules)
        blocks = [layer.mlp for layer in model.model.layers if hasattr(layer.mlp, "experts")]
        assert list(found) == blocks
        for parts in found.values():
            assert (parts.gate is not None) == gated
            assert parts.experts is parts.block.experts
        # A block that does more with the shared expert's result.
        first = blocks[0]
        kind = type(first)

        class Doubles(kind):
            def forward(self, hidden_states):
                shared = self.shared_expert if hasattr(self, "shared_expert") else self.shared_experts
                return super().forward(hidden_states) + 0.1 * shared(hidden_states)

        first.__class__ = Doubles
        try:
            assert first not in recognise_shared_blocks(model, mlps, rules)
        finally:
            first.__class__ = kind


def test_parts_of_layers_that_clip_are_told_from_others_of_the_same_sizes(
    tmp_path: Path, moechat_home: Path
) -> None:
    """Step-3.7 clips the shared experts of some layers."""
    config = tiny_family("step3p7")
    text = config.get_text_config()
    text.mlp_layer_types, text.eos_token_id = ["dense", "dense", "sparse", "sparse"], None
    text.swiglu_limits_shared = [0.0, 0.0, 0.0, 0.05]
    write_tiny_checkpoint(tmp_path / "step", config)
    with moechat.load(tmp_path / "step", bits=16, dtype="float32", dense_bits=16) as engine:
        model, native = engine.loaded.model, engine.loaded.native_modules
        limits = [getattr(model.get_submodule(name), "limit", None) for name in native.mlps]
        assert limits
        assert all(limit in (None, math.inf) for limit in limits)

        def logits() -> torch.Tensor:
            cache = engine.loaded.new_cache(64)
            found = [
                engine.passes.run(torch.tensor([tokens]), cache).logits[0, -1]
                for tokens in ([5, 17, 3, 80, 44], [9], [21], [70])
            ]
            return torch.stack(found)

        found = logits()
        native.undo()
        wanted = logits()
    assert float((found - wanted).norm() / wanted.norm()) < 1e-5


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_blocks_are_recognised_in_every_type(dtype: str, tmp_path: Path, moechat_home: Path) -> None:
    write_tiny_checkpoint(tmp_path / "qwen", tiny_family("qwen2_moe"))
    for dense_bits in (16, 8):
        with moechat.load(tmp_path / "qwen", ctx=64, dtype=dtype, dense_bits=dense_bits) as engine:
            engine.loaded.native_modules.undo()
            model = engine.loaded.model
            rules = {each: rule for each in model.modules() if (rule := recognise_router(each)) is not None}
            assert len(recognise_shared_blocks(model, recognise_mlps(model), rules)) == 4
