"""The engine on a real GPU; `pytest -m gpu tests/gpu`, in a process of its own.

``tests/offload/device`` tests the same path over a driver that works in host memory, in more ways.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from families import tiny_family
from homes import shared_home
from tiny import tiny_config, write_tiny_checkpoint

import moechat
from moechat.config import RUN_AHEAD_VARIABLE
from moechat.models.cache_argument import cache_of
from moechat.offload.graph_decoder import GraphDecoder
from moechat.offload.launched_layers import LaunchedLayers
from moechat.offload.settings import OffloadOptions

pytestmark = pytest.mark.gpu

PROMPT = [5, 17, 9, 33, 21, 2, 60, 44, 13, 71, 8, 8, 30]

# Whose attention caches hold states, which replays overwrite.
STATES = ("qwen3_next", "qwen3_5_moe_text", "nemotron_h", "lfm2_moe", "kimi_linear")


@pytest.fixture(autouse=True, scope="module")
def _real_driver() -> None:
    if "fake_cuda" in sys.modules or "MOECHAT_CUDA_DRIVER" in os.environ:
        pytest.skip("this process has opened another driver: run these tests by themselves")


@pytest.fixture(scope="module")
def moechat_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with shared_home(tmp_path_factory) as home:
        yield home


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, moechat_home: Path) -> Path:
    directory = tmp_path_factory.mktemp("tiny") / "qwen3"
    write_tiny_checkpoint(directory, tiny_config("qwen3_moe", 0))
    return directory


def error_of(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("bits", [2, 3, 4, 6, 8, 16])
def test_logits_are_those_of_the_cpu(model: Path, bits: int) -> None:
    with moechat.load(model, bits=bits, dtype="float32", dense_bits=16, activation_bits=32, ctx=64) as engine:
        expected = engine.logits(PROMPT)
    with moechat.load(model, bits=bits, device="cuda", dtype="float32", ctx=64) as engine:
        assert error_of(engine.logits(PROMPT), expected) < 1e-4
        assert engine.describe().device == "cuda:0"


@pytest.mark.parametrize("dense_bits", [8, 6, 4])
def test_logits_are_those_of_the_cpu_with_the_same_dense_bits(model: Path, dense_bits: int) -> None:
    # More than a few tokens, and a few.
    prompts = (PROMPT, PROMPT[:5])
    with moechat.load(model, dtype="float32", dense_bits=dense_bits, activation_bits=32, ctx=64) as engine:
        expected = [engine.logits(prompt) for prompt in prompts]
    with moechat.load(model, device="cuda", dtype="float32", dense_bits=dense_bits, ctx=64) as engine:
        for prompt, wanted in zip(prompts, expected, strict=True):
            assert error_of(engine.logits(prompt), wanted) < 1e-4


def test_packed_dense_weights_take_less_of_a_budget_that_holds(model: Path) -> None:
    taken = {}
    for bits in (16, 4):
        with moechat.load(model, vram="2G", ctx=64, dense_bits=bits) as engine:
            list(engine.generate(PROMPT, max_new_tokens=16, temperature=0.0))
            gpu = engine.loaded.accelerator
            assert gpu.context_bytes + gpu.peak_bytes() <= 2 << 30
            taken[bits] = engine.describe().memory_dense_bytes
    assert taken[4] < taken[16]


@pytest.mark.parametrize("dense_bits", [8, 6, 4])
def test_packed_dense_weights_give_the_same_answer_at_every_budget(model: Path, dense_bits: int) -> None:
    results = []
    for pages in (2, None):
        options = OffloadOptions(pages=pages)
        with moechat.load(
            model,
            device="cuda",
            vram="4G",
            ctx=64,
            dense_bits=dense_bits,
            deterministic=True,
            offload=options,
        ) as engine:
            answer = [step.token_id for step in engine.generate(PROMPT, max_new_tokens=24, temperature=0.0)]
            results.append((engine.logits(PROMPT), answer))
    assert torch.equal(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]


@pytest.mark.parametrize("system", ["auto", "moepic", "mixtral-offloading", "deepspeed", "on-demand"])
def test_the_answer_is_the_same_at_every_budget(model: Path, system: str) -> None:
    results = []
    for pages in (2, 9, None):
        options = OffloadOptions(pages=pages)
        with moechat.load(
            model, device="cuda", vram="4G", ctx=64, system=system, deterministic=True, offload=options
        ) as engine:
            answer = [step.token_id for step in engine.generate(PROMPT, max_new_tokens=24, temperature=0.0)]
            results.append((engine.logits(PROMPT), answer))
            assert engine.loaded.near.runner.check() == ""
    for logits, answer in results[1:]:
        assert torch.equal(logits, results[0][0])
        assert answer == results[0][1]


@pytest.mark.parametrize("system", ["auto", "fiddler"])
def test_what_the_cpu_computes_of_a_layer_is_part_of_the_answer(model: Path, system: str) -> None:
    with moechat.load(model, dtype="float32", dense_bits=16, activation_bits=32, ctx=64) as engine:
        expected = engine.logits(PROMPT)
    for pages in (2, 9):
        options = OffloadOptions(pages=pages)
        with moechat.load(
            model,
            device="cuda",
            dtype="float32",
            dense_bits=16,
            activation_bits=32,
            ctx=64,
            system=system,
            offload=options,
        ) as engine:
            for _ in range(3):
                assert error_of(engine.logits(PROMPT), expected) < 1e-4
                list(engine.generate(PROMPT, max_new_tokens=8, temperature=0.0))
            assert engine.stats.shared_bytes > 0


@pytest.mark.parametrize(("system", "pages"), [("moepic", 9), ("deepspeed", 9), ("on-demand", 20)])
def test_layers_launched_by_native_code_give_what_python_launches(
    model: Path, system: str, pages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RUN_AHEAD_VARIABLE, "0")
    natively: list[int] = []
    answer = LaunchedLayers.answer

    def counted(self: LaunchedLayers, ordinal: int) -> None:
        natively.append(ordinal)
        answer(self, ordinal)

    def logits() -> torch.Tensor:
        options = OffloadOptions(pages=pages)
        with moechat.load(model, device="cuda", ctx=64, system=system, offload=options) as engine:
            list(engine.generate(PROMPT, max_new_tokens=12, temperature=0.0))
            found, cache = engine.decoder.feed(PROMPT, engine.decoder.new_cache())
            rows = [found.reshape(-1)]
            for token in PROMPT:
                found, cache = engine.decoder.feed([token], cache)
                rows.append(found.reshape(-1))
            assert engine.notices() == []
            assert engine.loaded.near.runner.check() == ""
            return torch.stack(rows).cpu()

    monkeypatch.setattr(LaunchedLayers, "answer", counted)
    found = logits()
    assert natively
    monkeypatch.setattr(LaunchedLayers, "of", lambda *_: None)
    natively.clear()
    assert torch.equal(found, logits())
    assert not natively


def test_the_budget_holds(model: Path) -> None:
    with moechat.load(model, vram="2G", ctx=64) as engine:
        list(engine.generate(PROMPT, max_new_tokens=16, temperature=0.0))
        gpu = engine.loaded.accelerator
        assert gpu.context_bytes + gpu.peak_bytes() <= 2 << 30


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "gpt_oss", "deepseek_v2"])
@pytest.mark.parametrize("kv_bits", [16, 8])
def test_graphs_give_what_passes_give(
    family: str,
    dtype: str,
    kv_bits: int,
    tmp_path: Path,
    moechat_home: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write_tiny_checkpoint(tmp_path / family, tiny_config(family, 0))
    compare_graphs(tmp_path / family, monkeypatch, dtype=dtype, kv_bits=kv_bits)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", [*STATES, "glm4_moe", "glm4_moe_lite", "deepseek_v3", "gemma4_text"])
def test_graphs_of_more_families_give_what_passes_give(
    family: str, dtype: str, tmp_path: Path, moechat_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tiny_checkpoint(tmp_path / family, tiny_family(family))
    compare_graphs(tmp_path / family, monkeypatch, dtype=dtype)


@pytest.mark.parametrize("family", STATES)
def test_states_are_replayed_where_experts_are_missing(
    family: str, tmp_path: Path, moechat_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tiny_checkpoint(tmp_path / family, tiny_family(family))
    few = {"offload": OffloadOptions(pages=6), "system": "moepic"}
    for ahead in ("0", "1"):
        monkeypatch.setenv(RUN_AHEAD_VARIABLE, ahead)
        compare_graphs(tmp_path / family, monkeypatch, dtype="float32", **few)


def compare_graphs(model: Path, monkeypatch: pytest.MonkeyPatch, *, dtype: str, **options) -> None:
    """Logits of decoded tokens with graphs and without."""

    def logits(graphs: str) -> tuple[torch.Tensor, bool]:
        monkeypatch.setenv("MOECHAT_CUDA_GRAPHS", graphs)
        found = []
        with moechat.load(model, device="cuda", dtype=dtype, ctx=64, **options) as engine:
            for _ in range(2):  # two answers over the same graphs
                cache = engine.decoder.new_cache()
                for tokens in [PROMPT, *([token] for token in range(3, 12)), [7, 8, 9], [4], [5]]:
                    output = engine.passes.run(torch.tensor([tokens]), cache)
                    cache = cache_of(output)
                    found.append(output.logits[0, -1].float().cpu())
                del cache, output
            decoder = engine.loaded.decoder
            used = isinstance(decoder, GraphDecoder) and decoder._recording is not None and not decoder.off
            assert engine.notices() == []
        return torch.stack(found), used

    expected, used = logits("0")
    assert not used
    found, used = logits("1")
    assert used
    # In 16 bits a tie may go to another expert.
    off = (found - expected).norm(dim=1) / expected.norm(dim=1)
    assert (
        off.max() < 1e-4 if dtype == "float32" else off.median() < {"float16": 1e-2, "bfloat16": 5e-2}[dtype]
    )


@pytest.mark.parametrize(("pages", "ahead"), [(None, None), (None, "0"), (9, "1"), (9, None)])
def test_the_gpu_looks_experts_up_where_it_should(
    model: Path, pages: int | None, ahead: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tokens(engine) -> list[int]:
        return [step.token_id for step in engine.generate(PROMPT, max_new_tokens=24, temperature=0.0)]

    plain = {"dtype": "float32", "ctx": 64}
    with moechat.load(model, dense_bits=16, activation_bits=32, **plain) as engine:
        expected = tokens(engine)
    if ahead is not None:
        monkeypatch.setenv(RUN_AHEAD_VARIABLE, ahead)
    with moechat.load(
        model, device="cuda", system="moepic", offload=OffloadOptions(pages=pages), **plain
    ) as engine:
        assert tokens(engine) == expected
        recording = engine.loaded.decoder._recording
        assert recording is not None
        assert (recording.ahead is not None) == (ahead == "1" or (pages is None and ahead is None))
        assert (recording.complete is not None) == (pages is None and ahead is None)
        assert engine.notices() == []
        assert engine.loaded.near.runner.check() == ""


def test_a_pass_that_cannot_be_recorded_leaves_the_gpu_usable(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tokens(engine) -> list[int]:
        return [step.token_id for step in engine.generate(PROMPT, max_new_tokens=8, temperature=0.0)]

    with monkeypatch.context() as patch:
        patch.setenv("MOECHAT_CUDA_GRAPHS", "0")
        with moechat.load(model, device="cuda", dtype="float32", ctx=64) as engine:
            expected = tokens(engine)
    with moechat.load(model, device="cuda", dtype="float32", ctx=64) as engine:
        engine.loaded.model.model.norm.register_forward_hook(
            lambda _, __, out: out if out.sum() > 0 else +out
        )
        assert tokens(engine) == expected
        (note,) = engine.notices()
        assert "cannot be recorded" in note
        assert tokens(engine) == expected
    torch.cuda.empty_cache()


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "deepseek_v2", "olmoe"])
def test_other_families_give_what_the_cpu_gives(family: str, tmp_path: Path, moechat_home: Path) -> None:
    write_tiny_checkpoint(tmp_path / family, tiny_config(family, 0))
    with moechat.load(
        tmp_path / family, dtype="float32", dense_bits=16, activation_bits=32, ctx=64
    ) as engine:
        expected = engine.logits(PROMPT)
    with moechat.load(tmp_path / family, device="cuda", dtype="float32", ctx=64) as engine:
        assert error_of(engine.logits(PROMPT), expected) < 1e-4
