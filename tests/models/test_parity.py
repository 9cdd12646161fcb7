"""Every family computes what transformers computes (eager attention, eager experts, float32)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import CASES, UNLISTED, tiny_config, write_tiny_checkpoint
from transformers import AutoModelForCausalLM

import moechat
from moechat import _native
from moechat.engine import Engine
from moechat.models.threads import one_thread

PROMPT_TOKENS = 23
NEW_TOKENS = 32


def reference_model(directory: Path) -> Any:
    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    return model.eval()


def prompt(vocabulary: int) -> list[int]:
    generator = torch.Generator().manual_seed(7)
    return torch.randint(3, vocabulary, (PROMPT_TOKENS,), generator=generator).tolist()


def relative_error(ours: torch.Tensor, reference: torch.Tensor) -> float:
    return float(
        torch.linalg.norm(ours.double() - reference.double()) / torch.linalg.norm(reference.double())
    )


def reference_logits(model: Any, tokens: list[int]) -> torch.Tensor:
    """Logits of transformers, by one thread: of layers this small, threads spend the time waiting."""
    with torch.inference_mode(), one_thread():
        return model(torch.tensor([tokens])).logits[0].float()


def put_stored_experts_into(model: Any, engine: Engine) -> None:
    """Give transformers the weights that our records decode to."""
    store = engine.loaded.store
    for record in store.manifest.layers:
        experts = model.get_submodule(record.module)
        for index, blocks in enumerate(store.expert_layer(record.layer)):
            gate, up, down, _ = _native.unpack_expert(store.geometry.layout, blocks)
            gate, up, down = (torch.from_numpy(part) for part in (gate, up, down))
            if getattr(experts, "is_concatenated", True):
                fused = torch.cat([gate, up])
            else:
                fused = torch.stack([gate, up], dim=1).flatten(0, 1)
            with torch.no_grad():
                experts.gate_up_proj[index] = fused.T if experts.is_transposed else fused
                experts.down_proj[index] = down.T if experts.is_transposed else down


@pytest.mark.parametrize(("family", "shape"), CASES + [(family, 0) for family in UNLISTED])
def test_sixteen_bit_store_gives_the_logits_and_tokens_of_transformers(
    family: str, shape: int, tmp_path: Path, moechat_home: Path
) -> None:
    config = tiny_config(family, shape)
    write_tiny_checkpoint(tmp_path / "model", config)
    engine = moechat.load(tmp_path / "model", bits=16, dense_bits=16, dtype="float32")
    model = reference_model(tmp_path / "model")
    tokens = prompt(config.vocab_size)

    assert relative_error(engine.logits(tokens), reference_logits(model, tokens)) < 1e-4

    with torch.inference_mode(), one_thread():
        expected = model.generate(
            torch.tensor([tokens]), do_sample=False, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS
        )
    answer = [step.token_id for step in engine.generate(tokens, max_new_tokens=NEW_TOKENS, temperature=0.0)]
    assert answer == expected[0, PROMPT_TOKENS:].tolist()


@pytest.mark.parametrize(("family", "shape"), CASES)
def test_four_bit_store_computes_its_own_weights_exactly(
    family: str, shape: int, tmp_path: Path, moechat_home: Path
) -> None:
    config = tiny_config(family, shape)
    write_tiny_checkpoint(tmp_path / "model", config)
    engine = moechat.load(tmp_path / "model", bits=4, dense_bits=16, activation_bits=16, dtype="float32")
    model = reference_model(tmp_path / "model")
    tokens = prompt(config.vocab_size)
    plain = reference_logits(model, tokens)
    put_stored_experts_into(model, engine)
    quantised = reference_logits(model, tokens)

    assert relative_error(engine.logits(tokens), quantised) < 1e-3
    # The weights did change: the check above compares quantised experts, not the checkpoint's.
    assert relative_error(quantised, plain) > 1e-3


@pytest.mark.parametrize("bits", [2, 3, 8])
def test_other_bit_widths_compute_their_own_weights_exactly(
    bits: int, tmp_path: Path, moechat_home: Path
) -> None:
    write_tiny_checkpoint(tmp_path / "model", tiny_config("qwen3_moe", 1))
    engine = moechat.load(tmp_path / "model", bits=bits, dense_bits=16, activation_bits=16, dtype="float32")
    model = reference_model(tmp_path / "model")
    tokens = prompt(101)
    put_stored_experts_into(model, engine)
    assert relative_error(engine.logits(tokens), reference_logits(model, tokens)) < 1e-3


@pytest.mark.parametrize("activation", ["gelu", "gelu_pytorch_tanh", "silu"])
def test_each_activation_of_a_family_is_computed(activation: str, tmp_path: Path, moechat_home: Path) -> None:
    write_tiny_checkpoint(tmp_path / "model", tiny_config("mixtral", 0, hidden_act=activation))
    engine = moechat.load(tmp_path / "model", bits=16, dense_bits=16, dtype="float32")
    tokens = prompt(101)
    expected = reference_logits(reference_model(tmp_path / "model"), tokens)
    assert relative_error(engine.logits(tokens), expected) < 1e-4


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_checkpoint_types_are_read(dtype: torch.dtype, tmp_path: Path, moechat_home: Path) -> None:
    write_tiny_checkpoint(tmp_path / "model", tiny_config("olmoe", 0), dtype=dtype)
    engine = moechat.load(tmp_path / "model", bits=16, dense_bits=16, dtype="float32")
    tokens = prompt(101)
    expected = reference_logits(reference_model(tmp_path / "model"), tokens)
    # float16 is kept exactly; float32 is rounded to bf16, 8 bits of mantissa.
    assert relative_error(engine.logits(tokens), expected) < (1e-4 if dtype is torch.float16 else 2e-2)


def test_sharded_checkpoint_gives_the_same_logits_as_one_file(tmp_path: Path, moechat_home: Path) -> None:
    config = tiny_config("deepseek_v3", 1)
    write_tiny_checkpoint(tmp_path / "one", config)
    write_tiny_checkpoint(tmp_path / "many", config, max_shard_size="40KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 3
    tokens = prompt(101)
    one = moechat.load(tmp_path / "one", bits=8, dtype="float32").logits(tokens)
    many = moechat.load(tmp_path / "many", bits=8, dtype="float32").logits(tokens)
    assert torch.equal(one, many)


def test_bfloat16_dense_part_stays_close_to_float32(tmp_path: Path, moechat_home: Path) -> None:
    write_tiny_checkpoint(tmp_path / "model", tiny_config("glm4_moe", 0))
    tokens = prompt(101)
    full = moechat.load(tmp_path / "model", bits=16, dense_bits=16, dtype="float32").logits(tokens)
    half = moechat.load(tmp_path / "model", bits=16, dense_bits=16, dtype="bfloat16").logits(tokens)
    assert 0 < relative_error(half, full) < 5e-2
