"""Expert layers that native code launches, against the same layers launched from Python.

Kernels are Triton's, interpreted, and launched through the fake driver as builds are (``fake_kernels.py``).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from fake_kernels import BuiltKernel, built_kernels

import moechat
from moechat.config import RUN_AHEAD_VARIABLE
from moechat.models.cache_argument import cache_of
from moechat.offload.launched_layers import LaunchedLayers
from moechat.offload.settings import OffloadOptions

PROMPT = [5, 17, 9, 33, 21]
TOKENS = [3, 10, 17, 24, 31, 38, 45, 52]


@pytest.fixture(autouse=True)
def _the_host_launches_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RUN_AHEAD_VARIABLE, "0")


@pytest.fixture
def built(gpu, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[BuiltKernel]]:
    with built_kernels(monkeypatch, gpu.before_kernels) as made:
        yield made


@pytest.fixture
def natively(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Layers that were given to native code."""
    given: list[int] = []
    answer = LaunchedLayers.answer

    def counted(self: LaunchedLayers, ordinal: int) -> None:
        given.append(ordinal)
        answer(self, ordinal)

    monkeypatch.setattr(LaunchedLayers, "answer", counted)
    return given


def load(model: Path, gpu, pages: int | None = None, **arguments):
    usual = {"ctx": 64, "vram": "1G", "system": "moepic", "activation_bits": 32}
    offload = OffloadOptions(accelerator=gpu, pages=pages)
    return moechat.load(model, device="cuda", offload=offload, **{**usual, **arguments})


def decoded(engine, tokens=TOKENS):
    """Last logits of a prompt and of single tokens."""
    cache, found = engine.decoder.new_cache(), []
    for each in (PROMPT, *([token] for token in tokens)):
        output = engine.passes.run(torch.tensor([each]), cache)
        cache = cache_of(output)
        found.append(output.logits[0, -1])
    return torch.stack(found)


def error_of(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize(
    ("system", "pages"),
    [("moepic", 9), ("moepic", 2), ("on-demand", None), ("deepspeed", 9), ("expertflow", 9)],
)
def test_logits_are_those_of_layers_launched_from_python(
    model: Path, gpu, built, natively: list[int], system: str, pages: int | None
) -> None:
    gpu.cuda.set(jitter=2e-4, latency=5e-5, seed=3, piece=4096)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LaunchedLayers, "of", lambda *_: None)
        with load(model, gpu, pages, system=system) as engine:
            expected = decoded(engine)
    assert natively == []
    with load(model, gpu, pages, system=system) as engine:
        found = decoded(engine)
        layers = engine.describe().expert_layers
        clocks = engine.loaded.near.layer(0).pages.clocks
        clocks.take()
        clocks.expect_next()
        natively.clear()
        decoded(engine, TOKENS[:2])
        assert natively == [*range(layers)] * 2
        timed = clocks.take()
        assert timed.layers == layers
        assert timed.launches >= layers
        assert timed.expert_bytes > 0
        assert engine.notices() == []
        assert engine.loaded.near.runner.check() == ""
        counters = engine.loaded.near.counters
        assert counters.activations == 2 * layers * (2 * len(PROMPT) + len(TOKENS) + 2)
    assert torch.equal(found, expected)


def test_after_pages_were_given_back_the_others_are_used(
    model: Path, gpu, built, natively: list[int]
) -> None:
    with load(model, gpu, 20) as engine:
        expected = decoded(engine)
    with load(model, gpu, 20) as engine:
        near = engine.loaded.near
        assert torch.equal(decoded(engine), expected)
        near.shrink(0.5)
        assert near.pages == 10
        natively.clear()
        assert torch.equal(decoded(engine), expected)
        assert near.runner.check() == ""
    assert natively


@pytest.mark.parametrize(("miss", "pages"), [("both", 2), ("cpu", 9), ("compute", 9), ("seldom", 9)])
def test_the_part_of_the_cpu_is_added(
    model: Path, gpu, built, natively: list[int], miss: str, pages: int
) -> None:
    gpu.cuda.set(jitter=2e-4, latency=5e-5, seed=3, piece=4096)
    with moechat.load(model, dtype="float32", dense_bits=16, activation_bits=32, ctx=64) as engine:
        expected = decoded(engine)
    with load(model, gpu, pages, system=f"auto:miss={miss}") as engine:
        near = engine.loaded.near
        for launch in near.layer(0).pages.first_launches(2, torch.float32, passes=(1,)):
            launch()  # as loading does on a GPU
        found = decoded(engine)
        assert near.stats()["blocks_far"] > 0
        assert engine.notices() == []
        assert near.runner.check() == ""
    assert error_of(found, expected) < 2e-5
    assert natively
