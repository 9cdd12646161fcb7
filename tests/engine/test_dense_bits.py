"""Tests of dense_bits and activation_bits: results and memory of the dense part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import tiny_config, write_tiny_checkpoint
from transformers import AutoModelForCausalLM

import moechat
from moechat import _native
from moechat.engine import Engine
from moechat.errors import UsageError
from moechat.models.linear import PackedLinear, SplitLinear, StoredEmbedding, StoredLinear
from moechat.offload.settings import OffloadOptions

FAMILIES = [
    ("mixtral", 0),
    ("qwen2_moe", 1),
    ("qwen3_moe", 1),
    ("olmoe", 0),
    ("phimoe", 1),
    ("deepseek_v2", 1),
    ("deepseek_v3", 0),
    ("gpt_oss", 0),
    ("glm4_moe", 0),
]
PROMPT = [4, 87, 12, 55, 3, 29, 64, 91, 8, 70, 33, 21, 76, 40, 18, 66, 95, 50, 11]
ANSWER = 24


def relative_error(ours: torch.Tensor, reference: torch.Tensor) -> float:
    difference = torch.linalg.norm(ours.double() - reference.double())
    return float(difference / torch.linalg.norm(reference.double()))


def reference_of(directory: Path, engine: Engine) -> Any:
    """The model in transformers with the dequantised weights of the engine's packed layers."""
    model: Any = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    for name, module in engine.loaded.model.named_modules():
        if isinstance(module, PackedLinear | SplitLinear):
            theirs = model.get_submodule(name)
            theirs.weight = torch.nn.Parameter(module.weight.clone(), requires_grad=False)
    return model


@pytest.mark.parametrize(("family", "shape"), FAMILIES)
@pytest.mark.parametrize("dense_bits", [16, 8, 6, 4])
def test_logits_and_tokens_match_transformers_with_the_same_weights(
    family: str, shape: int, dense_bits: int, tmp_path: Path, home: Path
) -> None:
    write_tiny_checkpoint(tmp_path / "model", tiny_config(family, shape))
    with moechat.load(
        tmp_path / "model", bits=16, dtype="float32", dense_bits=dense_bits, activation_bits=32
    ) as engine:
        kinds = [type(module) for module in engine.loaded.model.modules()]
        assert (PackedLinear if dense_bits < 16 else StoredLinear) in kinds
        assert (PackedLinear in kinds) == (dense_bits < 16)
        model = reference_of(tmp_path / "model", engine)
        with torch.inference_mode():
            expected = model(torch.tensor([PROMPT])).logits[0]
        assert relative_error(engine.logits(PROMPT), expected) < 1e-4
        with torch.inference_mode():
            tokens = model.generate(
                torch.tensor([PROMPT]), do_sample=False, max_new_tokens=ANSWER, min_new_tokens=ANSWER
            )
        answer = [s.token_id for s in engine.generate(PROMPT, max_new_tokens=ANSWER, temperature=0.0)]
    assert answer == tokens[0, len(PROMPT) :].tolist()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("dense-bits") / "model"
    write_tiny_checkpoint(directory, tiny_config("qwen3_moe", 0))
    return directory


@pytest.mark.parametrize("activation_bits", [16, 8])
def test_integer_inputs_stay_close_to_float32(activation_bits: int, checkpoint: Path, home: Path) -> None:
    def logits(bits: int) -> torch.Tensor:
        with moechat.load(checkpoint, bits=4, dtype="float32", dense_bits=4, activation_bits=bits) as engine:
            assert engine.describe().activation_bits == bits
            return engine.logits(PROMPT)

    error = relative_error(logits(activation_bits), logits(32))
    assert 0 < error < {16: 1e-3, 8: 0.1}[activation_bits]


@pytest.mark.parametrize("dense_bits", [16, 4])
@pytest.mark.parametrize("activation_bits", [16, 8])
def test_every_budget_and_number_of_threads_gives_the_same_logits(
    dense_bits: int, activation_bits: int, checkpoint: Path, home: Path
) -> None:
    threads = _native.num_threads()
    results = []
    try:
        for pages, count in ((0, 1), (2, 2), (7, 3), (40, 2)):
            with moechat.load(
                checkpoint,
                dtype="float32",
                dense_bits=dense_bits,
                activation_bits=activation_bits,
                threads=count,
                offload=OffloadOptions(pages=pages),
            ) as engine:
                answer = [s.token_id for s in engine.generate(PROMPT, max_new_tokens=8, temperature=0.0)]
                results.append((engine.logits(PROMPT), answer))
    finally:
        _native.set_num_threads(threads)
        torch.set_num_threads(threads)
    for logits, answer in results[1:]:
        assert torch.equal(logits, results[0][0])
        assert answer == results[0][1]


