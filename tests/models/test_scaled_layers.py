"""Layers that multiply the results of their parts (Granite), natively for one token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from families import tiny_family
from layer_steps_support import assert_steps_equal_their_parts, layers_of
from tiny import write_tiny_checkpoint
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import GraniteMoeHybridDecoderLayer

import moechat
from moechat import _native
from moechat.models.cache_argument import CACHE
from moechat.models.decode.layer_check import agrees
from moechat.models.decode.native_step import native_part
from moechat.models.decode.scaled_layers import scaled_step

Engine = Any
MAMBA, ATTENTION = _native.MambaStep, _native.LayerStep
STEPS = {
    "granitemoehybrid": [MAMBA, ATTENTION] * 2,  # attention does not rotate
    "granitemoeshared": [ATTENTION] * 4,
    "granitemoe": [ATTENTION] * 4,  # without a shared expert
}


def checkpoint(directory: Path, family: str, **more: Any) -> Path:
    config = tiny_family(family)
    config.dtype = torch.bfloat16
    config.residual_multiplier, config.embedding_multiplier, config.logits_scaling = 0.22, 12, 6.0
    if family != "granitemoe":
        config.shared_intermediate_size = 96
    for name, value in more.items():
        setattr(config, name, value)
    write_tiny_checkpoint(directory / "model", config)
    return directory / "model"


@pytest.mark.parametrize("dense_bits", [16, 4])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("family", list(STEPS))
def test_native_steps_equal_their_parts_bitwise(
    family: str, dtype: str, dense_bits: int, tmp_path: Path, moechat_home: Path
) -> None:
    path = checkpoint(tmp_path, family)
    with moechat.load(path, bits=16, dtype=dtype, dense_bits=dense_bits) as engine:
        assert_steps_equal_their_parts(engine, STEPS[family])


def test_attention_of_a_hybrid_may_rotate(tmp_path: Path, moechat_home: Path) -> None:
    path = checkpoint(tmp_path, "granitemoehybrid", position_embedding_type="rope")
    with moechat.load(path, bits=16, dtype="float32") as engine:
        assert_steps_equal_their_parts(engine, STEPS["granitemoehybrid"])


def test_a_layer_that_computes_anything_else_is_left_alone(tmp_path: Path, moechat_home: Path) -> None:
    class Clips(GraniteMoeHybridDecoderLayer):
        def forward(self, hidden_states: torch.Tensor, **named: Any) -> torch.Tensor:
            return super().forward(hidden_states, **named).clamp(-1, 1)

    class OneFactor(GraniteMoeHybridDecoderLayer):
        def forward(self, hidden_states: torch.Tensor, *, name: str = CACHE, **named: Any) -> torch.Tensor:
            named = {"attention_mask": None, name: named[name]}
            mixed, _ = self.self_attn(self.input_layernorm(hidden_states), **named)
            hidden_states = hidden_states + mixed * self.residual_multiplier
            normed = self.post_attention_layernorm(hidden_states)
            return hidden_states + self.block_sparse_moe(normed) + self.shared_mlp(normed)

    with moechat.load(checkpoint(tmp_path, "granitemoehybrid"), bits=16, dtype="float32") as engine:
        layer = layers_of(engine)[1]
        step = vars(layer).pop("forward").kept
        assert agrees(layer, step.forward(layer))
        layer.__class__ = Clips
        assert scaled_step(layer, 0, {}) is None, "its code has other names"
        layer.__class__ = OneFactor
        again = scaled_step(layer, 0, {})
        assert again is not None, "its code has only known names"
        assert not agrees(layer, again.forward(layer))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_part_whose_gates_come_from_the_same_projection_has_the_bits_of_its_modules(
    dtype: str, tmp_path: Path, moechat_home: Path
) -> None:
    with moechat.load(checkpoint(tmp_path, "granitemoehybrid"), bits=16, dtype=dtype) as engine:
        part = layers_of(engine)[0].shared_mlp
        x = torch.randn(3, part.input_linear.in_features, generator=torch.Generator().manual_seed(1))
        x = x.to(getattr(torch, dtype))
        native = native_part(part)
        assert isinstance(native, _native.Mlp)
        assert torch.equal(part(x), torch.cat([type(part).forward(part, row[None]) for row in x]))


def test_parts_that_do_not_fit_together_are_refused(tmp_path: Path, moechat_home: Path) -> None:
    with moechat.load(checkpoint(tmp_path, "granitemoehybrid"), bits=16, dtype="float32") as engine:
        part = layers_of(engine)[0].shared_mlp
        first, last = part.input_linear.product(), part.output_linear.product()
        with pytest.raises(ValueError, match="a gate beside one that is joined"):
            _native.Mlp("float32", first, first, last, joined=True)
        with pytest.raises(ValueError, match="up and down"):
            _native.Mlp("float32", first, first, last)
