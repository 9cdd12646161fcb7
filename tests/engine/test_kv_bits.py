"""kv_bits: answers with the attention cache in 8 bits, whatever way its tokens came into it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from plan_support import desktop
from tiny import tiny_config, write_tiny_checkpoint

import moechat
from moechat import _native
from moechat.engine import Engine
from moechat.errors import UnsupportedModelError
from moechat.offload.settings import OffloadOptions

PROMPT = [4, 87, 12, 55, 3, 29, 64, 91, 8, 70, 33, 21, 76, 40, 18, 66, 95, 50, 11]
# With native steps; with windows and sinks; with latents; with states beside keys and values.
FAMILIES = ["qwen3_moe", "gpt_oss", "deepseek_v2", "lfm2_moe", "qwen3_next"]


@pytest.fixture
def threads() -> Iterator[None]:
    before = _native.num_threads(), torch.get_num_threads()
    yield
    _native.set_num_threads(before[0])
    torch.set_num_threads(before[1])


def checkpoint(directory: Path, family: str, variant: int = 0) -> Path:
    write_tiny_checkpoint(directory / family, tiny_config(family, variant))
    return directory / family


def steps(engine: Engine, parts: list[list[int]], cache: Any = None) -> list[torch.Tensor]:
    """Logits after each pass."""
    cache = engine.decoder.new_cache() if cache is None else cache
    rows = []
    for part in parts:
        out = engine.passes.run(torch.tensor([part]), cache)
        rows.append(out.logits[0, -1].clone())
    return rows


def relative_error(ours: torch.Tensor, reference: torch.Tensor) -> float:
    return float((ours.double() - reference.double()).norm() / reference.double().norm())


@pytest.mark.parametrize("family", FAMILIES)
def test_eight_bits_change_logits_a_little_and_the_same_in_every_division(
    family: str, tmp_path: Path, home: Path
) -> None:
    path = checkpoint(tmp_path, family)
    # With 8 bits the least difference becomes a larger one where an input lands on the next integer.
    load = partial(moechat.load, path, bits=16, dtype="float32", activation_bits=16)
    with load() as engine:
        assert engine.describe().kv_bits == 16
        plain = engine.logits(PROMPT)
    with load(kv_bits=8) as engine:
        assert engine.describe().kv_bits == 8
        assert any(getattr(layer, "packed", False) for layer in engine.decoder.new_cache().layers)
        forced = engine.logits(PROMPT)
        # Of random weights, with which some tokens choose other experts.
        assert 1e-5 < relative_error(forced, plain) < 0.1
        # All at once, in two parts, and token by token: attention adds up in other orders, after which now
        # and then a key lands on the next code.
        divisions = [[PROMPT], [PROMPT[:11], PROMPT[11:]], [PROMPT[:4], *([token] for token in PROMPT[4:])]]
        for parts in divisions if engine.loaded.cache.appendable else divisions[:1]:
            assert relative_error(steps(engine, parts)[-1], forced[-1]) < 2e-3


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v2"])
def test_eight_bits_answer_with_the_same_bits_at_every_budget_and_number_of_threads(
    family: str, tmp_path: Path, home: Path, threads: None
) -> None:
    path, found = checkpoint(tmp_path, family, 1), []
    for pages, count in ((0, 1), (0, 3), (9, 2), (2, 2)):
        with moechat.load(path, kv_bits=8, offload=OffloadOptions(pages=pages), threads=count) as engine:
            torch.set_num_threads(count)
            tokens = [token.token_id for token in engine.generate(PROMPT, max_new_tokens=9, temperature=0.0)]
            rows = steps(engine, [PROMPT, *([token] for token in tokens)])
            found.append(torch.cat([engine.logits(PROMPT).flatten(), *rows]))
    assert all(torch.equal(found[0], other) for other in found[1:])


def test_a_cropped_cache_continues_as_if_it_had_never_held_more(tmp_path: Path, home: Path) -> None:
    with moechat.load(checkpoint(tmp_path, "qwen3_moe"), kv_bits=8) as engine:
        cache = engine.decoder.new_cache()
        steps(engine, [PROMPT, [5], [6], [7]], cache)
        for layer in cache.layers:
            layer.crop(-2)
        again = steps(engine, [[8], [9]], cache)
        assert all(map(torch.equal, again, steps(engine, [PROMPT, [5], [8], [9]])[2:]))


def test_the_next_turn_reuses_the_kept_tokens_of_a_chat(tmp_path: Path, home: Path) -> None:
    def answer(engine: Engine, tokens: list[int], count: int) -> list[int]:
        return [s.token_id for s in engine.generate(tokens, max_new_tokens=count, temperature=0.0)]

    with moechat.load(checkpoint(tmp_path, "qwen3_moe"), dtype="float32", kv_bits=8) as engine:
        first = answer(engine, PROMPT, 6)
        longer = [*PROMPT, *first, 31, 7, 22]
        second = answer(engine, longer, 6)
        assert engine.stats.reused_tokens == len(PROMPT) + 5
        assert (engine.stats.kv_bits, engine.stats.kv_bytes) == (8, engine.loaded.plan.kv)
        engine.drop_prompt_cache()
        assert answer(engine, longer, 6) == second
        assert engine.stats.reused_tokens == 0


def test_what_no_8_bits_can_be_made_of_is_refused(tmp_path: Path, home: Path) -> None:
    path = checkpoint(tmp_path, "minimax")
    for made in (moechat.load, moechat.plan):
        with pytest.raises(UnsupportedModelError, match=r"minimax .* 8 bits: it is a MiniMaxCache"):
            made(path, kv_bits=8)


def test_a_plan_for_a_gpu_counts_packed_keys_and_values(home: Path) -> None:
    plain = moechat.plan("demo", profile=desktop(), dtype="float16")
    packed = moechat.plan("demo", kv_bits=8, profile=desktop(), dtype="float16")
    assert packed.kv_bits == 8
    sizes = [
        next(part.nbytes for part in made.tiers[0].parts if part.name == "attention cache")
        for made in (packed, plain)
    ]
    # 33 bytes in place of 64, and one unpacked layer.
    assert 33 / 64 < sizes[0] / sizes[1] < 0.8