def test_sixteen_bit_weights_are_mapped_and_not_copied(checkpoint: Path, home: Path) -> None:
    with moechat.load(checkpoint, dtype="float32", dense_bits=16) as engine:
        source = engine.loaded.store.dense
        arrays = [source.array(key) for key in source.keys()]  # noqa: SIM118 - not a mapping
        ranges = [(array.ctypes.data, array.ctypes.data + array.nbytes) for array in arrays]
        layers = [m for m in engine.loaded.model.modules() if isinstance(m, StoredLinear | StoredEmbedding)]
        assert len(layers) > 8
        for layer in layers:
            at = layer.rows.data_ptr()
            assert any(begin <= at < end for begin, end in ranges)


def test_fewer_bits_take_less_of_the_budget(checkpoint: Path, home: Path) -> None:
    taken = {}
    for bits in (16, 8, 6, 4):
        with moechat.load(checkpoint, dtype="float32", dense_bits=bits) as engine:
            facts = engine.describe().to_json()
            assert facts["dense_bits"] == bits
            taken[bits] = facts["memory_dense_bytes"]
    assert taken[4] < taken[8] < taken[16]


def test_a_float32_checkpoint_has_no_quantised_dense_layers(tmp_path: Path, home: Path) -> None:
    write_tiny_checkpoint(tmp_path / "model", tiny_config("olmoe", 0), dtype=torch.float32)
    with moechat.load(tmp_path / "model", bits=16, dtype="float32", dense_bits=16) as engine:
        assert StoredLinear not in {type(module) for module in engine.loaded.model.modules()}


def test_by_default_each_matrix_has_the_bits_that_its_kind_needs(checkpoint: Path, home: Path) -> None:
    with moechat.load(checkpoint) as engine:
        assert engine.describe().to_json()["dense_bits"] == "auto"
        parts = {
            name.rpartition(".")[2]: module.parts if isinstance(module, SplitLinear) else [module]
            for name, module in engine.loaded.model.named_modules()
            if isinstance(module, PackedLinear | SplitLinear)
        }
        vocabulary = engine.loaded.model.config.vocab_size
    found = {name: [(part.layout.bits, part.out_features) for part in of] for name, of in parts.items()}
    wide = round(vocabulary / 8 / 16) * 16
    assert found.pop("lm_head") == [(6, wide), (4, vocabulary - wide)]
    assert {name: bits for name, [(bits, _)] in found.items()} == {
        "q_proj": 4,
        "k_proj": 4,
        "o_proj": 4,
        "v_proj": 6,
    }


def test_the_parts_of_a_head_are_its_rows_in_order(tmp_path: Path, home: Path) -> None:
    write_tiny_checkpoint(tmp_path / "model", tiny_config("qwen3_moe", 0))
    with moechat.load(tmp_path / "model", bits=16, dtype="float32", activation_bits=32) as engine:
        model = reference_of(tmp_path / "model", engine)
        with torch.inference_mode():
            expected = model(torch.tensor([PROMPT])).logits[0]
        assert relative_error(engine.logits(PROMPT), expected) < 1e-4
        last = next(iter(engine.generate(PROMPT, max_new_tokens=1, temperature=0.0))).token_id
    assert last == int(expected[-1].argmax())


@pytest.mark.parametrize("bits", [3, 32, "four", True, None])
def test_unsupported_dense_bits_are_rejected(bits: Any, checkpoint: Path, home: Path) -> None:
    with pytest.raises(UsageError, match="dense_bits is"):
        moechat.load(checkpoint, dense_bits=bits)


@pytest.mark.parametrize("bits", [4, 24, "8", False])
def test_unsupported_activation_bits_are_rejected(bits: Any, checkpoint: Path, home: Path) -> None:
    with pytest.raises(UsageError, match="activation_bits is"):
        moechat.load(checkpoint, activation_bits=bits)
