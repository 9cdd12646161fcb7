"""Prompts of families with linear attention or convolutions: in parts, in waves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from families import tiny_family
from tiny import auto_class, write_tiny_checkpoint

import moechat
from moechat import Engine
from moechat.configurator.systems import CacheSettings
from moechat.models.threads import one_thread
from moechat.offload.settings import OffloadOptions

CHUNK = 16
PROMPT = torch.randint(3, 100, (4 * CHUNK + 5,), generator=torch.Generator().manual_seed(5)).tolist()
PAGES = OffloadOptions(pages=8, cache=CacheSettings(prefetch="none"))


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory, home: Path) -> dict[str, Path]:
    """Tiny checkpoints as transformers writes them."""
    directory = tmp_path_factory.mktemp("states")
    for family in ("qwen3_next", "lfm2_moe", "zaya", "jamba"):
        config = tiny_family(family)
        config.eos_token_id = None
        write_tiny_checkpoint(directory / family, config)
    return {path.name: path for path in directory.iterdir()}


def cut(engine: Engine, wave: int = 0) -> Engine:
    """The engine with short parts, as for a longer prompt."""
    loaded = engine.loaded
    engine.passes.loaded = replace(loaded, chunk=CHUNK, plan=replace(loaded.plan, wave=wave))
    return engine


@pytest.fixture
def engine(checkpoints: dict[str, Path]) -> Iterator[Engine]:
    with moechat.load(checkpoints["qwen3_next"], offload=PAGES) as loaded:
        yield cut(loaded)


def answer(engine: Engine, prompt: list[int] = PROMPT, count: int = 5) -> list[int]:
    return [step.token_id for step in engine.generate(prompt, max_new_tokens=count, temperature=0.0)]


@pytest.mark.parametrize("family", ["qwen3_next", "lfm2_moe", "zaya", "jamba"])
def test_a_long_prompt_gives_the_logits_of_transformers(family: str, checkpoints: dict[str, Path]) -> None:
    config = tiny_family(family)
    model = auto_class(config).from_pretrained(checkpoints[family], dtype=torch.float32).eval()
    with torch.inference_mode(), one_thread():
        wanted = model(input_ids=torch.tensor([PROMPT])).logits[0]
    with moechat.load(checkpoints[family], bits=16, dense_bits=16, dtype="float32") as engine:
        cut(engine)
        parts = engine.decoder.parts(torch.tensor([PROMPT]), len(PROMPT))
        assert len(parts) == (1 if family == "jamba" else 5)
        found = engine.logits(PROMPT)
        notices = engine.notices()
    assert float((found - wanted).abs().max()) <= 1e-4 * max(1.0, float(wanted.abs().max()))
    assert [note for note in notices if "computed in one pass" in note] == (
        notices if family == "jamba" else []
    )
    assert bool(notices) == (family == "jamba")


def test_waves_give_the_bits_of_parts(checkpoints: dict[str, Path], engine: Engine) -> None:
    wanted, logits = answer(engine), engine.logits(PROMPT)
    with moechat.load(checkpoints["qwen3_next"], offload=PAGES) as other:
        cut(other, 4 * CHUNK)
        assert answer(other) == wanted
        assert torch.equal(other.logits(PROMPT), logits)
        assert other.notices() == []


@pytest.mark.parametrize("family", ["qwen3_next", "lfm2_moe", "jamba"])
def test_what_is_planned_is_what_is_loaded(family: str, checkpoints: dict[str, Path]) -> None:
    planned = moechat.plan(str(checkpoints[family]), ctx=200, ram="4G", bits=4)
    with moechat.load(checkpoints[family], ctx=200, ram="4G", bits=4) as engine:
        loaded = {part.name: part.nbytes for part in engine.loaded.plan.parts}
    parts = {part.name: part.nbytes for part in planned.tiers[0].parts}
    for name in ("dense weights", "attention cache", "workspace"):
        assert parts[name] == loaded[name]
    assert any("computed in one pass" in note for note in planned.notes) == (family == "jamba")
