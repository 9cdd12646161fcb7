"""Prompts of families with linear attention, convolutions or indexers: in parts, in waves, and behind copied
states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from families import tiny_family
from tiny import auto_class, write_tiny_checkpoint

import moechat
from moechat import Engine
from moechat.configurator.systems import CacheSettings
from moechat.models import skeleton
from moechat.models.cache_states import can_copy, tensors_of
from moechat.models.prompt_cache import thinned
from moechat.models.threads import one_thread
from moechat.offload.settings import OffloadOptions

CHUNK = 16
PROMPT = torch.randint(3, 100, (4 * CHUNK + 5,), generator=torch.Generator().manual_seed(5)).tolist()
PAGES = OffloadOptions(pages=8, cache=CacheSettings(prefetch="none"))


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory, home: Path) -> dict[str, Path]:
    """Tiny checkpoints as transformers writes them."""
    directory = tmp_path_factory.mktemp("states")
    for family in (
        "qwen3_next",
        "lfm2_moe",
        "zaya",
        "jamba",
        "nemotron_h",
        "qwen3_moe",
        "gpt_oss",
        "gemma4_text",
        "glm_moe_dsa",
        "deepseek_v4",
        "qwen4_exp_text",
        "glm5_next",
    ):
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


def seen(engine: Engine, prompt: list[int], count: int = 4) -> tuple[list[int], list[torch.Tensor], int]:
    """Tokens of an answer, the logits that they were drawn from, and the reused tokens."""
    logits: list[torch.Tensor] = []
    decoder, advance, step = engine.decoder, engine.decoder.advance, engine.decoder.step

    def record(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            found = real(*args, **named)
            logits.append(found[0].clone())
            return found

        return call

    vars(decoder).update(advance=record(advance), step=record(step))
    try:
        tokens = answer(engine, prompt, count)
    finally:
        del decoder.__dict__["advance"], decoder.__dict__["step"]
    return tokens, logits[-count:], engine.stats.reused_tokens


@pytest.mark.parametrize(
    "family",
    [
        "qwen3_next",
        "lfm2_moe",
        "zaya",
        "jamba",
        "nemotron_h",
        "glm_moe_dsa",
        "deepseek_v4",
        "qwen4_exp_text",
        "glm5_next",
    ],
)
def test_a_long_prompt_gives_the_logits_of_transformers(family: str, checkpoints: dict[str, Path]) -> None:
    config = tiny_family(family)
    model = auto_class(config).from_pretrained(checkpoints[family], dtype=torch.float32).eval()
    with torch.inference_mode(), one_thread():
        wanted = model(input_ids=torch.tensor([PROMPT])).logits[0]
    with moechat.load(checkpoints[family], bits=16, dense_bits=16, dtype="float32") as engine:
        cut(engine)
        parts = engine.decoder.parts(torch.tensor([PROMPT]), len(PROMPT))
        assert len(parts) == 5
        found = engine.logits(PROMPT)
        notices = engine.notices()
    assert float((found - wanted).abs().max()) <= 1e-4 * max(1.0, float(wanted.abs().max()))
    assert notices == []


def test_waves_give_the_bits_of_parts(checkpoints: dict[str, Path], engine: Engine) -> None:
    wanted, logits = answer(engine), engine.logits(PROMPT)
    with moechat.load(checkpoints["qwen3_next"], offload=PAGES) as other:
        cut(other, 4 * CHUNK)
        assert answer(other) == wanted
        assert torch.equal(other.logits(PROMPT), logits)
        assert other.notices() == []


@pytest.mark.parametrize(
    "family",
    [
        "qwen3_next",
        "lfm2_moe",
        "jamba",
        "nemotron_h",
        "glm_moe_dsa",
        "deepseek_v4",
        "qwen4_exp_text",
        "glm5_next",
    ],
)
def test_what_is_planned_is_what_is_loaded(family: str, checkpoints: dict[str, Path]) -> None:
    planned = moechat.plan(str(checkpoints[family]), ctx=200, ram="4G", bits=4)
    with moechat.load(checkpoints[family], ctx=200, ram="4G", bits=4) as engine:
        loaded = {part.name: part.nbytes for part in engine.loaded.plan.parts}
    parts = {part.name: part.nbytes for part in planned.tiers[0].parts}
    for name in ("dense weights", "attention cache", "workspace"):
        assert parts[name] == loaded[name]
    assert not any("computed in one pass" in note for note in planned.notes)


@pytest.mark.parametrize("wave", [0, 4 * CHUNK])
@pytest.mark.parametrize(
    "family",
    [
        "qwen3_next",
        "lfm2_moe",
        "zaya",
        "jamba",
        "nemotron_h",
        "qwen3_moe",
        "gpt_oss",
        "gemma4_text",
        "glm_moe_dsa",
        "deepseek_v4",
        "qwen4_exp_text",
        "glm5_next",
    ],
)
def test_an_edited_prompt_goes_back_to_a_part_and_gives_the_bits_of_a_fresh_one(
    family: str, wave: int, checkpoints: dict[str, Path]
) -> None:
    edited = [*PROMPT[:-8], *range(40, 52)]
    early = [*PROMPT[: CHUNK + 3], 7, 8, 9]
    with moechat.load(checkpoints[family], offload=PAGES) as engine:
        cut(engine, wave)
        answer(engine)
        found = seen(engine, edited)
        assert found[2] == 3 * CHUNK
        back = seen(engine, early)
        assert back[2] == CHUNK
        for prompt, (tokens, logits, _) in ((edited, found), (early, back)):
            engine.drop_prompt_cache()
            wanted = seen(engine, prompt)
            assert wanted[2] == 0
            assert wanted[0] == tokens
            assert all(map(torch.equal, wanted[1], logits))


@pytest.mark.parametrize("kv_bits", [16, 8])
def test_windows_are_copied_in_both_forms(kv_bits: int, checkpoints: dict[str, Path]) -> None:
    """As after a turn whose template leaves the thoughts of the one before out."""
    edited = [*PROMPT[:-8], *range(40, 52)]
    with moechat.load(checkpoints["gpt_oss"], offload=PAGES, kv_bits=kv_bits) as engine:
        cut(engine)
        assert engine.loaded.cache.copies == 8
        answer(engine)
        tokens, logits, reused = seen(engine, edited)
        assert reused == 3 * CHUNK
        engine.drop_prompt_cache()
        fresh = seen(engine, edited)
        assert (fresh[0], fresh[2]) == (tokens, 0)
        assert all(map(torch.equal, fresh[1], logits))


@pytest.mark.parametrize("family", ["qwen3_next", "lfm2_moe", "zaya", "nemotron_h", "gpt_oss", "glm_moe_dsa"])
def test_the_next_turn_computes_only_new_tokens(family: str, checkpoints: dict[str, Path]) -> None:
    # Rounding to bf16 changes which tokens an indexer chooses.
    dtype = "float32" if family == "glm_moe_dsa" else "auto"
    with moechat.load(checkpoints[family], offload=PAGES, dtype=dtype) as engine:
        cut(engine)
        second = [*PROMPT, *answer(engine), *PROMPT[:20]]
        tokens, logits, reused = seen(engine, second)
        assert reused == len(PROMPT) + 4
        # The same turn again goes back to its last whole part.
        again = seen(engine, second)
        assert again[2] == reused + CHUNK
        assert again[0] == tokens
        assert all(map(torch.equal, again[1], logits))
        engine.drop_prompt_cache()
        fresh = seen(engine, second)
        size = float(fresh[1][0].abs().max())
        limit = 1e-3 if engine.loaded.dtype is torch.float32 else 3e-2
        assert float((fresh[1][0] - logits[0]).abs().max()) <= limit * size


def test_states_that_do_not_carry_are_not_continued(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(skeleton, "carry_scan_states", lambda _: None)
    with moechat.load(checkpoints["jamba"], offload=PAGES) as engine:
        cut(engine)
        second = [*PROMPT, *answer(engine), *PROMPT[:20]]
        assert seen(engine, second)[2] == 0
        assert engine.loaded.cache.copy_bytes == 0


@pytest.mark.parametrize("wave", [0, 2 * CHUNK])
def test_an_interrupted_prompt_goes_on_from_its_last_copy(engine: Engine, wave: int) -> None:
    cut(engine, wave)
    wanted = seen(engine, PROMPT)
    engine.drop_prompt_cache()

    def interrupt(done: int, _all: int) -> None:
        if done > 3 * CHUNK + (2 if wave else -1):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(engine.generate(PROMPT, max_new_tokens=2, progress=interrupt))
    found = seen(engine, PROMPT)
    assert found[2] in (2 * CHUNK, 3 * CHUNK)
    assert found[0] == wanted[0]
    assert all(map(torch.equal, found[1], wanted[1]))


def test_copies_stay_within_the_bytes_that_are_planned(engine: Engine) -> None:
    shape = engine.loaded.cache
    answer(engine, PROMPT * 2 + PROMPT[:60])
    held = engine.decoder.prompt_cache.take(PROMPT * 2 + PROMPT[:61], 1 << 20)
    assert can_copy(held.cache)
    assert 2 <= len(held.copies) <= shape.copies == 8
    for copy in held.copies.values():
        nbytes = sum(state.nbytes for layer in copy.layers for state in layer.states.values())
        assert nbytes == shape.state_bytes
    live = sum(
        tensor.nbytes for layer in held.cache.layers for tensor in tensors_of(layer) if tensor.ndim > 1
    )
    assert live > shape.state_bytes
    assert shape.copy_bytes == 9 * shape.state_bytes


def test_late_copies_are_kept_closer_together() -> None:
    assert thinned([1, 2, 3], 5) == [1, 2, 3]
    kept = thinned(list(range(1, 33)), 6)
    assert len(kept) == 6
    assert kept[-1] == 32
    gaps = [after - before for before, after in pairwise(kept)]
    assert gaps[0] > gaps[-1]
