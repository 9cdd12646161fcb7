"""Forms of GGUF files that models come in, and damaged ones, which are errors before anything is written."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType as Kind
from gguf_families import FAMILIES
from gguf_family import Tensors, gguf_tensors, random_model
from gguf_writing import all_as, write_family

import moechat
from moechat.errors import CheckpointError, MoechatError, UnsupportedModelError
from moechat.hub.names import resolve
from moechat.loading.stores import open_store
from moechat.models.checkpoint_mapping import plan_checkpoint
from moechat.models.gguf_source import opened_gguf

TOKENS = [5, 17, 30, 42, 77, 12]


class Model:
    """A tiny model of an architecture."""

    def __init__(self, name: str, **changes: Any) -> None:
        self.family = FAMILIES[name]
        self.config = self.family.config(num_hidden_layers=2, **changes)
        self.model = random_model(self.config)
        self.tensors = gguf_tensors(self.family, self.model)

    def write(self, path: Path, tensors: Tensors | None = None, **options: Any) -> Path:
        """Write a file of it."""
        chosen = self.tensors if tensors is None else tensors
        write_family(self.family, self.config, chosen, path, all_as(Kind.F32), **options)
        return path

    def logits(self) -> np.ndarray[Any, Any]:
        """Its logits by transformers."""
        with torch.no_grad():
            found: np.ndarray[Any, Any] = self.model(torch.tensor([TOKENS])).logits[0].numpy()
        return found


GLM, QWEN3 = Model("glm4moe"), Model("qwen35moe", layer_types=["linear_attention", "full_attention"])
LATENT = Model("deepseek2 (V3)")


def require_equal(path: Path, model: Model) -> None:
    with moechat.load(path, bits=16, dense_bits=16, dtype="float32") as engine:
        ours = np.asarray(engine.logits(TOKENS))
    expected = model.logits()
    assert np.abs(ours - expected).max() <= 5e-5 * np.abs(expected).max()


def test_layers_that_only_predict_further_tokens_are_left_out(tmp_path: Path, moechat_home: Path) -> None:
    more = {name.replace("blk.1.", "blk.2."): each for name, each in GLM.tensors.items() if "blk.1." in name}
    more["blk.2.nextn.eh_proj.weight"] = np.zeros((256, 512), np.float32)
    changes = {"block_count": 3, "nextn_predict_layers": 1}
    require_equal(GLM.write(tmp_path / "m.gguf", GLM.tensors | more, changes=changes), GLM)


def test_gate_and_up_of_experts_may_be_one_tensor(tmp_path: Path, moechat_home: Path) -> None:
    fused = {name: each for name, each in GLM.tensors.items() if "_exps" not in name or "down" in name}
    for name in GLM.tensors:
        if name.endswith("ffn_gate_exps.weight"):
            both = [GLM.tensors[name.replace("gate", part)] for part in ("gate", "up")]
            fused[name.replace("gate_exps", "gate_up_exps")] = np.concatenate(both, axis=1)
    require_equal(GLM.write(tmp_path / "m.gguf", fused), GLM)


def test_halves_of_a_weight_may_be_in_different_files(tmp_path: Path, moechat_home: Path) -> None:
    """As many files as tensors: keys and values of an attention are in two of them."""
    LATENT.write(tmp_path / "m.gguf", parts=len(LATENT.tensors))
    require_equal(next(tmp_path.glob("m-00001-of-*.gguf")), LATENT)


def test_attention_of_early_files_is_read(tmp_path: Path, moechat_home: Path) -> None:
    """They hold the matrix for keys and values as the model does."""
    early = {
        name: each for name, each in LATENT.tensors.items() if "_k_b." not in name and "_v_b." not in name
    }
    for number in range(2):
        weight = LATENT.model.state_dict()[f"model.layers.{number}.self_attn.kv_b_proj.weight"]
        early[f"blk.{number}.attn_kv_b.weight"] = weight.numpy()
    require_equal(LATENT.write(tmp_path / "m.gguf", early), LATENT)


def without(model: Model, *names: str) -> Tensors:
    return {name: each for name, each in model.tensors.items() if name not in names}


@pytest.mark.parametrize(
    ("model", "tensor", "message"),
    [
        (GLM, "blk.1.attn_q_norm.weight", r"lacks 1 tensors .*layers\.1\.self_attn\.q_norm\.weight"),
        (GLM, "blk.1.ffn_up_exps.weight", "lacks the weight 'up' of expert 0 in layer 1"),
        (GLM, "token_embd.weight", r"has no matrix token_embd\.weight"),
        (QWEN3, "blk.0.ssm_a", r"lacks 1 tensors .*layers\.0\.linear_attn\.A_log"),
        (LATENT, "blk.0.attn_v_b.weight", r"kv_b_proj\.weight do not fit together: .*v_b_proj"),
    ],
)
def test_a_missing_tensor_is_named(tmp_path: Path, model: Model, tensor: str, message: str) -> None:
    path = model.write(tmp_path / "m.gguf", without(model, tensor))
    with pytest.raises(CheckpointError, match=message), opened_gguf(path) as opened:
        plan_checkpoint(opened)


@pytest.mark.parametrize(
    ("model", "changes", "message"),
    [
        (
            GLM,
            {"expert_feed_forward_length": 128},
            r"m\.gguf: tensor 'blk\.1\.ffn_gate_exps\.weight' .* \[256, 256\].*\[128",
        ),
        (
            GLM,
            {"attention.head_count_kv": 4},
            r"m\.gguf: tensor 'blk\.0\.attn_k\.bias' has shape \[128\].*says \[256\]",
        ),
        (GLM, {"leading_dense_block_count": 0}, "lacks the weight 'gate' of expert 0 in layer 0"),
        (GLM, {"nextn_predict_layers": 2}, "claims 2 layers for prediction of 2"),
        (GLM, {"expert_weights_norm": "yes"}, "expert_weights_norm is 'yes'; true or false is expected"),
        (QWEN3, {"ssm.group_count": 3}, r"ssm\.group_count 3 do not fit together"),
        (QWEN3, {"ssm.conv_kernel": 3}, r"blk\.0\.ssm_conv1d\.weight: it has shape \[512, 4\]"),
        (LATENT, {"attention.kv_lora_rank": 64}, r"kv_b_proj\.weight have shapes \[\[4, 128, 64\]"),
    ],
)
def test_metadata_that_contradicts_tensors_is_an_error(
    tmp_path: Path, model: Model, changes: Mapping[str, Any], message: str
) -> None:
    path = model.write(tmp_path / "m.gguf", changes=changes)
    with pytest.raises(CheckpointError, match=message), opened_gguf(path) as opened:
        plan_checkpoint(opened)


@pytest.mark.parametrize(
    ("model", "changes", "message"),
    [
        (GLM, {"attention.scale": 0.5}, r"attention\.scale is 0\.5, which moechat does not compute"),
        (GLM, {"expert_gating_func": 1}, "expert_gating_func is 1"),
        (GLM, {"rope.dimension_sections": [8, 8, 8, 8]}, "dimension_sections is"),
        (QWEN3, {"expert_weights_scale": 2.5}, r"expert_weights_scale is 2\.5"),
        # Only Mistral Large 3, which has a softmax, scales its queries.
        (LATENT, {"attention.temperature_scale": 0.1}, "expert_gating_func is 2"),
        (LATENT, {"expert_gating_func": 3}, "expert_gating_func is 3"),
    ],
)
def test_values_that_would_be_computed_differently_are_refused(
    tmp_path: Path, model: Model, changes: Mapping[str, Any], message: str
) -> None:
    path = model.write(tmp_path / "m.gguf", changes=changes)
    with pytest.raises(UnsupportedModelError, match=message), opened_gguf(path):
        pass


def test_a_file_cut_anywhere_is_an_error_and_leaves_nothing(tmp_path: Path, moechat_home: Path) -> None:
    whole = QWEN3.write(tmp_path / "whole.gguf").read_bytes()
    places = np.linspace(1, len(whole) - 64, 12).astype(int)
    for place in [2, 30, 700, 9000, *places]:
        path = tmp_path / "m.gguf"
        path.write_bytes(whole[:place])
        with pytest.raises(MoechatError, match=r"m\.gguf"):
            open_store(resolve(str(path)), 4, lambda _: None)
    assert not [file for file in moechat_home.rglob("*") if file.is_file() and file.stat().st_size]
    shutil.rmtree(tmp_path, ignore_errors=True)
