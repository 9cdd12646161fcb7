"""Long prompts of an engine whose experts do not all fit: waves move missing experts once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny import tiny_config, write_tiny_checkpoint
from torch import nn

import moechat
from moechat import Engine
from moechat.configurator.systems import CacheSettings
from moechat.models.attention_cache import cache_lengths
from moechat.models.wave_chunks import Chunk, ExpertInputs, NotInWavesError
from moechat.models.waves import Waves
from moechat.offload.settings import LinkSettings, OffloadOptions

CHUNK = 16
TOKENS = 4 * CHUNK + 1  # the last one alone: it is computed like a decoded token
PROMPT = torch.randint(3, 100, (TOKENS,), generator=torch.Generator().manual_seed(5)).tolist()
# Nothing is prefetched by guesses, so that the bytes that are moved can be counted.
PLAIN = OffloadOptions(pages=8, cache=CacheSettings(prefetch="none"))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, home: Path) -> Path:
    directory: Path = tmp_path_factory.mktemp("waves") / "qwen3"
    write_tiny_checkpoint(directory, tiny_config("qwen3_moe", 0, num_hidden_layers=4))
    return directory


def cut(engine: Engine, chunk: int, wave: int) -> Engine:
    """The engine with other sizes of chunks and waves, as for a model whose chunks are shorter."""
    loaded = engine.loaded
    engine.passes.loaded = replace(loaded, chunk=chunk, plan=replace(loaded.plan, wave=wave))
    return engine


@pytest.fixture
def engine(checkpoint: Path) -> Iterator[Engine]:
    with moechat.load(checkpoint, offload=PLAIN) as loaded:
        yield cut(loaded, CHUNK, 4 * CHUNK)


def answer(engine: Engine, prompt: list[int] = PROMPT, count: int = 6) -> list[int]:
    return [step.token_id for step in engine.generate(prompt, max_new_tokens=count, temperature=0.0)]


def moved(engine: Engine) -> int:
    """Blocks that a prompt moves into an engine's pages."""
    assert engine.loaded.near is not None
    engine.loaded.near.reset_stats()
    answer(engine, PROMPT[:-1], 1)
    engine.loaded.near.drain()
    stats = engine.loaded.near.stats()
    return int(stats["fetched_demand"] + stats["fetched_prefetch"])


@pytest.mark.parametrize("wave", [2 * CHUNK, 3 * CHUNK, 4 * CHUNK])
def test_answers_and_logits_do_not_depend_on_waves(checkpoint: Path, engine: Engine, wave: int) -> None:
    with moechat.load(checkpoint, offload=PLAIN) as other:
        cut(other, CHUNK, 0)
        wanted, logits = answer(other), other.logits(PROMPT)
    cut(engine, CHUNK, wave)
    assert answer(engine) == wanted
    assert torch.equal(engine.logits(PROMPT), logits)


