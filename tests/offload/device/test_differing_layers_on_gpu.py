"""Expert layers that differ in encodings or gates on a GPU, as far as that can be without one.

See ``interpreted_gpu.py``.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from families import tiny_family
from gguf.constants import GGMLQuantizationType as Kind
from gguf_support import save_model, tensors_of, write_gguf
from tiny import auto_class, write_tiny_checkpoint

import moechat
from moechat.config import RUN_AHEAD_VARIABLE
from moechat.configurator.systems import CacheSettings
from moechat.offload.settings import OffloadOptions

# Few tokens, and many.
PROMPTS = ([5, 17], [5, 17, 9, 33, 21, 2, 60, 44, 13])
TOLERANCE = 2e-5
PLAIN = CacheSettings(policy="lru", prefetch="none")


def q4_k_m(name: str, shape: tuple[int, ...]) -> Kind:
    if "_exps" not in name:
        return Kind.F32
    return Kind.Q6_K if "down" in name and name.startswith("blk.0.") else Kind.Q4_K


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, moechat_home: Path) -> Path:
    directory = tmp_path_factory.mktemp("kept")
    config = save_model("qwen3_moe", directory / "source")
    write_gguf("qwen3_moe", config, tensors_of(directory / "source"), directory / "m.gguf", q4_k_m)
    return directory / "m.gguf"


def load(model: Path, gpu: Any, *, pages: int | None = None, **arguments: Any) -> moechat.Engine:
    offload = OffloadOptions(accelerator=gpu, pages=pages, cache=arguments.pop("cache", None))
    usual = {"ctx": 64, "vram": "1G", "dense_bits": 16, "deterministic": True, "tune": False}
    return moechat.load(model, device="cuda", offload=offload, **{**usual, **arguments})


def error_of(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).abs().max() / wanted.abs().max())


def answer(engine: moechat.Engine, count: int) -> list[int]:
    return [step.token_id for step in engine.generate(PROMPTS[0], max_new_tokens=count, temperature=0.0)]


def test_experts_in_the_encodings_of_a_file_match_the_cpu_at_every_budget(model: Path, gpu: Any) -> None:
    with moechat.load(model, dtype="float32", dense_bits=16, activation_bits=32, ctx=64) as engine:
        wanted = [engine.logits(tokens) for tokens in PROMPTS]
    found = []
    for pages in (6, None):
        with load(model, gpu, pages=pages) as engine:
            assert engine.notices() == []
            assert engine.describe().experts_form == "Q4_K and Q6_K"
            found.append([engine.logits(tokens) for tokens in PROMPTS])
    for few, all_of_them, logits in zip(*found, wanted, strict=True):
        assert torch.equal(few, all_of_them)
        assert error_of(few, logits) < TOLERANCE


def test_graphs_that_look_pages_up_give_the_same_answer(
    model: Path, gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = []
    for graphs in ("0", "1"):
        monkeypatch.setenv("MOECHAT_CUDA_GRAPHS", graphs)
        monkeypatch.setenv(RUN_AHEAD_VARIABLE, graphs)
        with load(model, gpu, pages=12, cache=PLAIN, deterministic=False) as engine:
            answers.append(answer(engine, 4))
            assert engine.notices() == []
    assert answers[0] == answers[1]
    assert sum(graphs.replayed for graphs in gpu.graphs_made) > 0


def test_gates_of_their_own_match_the_cpu(gpu: Any, tmp_path: Path, moechat_home: Path) -> None:
    config = tiny_family("step3p7")
    text = config.get_text_config()
    text.mlp_layer_types = ["dense", "dense", "sparse", "sparse"]
    text.swiglu_limits = [0.0, 0.0, 0.0, 1.0]
    text.eos_token_id = None
    write_tiny_checkpoint(tmp_path, config)
    reference = auto_class(config).from_pretrained(tmp_path, dtype=torch.float32)
    for name, parameter in reference.named_parameters():
        if name.endswith("gate_up_proj"):
            parameter.data *= 8  # or nothing would reach the limit
    reference.save_pretrained(tmp_path)
    usual = {"bits": 4, "dense_bits": 16, "dtype": "float32", "ctx": 64}
    with moechat.load(tmp_path, activation_bits=32, **usual) as engine:
        wanted = engine.logits(PROMPTS[0])
        geometry = engine.loaded.store.geometry
        assert [gate.limit for gate in geometry.layer_gates] == [math.inf, 1.0]
    with load(tmp_path, gpu, pages=6, **usual) as engine:
        assert error_of(engine.logits(PROMPTS[0]), wanted) < TOLERANCE
