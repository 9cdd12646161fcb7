"""What a checkpoint holds is found through transformers' rules; what cannot be run is refused."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import tiny_family
from safetensors.torch import load_file, save_file
from tiny import tiny_config, write_tiny_checkpoint
from transformers import AutoConfig, AutoModelForCausalLM

import moechat
from moechat.errors import CheckpointError, UnsupportedModelError
from moechat.geometry import Gate, WeightType
from moechat.models.checkpoint_mapping import plan_checkpoint
from moechat.store.checkpoint import Checkpoint


def plan(directory: Path) -> Any:
    return plan_checkpoint(Checkpoint.open(directory))


def as_float(array: np.ndarray[Any, Any]) -> torch.Tensor:
    return torch.from_numpy((array.astype(np.uint32) << 16).view(np.float32))


def edit_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_only_the_sparse_layers_have_experts(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, tiny_config("qwen3_moe", 1))
    found = plan(tmp_path)
    assert [layer.layer for layer in found.layers] == [0, 2]
    assert (found.experts.num_experts, found.experts.hidden_size, found.experts.intermediate_size) == (
        7,
        72,
        44,
    )
    assert found.weight_type is WeightType.BF16
    assert found.experts.gate == Gate()
    assert "model.layers.1.mlp.gate_proj.weight" in found.dense_keys
    assert not any(".experts." in key for key in found.dense_keys)


def test_a_plan_is_made_from_the_configuration_as_it_was_opened(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, tiny_config("qwen3_moe", 1))
    checkpoint = Checkpoint.open(tmp_path)
    wanted = plan_checkpoint(checkpoint)
    edit_config(tmp_path, num_experts=3)
    assert plan_checkpoint(checkpoint) == wanted


def test_the_text_part_of_a_checkpoint_with_pictures_is_found_by_its_published_names(tmp_path: Path) -> None:
    """Qwen3.6's own files have ``model.language_model.``, which transformers' copies lack."""
    write_tiny_checkpoint(tmp_path / "source", tiny_family("qwen3_5_moe"))
    tensors = load_file(tmp_path / "source" / "model.safetensors")
    published = tmp_path / "published"
    published.mkdir()
    shutil.copy(tmp_path / "source" / "config.json", published)
    renamed = {
        re.sub(r"^model\.(?!visual)", "model.language_model.", name): tensors[name] for name in tensors
    }
    save_file(renamed, published / "model.safetensors", metadata={"format": "pt"})
    expected = set(plan(tmp_path / "source").dense_keys)
    found = {name.replace("language_model.", "") for name in plan(published).dense_keys}
    assert found == expected
    assert "model.layers.0.linear_attn.in_proj_qkv.weight" in found


def test_shared_experts_stay_dense(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, tiny_config("deepseek_v2", 0))
    dense = plan(tmp_path).dense_keys
    assert "model.layers.1.mlp.shared_experts.gate_proj.weight" in dense
    assert "model.layers.1.mlp.gate.weight" in dense


@pytest.mark.parametrize("family", ["mixtral", "granitemoe", "gpt_oss"])
def test_refs_name_the_rows_of_each_matrix(family: str, tmp_path: Path) -> None:
    """Per-expert keys, fused keys, and fused transposed keys with interleaved rows and biases."""
    write_tiny_checkpoint(tmp_path, tiny_config(family, 1))
    checkpoint = Checkpoint.open(tmp_path)
    found = plan_checkpoint(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    size = found.experts.intermediate_size
    for layer in found.layers:
        module = model.get_submodule(layer.module)
        for index, expert in enumerate(layer.experts):
            gate_up, down = module.gate_up_proj[index], module.down_proj[index]
            if module.is_transposed:
                gate_up, down = gate_up.T, down.T
            interleaved = not module.is_concatenated
            gate, up = (gate_up[::2], gate_up[1::2]) if interleaved else (gate_up[:size], gate_up[size:])
            assert torch.equal(as_float(checkpoint.matrix(expert.gate)), gate)
            assert torch.equal(as_float(checkpoint.matrix(expert.up)), up)
            assert torch.equal(as_float(checkpoint.matrix(expert.down)), down)
            if found.experts.has_bias:
                assert expert.up_bias is not None
                assert expert.down_bias is not None
                up_bias = torch.from_numpy(np.array(checkpoint.vector(expert.up_bias)))
                assert torch.equal(up_bias, module.gate_up_proj_bias[index][1::2])
                down_bias = torch.from_numpy(np.array(checkpoint.vector(expert.down_bias)))
                assert torch.equal(down_bias, module.down_proj_bias[index])


def write_mxfp4(directory: Path) -> None:
    """Rewrite a gpt-oss checkpoint's experts as the hub's own files pack them: MXFP4 blocks and scales."""
    tensors = load_file(directory / "model.safetensors")
    generator = torch.Generator().manual_seed(5)
    for name in [key for key in tensors if key.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, columns, rows = tensors.pop(name).shape  # stored as [experts, in, out]
        groups = columns // 32
        shape = (experts, rows, groups, 16)
        tensors[f"{name}_blocks"] = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(120, 125, shape[:3], generator=generator, dtype=torch.uint8)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    edit_config(
        directory, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    )


@pytest.mark.parametrize(("bits", "form"), [(16, "16 bits"), (None, "MXFP4")])
def test_mxfp4_checkpoint_computes_what_transformers_dequantises(
    tmp_path: Path, moechat_home: Path, bits: int | None, form: str
) -> None:
    source = tmp_path / "model"
    write_tiny_checkpoint(source, tiny_config("gpt_oss", 0))
    write_mxfp4(source)
    engine = moechat.load(source, bits=bits, dense_bits=16, dtype="float32", activation_bits=32)
    assert engine.describe().experts_form == form
    # Some versions of transformers unpack MXFP4 to bfloat16 whatever type is asked for.
    reference = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).float().eval()
    tokens = list(range(3, 40))
    with torch.inference_mode():
        expected = reference(torch.tensor([tokens])).logits[0]
    error = torch.linalg.norm(engine.logits(tokens) - expected) / torch.linalg.norm(expected)
    assert float(error) < 1e-4


def test_dense_model_is_refused(tmp_path: Path) -> None:
    config = AutoConfig.for_model(
        "llama",
        vocab_size=50,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    write_tiny_checkpoint(tmp_path, config)
    with pytest.raises(UnsupportedModelError, match="'llama' has no routed experts"):
        plan(tmp_path)


def test_unknown_model_type_is_refused(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, tiny_config("mixtral"))
    edit_config(tmp_path, model_type="mixtral_of_tomorrow")
    with pytest.raises(UnsupportedModelError, match="mixtral_of_tomorrow"):
        plan(tmp_path)


def test_remote_code_is_never_run(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, tiny_config("mixtral"))
    witness = tmp_path / "ran"
    (tmp_path / "modeling_evil.py").write_text(f"open({str(witness)!r}, 'w').close()\n")
    edit_config(
        tmp_path,
        model_type="evil",
        auto_map={"AutoConfig": "modeling_evil.EvilConfig", "AutoModelForCausalLM": "modeling_evil.Evil"},
    )
    with pytest.raises(UnsupportedModelError, match="custom code"):
        plan(tmp_path)
    assert not witness.exists()


def test_other_packings_are_refused_by_name(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, tiny_config("mixtral"))
    edit_config(tmp_path, quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(UnsupportedModelError, match="'gptq'"):
        plan(tmp_path)


@pytest.mark.parametrize(
    ("lost", "message"),
    [
        (
            "model.layers.1.block_sparse_moe.experts.2.w3.weight",
            r"lacks 1 of 4 tensors .*first 'model\.layers\.1\.block_sparse_moe\.experts\.2\.w3\.weight'",
        ),
        ("model.norm.weight", r"lacks 1 tensors of the model, first 'model\.norm\.weight'"),
    ],
)
def test_missing_tensors_are_named(lost: str, message: str, tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, tiny_config("mixtral"))
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors[lost]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=message):
        plan(tmp_path)


def test_tensors_that_the_model_does_not_use_are_left_out(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, tiny_config("mixtral"))
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.9.mtp.weight"] = torch.zeros(4)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert "model.layers.9.mtp.weight" not in plan(tmp_path).dense_keys


def edit_tensors(directory: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def test_a_configuration_with_fewer_layers_than_the_checkpoint_is_refused(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, tiny_config("mixtral"))
    edit_config(tmp_path, num_hidden_layers=1)
    message = r"safetensors: tensor 'model\.layers\.1\..*' belongs to layer 1 .*config\.json says 1 layers"
    with pytest.raises(CheckpointError, match=message):
        plan(tmp_path)
    # A layer that only predicts further tokens has tensors of its own, and is left out.
    edit_tensors(
        tmp_path, lambda tensors: tensors.update({"model.layers.1.eh_proj.weight": torch.zeros(64, 128)})
    )
    assert not [key for key in plan(tmp_path).dense_keys if "layers.1." in key]


def test_experts_with_other_numbers_than_the_configuration_says_are_refused(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, tiny_config("mixtral"))
    key = "model.layers.0.block_sparse_moe.experts.{}.w1.weight"
    edit_tensors(tmp_path, lambda tensors: tensors.update({key.format(9): tensors.pop(key.format(2))}))
    with pytest.raises(CheckpointError, match=r"lacks 1 of 4 tensors .*experts\.2\.w1\.weight"):
        plan(tmp_path)
    edit_tensors(tmp_path, lambda tensors: tensors.update({key.format(2): tensors[key.format(9)].clone()}))
    with pytest.raises(CheckpointError, match=r"experts\.9\.w1.* expert 9 \(from 0\), .* says 4 experts"):
        plan(tmp_path)


def test_an_expert_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, tiny_config("mixtral"))
    key = "model.layers.0.block_sparse_moe.experts.{}.w1.weight"
    edit_tensors(tmp_path, lambda tensors: tensors.update({key.format("02"): tensors[key.format(2)].clone()}))
    with pytest.raises(CheckpointError, match=r"experts\.(02|2)\.w1.* is the second one of expert 2"):
        plan(tmp_path)


def test_whole_numbers_as_dense_weights_are_refused(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, tiny_config("mixtral"))
    key = "model.layers.0.self_attn.q_proj.weight"
    edit_tensors(tmp_path, lambda tensors: tensors.update({key: tensors[key].to(torch.int8)}))
    with pytest.raises(
        UnsupportedModelError, match=rf"safetensors: tensor '{key}'.* type I8; moechat reads F64"
    ):
        plan(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts_per_tok": 9}, "9 experts per token of 4"),
        ({"hidden_act": "none"}, "it does not know 'none'"),
        ({"hidden_size": 1 << 21}, "hidden_size is 2097152, more than 1,048,576"),
        ({"hidden_size": "64"}, "hidden_size is '64', not a whole number"),
    ],
)
def test_errors_about_the_configuration_name_its_file(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write_tiny_checkpoint(tmp_path, tiny_config("mixtral"))
    edit_config(tmp_path, **changes)
    with pytest.raises(UnsupportedModelError, match=rf"{re.escape(str(tmp_path))}.*config\.json.*{message}"):
        plan(tmp_path)


def test_expert_of_the_wrong_shape_is_refused(tmp_path: Path, moechat_home: Path) -> None:
    source = tmp_path / "model"
    write_tiny_checkpoint(source, tiny_config("mixtral"))
    tensors = load_file(source / "model.safetensors")
    key = "model.layers.0.block_sparse_moe.experts.1.w2.weight"
    tensors[key] = tensors[key][:, :100].contiguous()
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"experts\.1\.w2"):
        moechat.load(source, bits=4)


def test_a_checkpoint_does_not_choose_how_attention_is_computed(tmp_path: Path, moechat_home: Path) -> None:
    source = tmp_path / "model"
    write_tiny_checkpoint(source, tiny_config("mixtral"))
    edit_config(source, attn_implementation="somebody/kernel", _attn_implementation="somebody/kernel")
    engine = moechat.load(source)
    assert "somebody" not in str(engine.loaded.model.config._attn_implementation)
    assert engine.logits([1, 2, 3]).isfinite().all()


@pytest.mark.parametrize(
    "changes",
    [
        {"num_attention_heads": 0},
        {"num_hidden_layers": "abc"},
        {"hidden_size": 64.5},
        {"hidden_size": -64},
        {"hidden_act": "nope"},
        {"dtype": "weird"},
        {"model_type": ["x"]},
        {"quantization_config": "x"},
        {"num_hidden_layers": 10**9},
        {"num_experts_per_tok": 100},
        {"rope_parameters": 5},
        {"text_config": 5},
    ],
)
def test_malformed_configurations_are_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, tiny_config("mixtral"))
    edit_config(tmp_path, **changes)
    with pytest.raises(UnsupportedModelError):
        plan(tmp_path)


def test_dense_weights_are_checked_before_the_conversion(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, tiny_config("mixtral"))
    edit_config(tmp_path, vocab_size=300)
    with pytest.raises(CheckpointError, match=r"weight' has shape \[101, 64\].*\[300, 64\]"):
        plan(tmp_path)