def test_mapped_experts_compute_all_tokens_of_a_wave_at_once(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with moechat.load(checkpoint) as engine:
        assert engine.loaded.near is None
        cut(engine, CHUNK, 0)
        wanted, logits = answer(engine), engine.logits(PROMPT)
        sizes: list[int] = []
        compute = Waves._compute

        def seen(
            waves: Waves, number: int, layer: nn.Module, parts: list[Chunk], inputs: ExpertInputs
        ) -> None:
            sizes.append(len(inputs.x))
            compute(waves, number, layer, parts, inputs)

        engine.drop_prompt_cache()
        cut(engine, CHUNK, 4 * CHUNK)
        assert engine.loaded.waves.usable(engine.loaded.new_cache, torch.device("cpu"))
        monkeypatch.setattr(Waves, "_compute", seen)
        assert answer(engine) == wanted
        assert sizes == [4 * CHUNK] * 4, "once a layer"
        assert torch.equal(engine.logits(PROMPT), logits)


def test_a_prompt_of_several_chunks_moves_what_one_of_one_chunk_moves(
    checkpoint: Path, engine: Engine
) -> None:
    with moechat.load(checkpoint, offload=PLAIN) as other:
        at_once = moved(cut(other, 4 * CHUNK, 0))
        assert other.loaded.near is not None
        kept = other.loaded.near.runner.residency()
    with moechat.load(checkpoint, offload=PLAIN) as other:
        in_passes = moved(cut(other, CHUNK, 0))
    assert moved(engine) == at_once
    assert engine.loaded.near is not None
    assert (engine.loaded.near.runner.residency() == kept).all()
    geometry = engine.loaded.store.geometry
    assert at_once <= 4 * geometry.num_experts * geometry.blocks_per_expert
    assert in_passes > 2.5 * at_once
    assert engine.loaded.near.stats()["pages_peak"] <= 8
    assert engine.loaded.near.runner.check() == ""


def test_a_wave_streams_the_next_layer_while_one_is_computed(checkpoint: Path) -> None:
    offload = OffloadOptions(
        pages=30, cache=CacheSettings(prefetch="next-router"), link=LinkSettings(kind="sim", bandwidth=1e9)
    )
    with moechat.load(checkpoint, offload=offload) as engine:
        blocks = moved(cut(engine, CHUNK, 4 * CHUNK))
        assert engine.loaded.near is not None
        assert engine.loaded.near.stats()["fetched_prefetch"] > 0
        geometry = engine.loaded.store.geometry
        # Every block once, and what is guessed for the first decoded token.
        assert blocks <= (4 + 1) * geometry.num_experts * geometry.blocks_per_expert


def test_the_progress_moves_within_a_wave(engine: Engine) -> None:
    seen: list[tuple[int, int]] = []
    for _ in engine.generate(PROMPT, max_new_tokens=2, progress=lambda done, all: seen.append((done, all))):
        pass
    done = [tokens for tokens, _ in seen]
    assert done == sorted(done)
    assert (done[0], done[-1]) == (0, TOKENS)
    assert {all for _, all in seen} == {TOKENS}
    assert len(set(done)) > 4 * 4  # several times a layer


@pytest.mark.parametrize("moment", [1, 9, 18])
def test_an_interrupted_wave_leaves_an_engine_that_answers_the_same(engine: Engine, moment: int) -> None:
    wanted = answer(engine)
    engine.drop_prompt_cache()
    calls = 0

    def interrupt(_done: int, _all: int) -> None:
        nonlocal calls
        calls += 1
        if calls > moment:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(engine.generate(PROMPT, max_new_tokens=2, progress=interrupt))
    assert engine.loaded.near is not None
    assert engine.loaded.near.runner.check() == ""
    assert answer(engine) == wanted


def test_the_next_turn_is_computed_in_waves_behind_the_last_one(checkpoint: Path, engine: Engine) -> None:
    first = answer(engine)
    second = [*PROMPT, *first, *PROMPT[: 3 * CHUNK]]
    found = answer(engine, second)
    assert engine.stats.reused_tokens == len(PROMPT) + len(first) - 1
    with moechat.load(checkpoint, offload=PLAIN) as other:
        cut(other, CHUNK, 0)
        assert answer(other) == first
        assert answer(other, second) == found


def test_a_model_whose_waves_fail_is_computed_in_passes_and_the_user_is_told(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = answer(engine)
    engine.drop_prompt_cache()
    waves = engine.loaded.waves
    assert waves.usable(lambda _: None, torch.device("cpu"))  # tried already
    held: list[list[int] | None] = []

    def fail(number: int, *_: object) -> None:
        held.append(cache_lengths(None))
        if number == 2:
            raise NotInWavesError("it does something else")
        reach(number, *_)  # type: ignore[arg-type]

    reach = waves._reach
    monkeypatch.setattr(waves, "_reach", fail)
    assert answer(engine) == wanted
    assert [note for note in engine.notices() if "passes of 16 tokens" in note]
    failed = len(held)
    engine.drop_prompt_cache()
    assert answer(engine) == wanted
    assert len(held) == failed, "waves are not tried again"
    assert engine.notices() == [], "said once"
