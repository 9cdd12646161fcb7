"""Dense weights packed on a GPU, as far as that can be without one (see ``interpreted_gpu.py``)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from gguf.constants import GGMLQuantizationType as Kind
from gguf_families import FAMILIES
from gguf_family import gguf_tensors, random_model
from gguf_writing import all_as, write_family
from quantised_support import awq, write_pair, write_source
from tiny import tiny_config, write_tiny_checkpoint

import moechat
from moechat import _native
from moechat.errors import DoesNotFitError, UnsupportedModelError
from moechat.models import packed, packed_file
from moechat.models.linear import PackedLinear
from moechat.offload.kernels.packed_linear import DevicePackedLinear, Strips
from moechat.offload.settings import OffloadOptions

# More than a few tokens, and a few.
PROMPT = [5, 17, 9, 33, 21, 2, 60, 44, 13, 71, 8]
FEW = PROMPT[:5]
# float32 both, products in another order; router choices are the same.
TOLERANCE = 2e-5


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, moechat_home: Path) -> Path:
    directory = tmp_path_factory.mktemp("tiny") / "qwen3"
    write_tiny_checkpoint(directory, tiny_config("qwen3_moe", 0))
    return directory


def load(model: Path, gpu: Any, *, pages: int | None = None, **arguments: Any) -> moechat.Engine:
    offload = OffloadOptions(accelerator=gpu, pages=pages)
    usual = {"ctx": 64, "vram": "1G", "deterministic": True}
    return moechat.load(model, device="cuda", offload=offload, **{**usual, **arguments})


def on_cpu(model: Path, dense_bits: int) -> moechat.Engine:
    return moechat.load(model, dtype="float32", dense_bits=dense_bits, activation_bits=32, ctx=64)


def error_of(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


def names_of(engine: moechat.Engine, kind: type) -> list[str]:
    return [name for name, module in engine.loaded.model.named_modules() if isinstance(module, kind)]


@pytest.mark.parametrize("dense_bits", [8, 6, 4])
def test_logits_equal_those_of_the_cpu_with_the_same_bits(model: Path, gpu: Any, dense_bits: int) -> None:
    with on_cpu(model, dense_bits) as engine:
        wanted = [engine.logits(tokens) for tokens in (FEW, PROMPT)]
        layers = names_of(engine, PackedLinear)
    with load(model, gpu, dense_bits=dense_bits) as engine:
        assert engine.describe().dense_bits == dense_bits
        assert names_of(engine, DevicePackedLinear) == layers
        assert "lm_head" in layers
        assert type(engine.loaded.model.get_input_embeddings()) is torch.nn.Embedding
        for tokens, expected in zip((FEW, PROMPT), wanted, strict=True):
            assert error_of(engine.logits(tokens), expected) < TOLERANCE


@pytest.mark.parametrize(("family", "shape"), [("mixtral", 0), ("gpt_oss", 0), ("deepseek_v2", 1)])
def test_other_families_match_the_cpu(
    family: str, shape: int, gpu: Any, tmp_path: Path, moechat_home: Path
) -> None:
    write_tiny_checkpoint(tmp_path / family, tiny_config(family, shape))
    with on_cpu(tmp_path / family, 4) as engine:
        wanted = engine.logits(FEW)
    with load(tmp_path / family, gpu, pages=12, dense_bits=4) as engine:
        assert names_of(engine, DevicePackedLinear)
        assert error_of(engine.logits(FEW), wanted) < TOLERANCE


def test_a_tied_head_is_packed_beside_the_embedding(gpu: Any, tmp_path: Path, moechat_home: Path) -> None:
    write_tiny_checkpoint(tmp_path / "tied", tiny_config("qwen3_moe", 0, tie_word_embeddings=True))
    with on_cpu(tmp_path / "tied", 4) as engine:
        wanted = engine.logits(FEW)
    with load(tmp_path / "tied", gpu, dense_bits=4) as engine:
        assert "lm_head" in names_of(engine, DevicePackedLinear)
        assert error_of(engine.logits(FEW), wanted) < TOLERANCE


@pytest.mark.parametrize(("dtype", "bound"), [("bfloat16", 3e-2), ("float16", 4e-3)])
def test_sixteen_bit_types_stay_close_to_float32(model: Path, gpu: Any, dtype: str, bound: float) -> None:
    with on_cpu(model, 4) as engine:
        wanted = [engine.logits(tokens) for tokens in (FEW, PROMPT)]
    with load(model, gpu, dense_bits=4, dtype=dtype) as engine:
        for tokens, expected in zip((FEW, PROMPT), wanted, strict=True):
            assert error_of(engine.logits(tokens), expected) < bound


def test_the_answer_is_the_same_for_every_budget(model: Path, gpu: Any) -> None:
    results = []
    for pages in (2, None):
        with load(model, gpu, pages=pages, dense_bits=4) as engine:
            answer = [step.token_id for step in engine.generate(FEW, max_new_tokens=3, temperature=0.0)]
            results.append((engine.logits(PROMPT), answer))
    assert torch.equal(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]


def test_packed_layers_are_replayed_from_graphs(
    model: Path, gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = []
    for graphs in ("0", "1"):
        monkeypatch.setenv("MOECHAT_CUDA_GRAPHS", graphs)
        with load(model, gpu, dense_bits=4, deterministic=False, system="moepic") as engine:
            steps = engine.generate(FEW, max_new_tokens=5, temperature=0.0)
            answers.append([step.token_id for step in steps])
            assert engine.notices() == []
    assert answers[0] == answers[1]
    assert sum(graphs.replayed for graphs in gpu.graphs_made) > 0


def test_the_plan_counts_the_memory_taken_on_the_gpu(model: Path, gpu: Any) -> None:
    taken = {}
    for bits in (16, 8, 6, 4):
        with load(model, gpu, dense_bits=bits) as engine:
            facts = engine.describe().to_json()
            dense = engine.loaded.form.nbytes
            own = [*engine.loaded.model.parameters(), *engine.loaded.model.buffers()]
            assert dense == sum(tensor.nbytes for tensor in own)
            strips = {
                layer._strips for layer in engine.loaded.model.modules() if type(layer) is DevicePackedLinear
            }
            unpacked = sum(strip._memory.nbytes for strip in strips)
            taken[bits] = (facts["memory_dense_bytes"], facts["memory_scratch_bytes"] - unpacked)
            assert gpu.limited_to == (1 << 30) - gpu.context_bytes - (96 << 20)
    assert taken[4][0] < taken[8][0] < taken[16][0]
    assert taken[4][1] == taken[8][1] == taken[16][1]


def test_a_budget_too_small_is_refused_and_the_least_is_named(
    gpu: Any, tmp_path: Path, moechat_home: Path
) -> None:
    # An attention of 50 MiB in float32, so that bits show in what is the least.
    config = tiny_config("qwen3_moe", 0, hidden_size=256, num_attention_heads=48, head_dim=256)
    write_tiny_checkpoint(tmp_path / "wide", config)
    least = {}
    for bits in (16, 4):
        with pytest.raises(DoesNotFitError, match="the least that works is") as caught:
            load(tmp_path / "wide", gpu, vram="100M", dense_bits=bits)
        assert caught.value.least_bytes is not None
        least[bits] = caught.value.least_bytes
    assert least[4] <= least[16] - (16 << 20)
    with load(tmp_path / "wide", gpu, vram=least[4], dense_bits=4):
        pass


def test_cpu_and_gpu_share_the_file_of_packed_layers(
    model: Path, gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOECHAT_HOME", str(tmp_path))
    monkeypatch.setattr(packed_file, "_PIECE", 1000)  # of which the file has many
    with load(model, gpu, dense_bits=4) as engine:
        wanted = engine.logits(FEW)
    (path,) = (tmp_path / "cache" / "dense").iterdir()
    whole = path.read_bytes()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed._native, "pack_linear", lambda *_, **__: pytest.fail("it was packed again"))
        with load(model, gpu, dense_bits=4) as engine:
            assert torch.equal(engine.logits(FEW), wanted)
        with on_cpu(model, 4) as engine:
            assert error_of(engine.logits(FEW), wanted) < TOLERANCE
    damaged = bytearray(whole)
    damaged[-1] ^= 1
    path.write_bytes(damaged)
    with load(model, gpu, dense_bits=4) as engine:
        assert torch.equal(engine.logits(FEW), wanted)
    assert path.read_bytes() == whole


def test_running_out_of_memory_while_packing_is_reported(
    model: Path, gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Strips, "__init__", never)
    with pytest.raises(DoesNotFitError, match="dense weights do not fit on the GPU") as caught:
        load(model, gpu, dense_bits=4)
    assert "end other programs" in str(caught.value.hint)


def test_the_error_for_unpackable_weights_names_them(
    model: Path, gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise ValueError("weight (0, 0) is inf")

    monkeypatch.setattr(_native, "pack_linear", refuse)
    monkeypatch.setattr(packed_file.PackedFile, "read_in_pieces", lambda *_: False)
    with pytest.raises(UnsupportedModelError, match="lm_head cannot be packed in 4 bits"):
        load(model, gpu, dense_bits=4)


def test_kernels_of_packed_layers_are_built_before_the_first_answer(
    model: Path, gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens: list[int] = []
    forward = DevicePackedLinear.forward

    def counted(layer: DevicePackedLinear, x: torch.Tensor) -> torch.Tensor:
        tokens.append(x.numel() // layer.in_features)
        return forward(layer, x)

    monkeypatch.setattr(DevicePackedLinear, "forward", counted)
    monkeypatch.setattr(gpu, "warm", lambda launches: [launch() for launch in launches])
    with load(model, gpu, dense_bits=4) as engine:
        kinds = {
            (layer.out_features, layer.in_features)
            for layer in engine.loaded.model.modules()
            if isinstance(layer, DevicePackedLinear)
        }
        assert set(tokens) == {1, 9}
        assert tokens.count(9) == len(kinds)
        assert tokens.count(1) >= len(kinds)  # layers as a whole are launched too


@pytest.mark.parametrize("dense_bits", ["auto", 16, 8])
def test_weights_in_the_encoding_of_a_file_match_the_cpu(
    dense_bits: int | str, gpu: Any, tmp_path: Path, moechat_home: Path
) -> None:
    family = FAMILIES["glm4moe"]
    config = family.config()
    file = tmp_path / "m.gguf"
    write_family(family, config, gguf_tensors(family, random_model(config)), file, all_as(Kind.Q8_0))
    arguments: dict[str, Any] = {"bits": 4, "dense_bits": dense_bits}
    with moechat.load(file, dtype="float32", activation_bits=32, ctx=64, **arguments) as engine:
        wanted = engine.logits(FEW)
        assert ("lm_head" in engine.loaded.form.encodings) == (dense_bits != 8)
    with load(file, gpu, **arguments) as engine:
        form = engine.loaded.form
        assert ("lm_head" in form.encodings) == (dense_bits != 8)
        kept = [module for module in engine.loaded.model.modules() if isinstance(module, DevicePackedLinear)]
        assert {module.layout.encoding for module in kept} == ({"q8_0"} if dense_bits != 8 else {None})
        # The embedding is no linear layer.
        assert "model.embed_tokens" not in form.encodings
        # The GPU has the embedding rounded to float16: that may decide between two experts of one token.
        errors = [error_of(*pair) for pair in zip(engine.logits(FEW), wanted, strict=True)]
        assert sorted(errors)[-2] < 2e-3


def test_dense_weights_of_quantised_checkpoints_are_kept(
    gpu: Any, tmp_path: Path, moechat_home: Path
) -> None:
    packed, source = tmp_path / "packed", write_source(tmp_path / "source")
    settings = {"quant_method": "awq", "bits": 4, "group_size": 64}
    write_pair(source, packed, tmp_path / "decoded", awq(64), settings)
    arguments: dict[str, Any] = {"bits": 4, "dense_bits": 16}
    with moechat.load(packed, dtype="float32", activation_bits=32, ctx=64, **arguments) as engine:
        wanted = [engine.logits(tokens) for tokens in (FEW, PROMPT)]
        layers = sorted(engine.loaded.form.encodings)
    assert "model.layers.0.self_attn.q_proj" in layers
    with load(packed, gpu, **arguments) as engine:
        assert sorted(names_of(engine, DevicePackedLinear)) == layers
        assert set(engine.loaded.form.encodings.values()) == {"int4"}
        for tokens, expected in zip((FEW, PROMPT), wanted, strict=True):
            assert error_of(engine.logits(tokens), expected) < TOLERANCE
