"""Models whose experts keep the values of their file: what they compute, and when they are quantised anew."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType as Kind
from gguf_support import encode, save_model, tensors_of, write_gguf
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import moechat
from moechat.errors import CheckpointError, DoesNotFitError
from moechat.geometry import KEEP, ExpertGeometry, nominal_bits
from moechat.hub.names import resolve
from moechat.loading.model import Progress
from moechat.loading.stores import open_store
from moechat.store.store import Store

TOKENS = [5, 17, 30, 42, 77, 12, 9, 33, 60, 61, 62, 63]
Choose = Callable[[str, tuple[int, ...]], Kind]


def q4_k_m(name: str, shape: tuple[int, ...]) -> Kind:
    """Types as in Q4_K_M: down in Q6_K in some layers; here floats for all that is no expert."""
    if "_exps" not in name:
        return Kind.F32
    return Kind.Q6_K if "down" in name and name.startswith("blk.0.") else Kind.Q4_K


def decoded(source: Path, target: Path, kind_of: Callable[[str], Kind]) -> Path:
    """The checkpoint with the values that experts have in a file, by their names in the checkpoint."""
    shutil.copytree(source, target)
    for file in target.glob("*.safetensors"):
        changed = load_file(file)
        for name, tensor in changed.items():
            if ".experts." in name:
                kind = kind_of(name)
                values = gguf.dequantize(encode(tensor.numpy(), kind), kind)
                changed[name] = torch.from_numpy(np.array(values))
        save_file(changed, file, metadata={"format": "pt"})
    return target


def in_q4_k_m(name: str) -> Kind:
    return Kind.Q6_K if "down_proj" in name and ".layers.0." in name else Kind.Q4_K


def logits_of(directory: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        return model(torch.tensor([TOKENS])).logits[0]


@pytest.fixture
def model(tmp_path: Path) -> tuple[Path, Path]:
    """A file in Q4_K and Q6_K, and the checkpoint that it was made from."""
    config = save_model("qwen3_moe", tmp_path / "source")
    write_gguf("qwen3_moe", config, tensors_of(tmp_path / "source"), tmp_path / "m.gguf", q4_k_m)
    return tmp_path / "m.gguf", tmp_path / "source"


def store_of(path: Path, notices: list[str], **options: Any) -> Store:
    def report(event: Progress) -> None:
        if event.stage == "notice":
            notices.append(event.detail)

    return open_store(resolve(str(path)), options.pop("bits", None), report, **options)


def test_logits_are_those_of_the_values_in_the_file(model: tuple[Path, Path], tmp_path: Path) -> None:
    path, source = model
    expected = logits_of(decoded(source, tmp_path / "decoded", in_q4_k_m))
    with moechat.load(path, dense_bits=16, dtype="float32", activation_bits=32) as engine:
        ours = torch.as_tensor(np.asarray(engine.logits(TOKENS)))
        assert engine.describe().experts_form == "Q4_K and Q6_K"
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)
    quantised_anew = logits_of(source)  # the values before they were packed in the file
    assert float((quantised_anew - expected).abs().max()) > 1e-3


@pytest.mark.parametrize(
    ("kind", "down"), [(Kind.IQ2_XXS, Kind.IQ3_S), (Kind.IQ3_XXS, Kind.IQ2_S), (Kind.IQ1_M, Kind.IQ2_XS)]
)
def test_files_with_few_bits_keep_their_values(tmp_path: Path, kind: Kind, down: Kind) -> None:
    source, path = tmp_path / "source", tmp_path / "m.gguf"
    config = save_model("qwen3_moe", source)

    def choose(name: str, shape: tuple[int, ...]) -> Kind:
        return Kind.F32 if "_exps" not in name else down if "down" in name else kind

    write_gguf("qwen3_moe", config, tensors_of(source), path, choose)
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    stacked = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down"}

    def read(name: str) -> torch.Tensor:
        layer, expert, projection = (name.split(".")[at] for at in (2, 5, 6))
        tensor = tensors[f"blk.{layer}.ffn_{stacked[projection]}_exps.weight"]
        return torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type)[int(expert)].copy())

    decoded = tmp_path / "decoded"
    shutil.copytree(source, decoded)
    for file in decoded.glob("*.safetensors"):
        changed = {
            name: read(name) if ".experts." in name else each for name, each in load_file(file).items()
        }
        save_file(changed, file, metadata={"format": "pt"})
    with moechat.load(path, dense_bits=16, dtype="float32", activation_bits=32) as engine:
        ours = torch.as_tensor(np.asarray(engine.logits(TOKENS)))
        names = sorted((kind.name, down.name))
        assert engine.describe().experts_form == " and ".join(names)
        size = engine.describe().expert_bytes
    of_file = sum(int(tensor.n_bytes) for name, tensor in tensors.items() if "_exps" in name)
    torch.testing.assert_close(ours, logits_of(decoded), rtol=1e-4, atol=1e-4)
    assert of_file < size < 1.4 * of_file  # records are whole pages, and these are small


def test_budgets_and_prompts_in_parts_change_no_bit(model: tuple[Path, Path]) -> None:
    path, _ = model
    with moechat.load(path) as engine:
        mapped = engine.logits(TOKENS)
        assert engine.describe().memory_budget_given is False
    with pytest.raises(DoesNotFitError) as caught:
        moechat.load(path, ram=1 << 20)
    assert caught.value.least_bytes is not None
    with moechat.load(path, ram=caught.value.least_bytes) as engine:
        paged = engine.logits(TOKENS)
    np.testing.assert_array_equal(np.asarray(mapped), np.asarray(paged))


def test_plan_names_and_counts_what_loading_makes(model: tuple[Path, Path]) -> None:
    path, _ = model
    before = moechat.plan(path)
    assert before.experts_form == "Q4_K and Q6_K"
    with moechat.load(path) as engine:
        described = engine.describe()
    after = moechat.plan(path)
    assert before.all_expert_bytes == after.all_expert_bytes == described.expert_bytes
    assert after.experts_form == described.experts_form
    parts = [
        {part.name: part.nbytes for part in made.tiers[0].parts if part.basis == "counted"}
        for made in (before, after)
    ]
    assert parts[0] == parts[1]
    assert {"experts", "dense weights", "attention cache"} <= parts[0].keys()


def test_bits_that_are_asked_for_quantise_the_experts_anew(model: tuple[Path, Path]) -> None:
    path, _ = model
    notices: list[str] = []
    assert store_of(path, notices, bits=4).geometry.title == "4 bits"
    kept = store_of(path, notices)
    assert kept.geometry.wanted == KEEP
    assert kept.path.name.endswith("-kept")
    assert notices == []
    assert moechat.plan(path, bits=4).experts_form == "4 bits"


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"blk.1.ffn_up_exps.weight": Kind.Q6_K}, "the gate and up matrices of layer 1 are Q4_K and Q6_K"),
        ({"blk.1.ffn_down_exps.weight": Kind.F16}, "'blk.1.ffn_down_exps.weight' has another type"),
        (
            {"blk.1.ffn_down_exps.weight": Kind.TQ1_0},
            "'blk.1.ffn_down_exps.weight' has type TQ1_0, which a store cannot keep",
        ),
    ],
)
def test_experts_that_cannot_be_kept_are_quantised_with_the_reason(
    tmp_path: Path, changed: dict[str, Kind], reason: str
) -> None:
    config = save_model("qwen3_moe", tmp_path / "source")

    def choose(name: str, shape: tuple[int, ...]) -> Kind:
        return changed.get(name, q4_k_m(name, shape))

    write_gguf("qwen3_moe", config, tensors_of(tmp_path / "source"), tmp_path / "m.gguf", choose)
    notices: list[str] = []
    assert store_of(tmp_path / "m.gguf", notices).geometry.title == "4 bits"
    assert any(reason in notice for notice in notices)
    assert any(reason in note for note in moechat.plan(tmp_path / "m.gguf").notes)


@pytest.mark.parametrize("kind", [Kind.TQ1_0, Kind.TQ2_0])
def test_a_file_of_ternary_experts_is_quantised_with_the_reason(tmp_path: Path, kind: Kind) -> None:
    config = save_model("qwen3_moe", tmp_path / "source")

    def choose(name: str, shape: tuple[int, ...]) -> Kind:
        return kind if "_exps" in name else Kind.F32

    write_gguf("qwen3_moe", config, tensors_of(tmp_path / "source"), tmp_path / "m.gguf", choose)
    reason = f"has type {kind.name}, which a store cannot keep"
    assert any(reason in note for note in moechat.plan(tmp_path / "m.gguf").notes)
    notices: list[str] = []
    assert store_of(tmp_path / "m.gguf", notices).geometry.title == "4 bits"
    assert any(reason in notice for notice in notices)


def test_a_scale_that_is_not_finite_is_an_error_and_writes_no_store(
    model: tuple[Path, Path], moechat_home: Path
) -> None:
    path, _ = model
    content = bytearray(path.read_bytes())
    place = next(t for t in gguf.GGUFReader(path).tensors if t.name == "blk.1.ffn_up_exps.weight")
    content[place.data_offset : place.data_offset + 2] = np.array([np.nan], np.float16).tobytes()
    path.write_bytes(content)
    with pytest.raises(
        CheckpointError, match=r"'blk\.1\.ffn_up_exps\.weight' is damaged.*expert 0, up scale at row 0"
    ):
        store_of(path, [])
    assert list(moechat_home.rglob("manifest.json")) == []


def test_the_share_of_weights_in_grids_counts_projections() -> None:
    geometry = ExpertGeometry(512, 256, 4, 2, kept=(("iq2_xxs", "q3_k"), ("q4_k", "iq3_s")))
    assert geometry.grid_share == pytest.approx((2 + 1) / 6)
    assert ExpertGeometry(512, 256, 4, 4).grid_share == 0


def test_a_geometry_is_read_as_it_was_written() -> None:
    geometry = ExpertGeometry(512, 256, 4, 4, kept=(("q4_k", "q6_k"), ("q4_k", "q4_k")))
    assert ExpertGeometry.from_json(geometry.to_json()) == geometry
    assert geometry.layouts[0].record_bytes == geometry.layouts[1].record_bytes == geometry.record_bytes


@pytest.mark.parametrize(
    ("kept", "gated", "bits"),
    [
        ([("q4_k", "q8_0")], True, 4),
        ([("q8_0", "q4_k")], True, 8),
        ([("q8_0", "q4_k")], False, 4),  # one input projection weighs no more than down
        ([("q2_k", "q6_k")], True, 3),
        ([("q2_k", "q6_k")], False, 4),
        ([("q4_k", "q4_k"), ("q4_k", "q8_0")], True, 4),
    ],
)
def test_nominal_bits_weigh_the_projections_that_there_are(
    kept: list[tuple[str, str]], gated: bool, bits: int
) -> None:
    assert nominal_bits(kept, gated=gated) == bits
