"""Answers side by side, and attention caches of several conversations."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from itertools import zip_longest
from pathlib import Path

import pytest

import moechat
from moechat import Engine, UsageError
from moechat.configurator.systems import CacheSettings
from moechat.models.prompt_cache import CachedTokens, PromptCache
from moechat.offload.settings import OffloadOptions

PROMPTS = [
    "Once upon a time there was a fox. " * 3,
    "The little owl wanted a drink. " * 5,
    "Who are you? " * 8,
]
CHUNK = 16


@pytest.fixture(scope="module", params=["mapped", "paged"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    paged = OffloadOptions(pages=12, cache=CacheSettings(prefetch="next-router"))
    offload = paged if request.param == "paged" else None
    with moechat.load("demo", conversations=3, offload=offload) as loaded:
        from dataclasses import replace

        loaded.passes.loaded = replace(loaded.loaded, chunk=CHUNK)
        yield loaded


def alone(engine: Engine, prompt: str, count: int = 12, **options: object) -> list[int]:
    steps = engine.generate(prompt, max_new_tokens=count, **options)  # type: ignore[arg-type]
    return [step.token_id for step in steps]


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"temperature": 1.0, "seed": 5}])
def test_answers_in_turns_have_the_tokens_that_each_has_alone(
    engine: Engine, options: dict[str, float]
) -> None:
    wanted = []
    for prompt in PROMPTS:
        engine.drop_prompt_cache()
        wanted.append(alone(engine, prompt, **options))
    engine.drop_prompt_cache()
    running = [engine.generate_in_turns(prompt, max_new_tokens=12, **options) for prompt in PROMPTS]
    found: list[list[int]] = [[] for _ in PROMPTS]
    passes = [0] * len(PROMPTS)
    for row in zip_longest(*running, fillvalue=False):
        for number, step in enumerate(row):
            if step is None:
                passes[number] += 1
            elif step is not False:
                found[number].append(step.token_id)
    assert found == wanted
    sizes = [len(engine.encode(prompt)) for prompt in PROMPTS]
    assert passes == [(size - 1) // CHUNK for size in sizes]
    assert min(passes) >= 1


def test_each_conversation_goes_on_from_its_own_cache(engine: Engine) -> None:
    engine.drop_prompt_cache()
    answers = [alone(engine, prompt, temperature=0.0) for prompt in PROMPTS]
    for prompt, tokens in zip(PROMPTS, answers, strict=True):
        ids = [*engine.encode(prompt), *tokens, *engine.encode(" And then")]
        list(engine.generate(ids, max_new_tokens=2))
        assert engine.stats.reused_tokens == len(engine.encode(prompt)) + len(tokens) - 1


def test_a_shared_beginning_is_copied_and_stays_for_its_conversation(engine: Engine) -> None:
    engine.drop_prompt_cache()
    shared = "You are a kind owl who likes stories about rain and stars. " * 2
    first, second = shared + "Tell me of the sun. " * 9, shared + "Sing for me. "
    answer = alone(engine, first, temperature=0.0)
    whole = alone(engine, second, temperature=0.0)
    reused = engine.stats.reused_tokens
    assert reused == len(engine.encode(shared)) // CHUNK * CHUNK
    going_on = [*engine.encode(first), *answer, *engine.encode(" And")]
    list(engine.generate(going_on, max_new_tokens=1))
    assert engine.stats.reused_tokens == len(engine.encode(first)) + len(answer) - 1
    engine.drop_prompt_cache()
    assert alone(engine, second, temperature=0.0) == whole


def test_the_conversation_that_was_not_used_for_longest_makes_room(engine: Engine) -> None:
    engine.drop_prompt_cache()
    for prompt in [*PROMPTS, "A fourth one, about bread. " * 4]:
        alone(engine, prompt, 3)
    assert len(engine.decoder.prompt_cache) == 3
    for prompt, kept in ((PROMPTS[1], True), (PROMPTS[0], False)):
        alone(engine, prompt, 3)
        assert (engine.stats.reused_tokens > 0) is kept


def test_an_answer_given_up_leaves_room_for_others(engine: Engine) -> None:
    engine.drop_prompt_cache()
    for prompt in PROMPTS * 2:
        with closing(engine.generate_in_turns(prompt + "!", max_new_tokens=50)) as steps:
            next(steps)
    tokens = alone(engine, PROMPTS[0], 4, temperature=0.0)
    assert engine.decoder.prompt_cache._taken == 0
    assert len(engine.decoder.prompt_cache) <= 3
    assert alone(engine, PROMPTS[0], 4, temperature=0.0) == tokens


def test_an_answer_that_never_began_owns_nothing(engine: Engine) -> None:
    engine.generate_in_turns(PROMPTS[0]).close()
    assert engine.decoder.prompt_cache._taken == 0


def test_one_conversation_is_all_that_is_kept_by_default() -> None:
    cache = PromptCache()
    held = cache.take([1, 2, 3], 100)
    assert isinstance(held, CachedTokens)
    with moechat.load("demo") as engine:
        for prompt in PROMPTS:
            alone(engine, prompt, 2)
        assert len(engine.decoder.prompt_cache) == 1


def test_plans_count_the_memory_of_all_conversations() -> None:
    sizes = [
        {
            part.name: part.nbytes
            for part in moechat.plan("demo", ctx=512, ram="4G", conversations=count).tiers[0].parts
        }
        for count in (1, 4)
    ]
    assert sizes[1]["attention cache"] == 4 * sizes[0]["attention cache"]
    with moechat.load("demo", ctx=512, ram="4G", conversations=4) as engine:
        loaded = {part.name: part.nbytes for part in engine.loaded.plan.parts}
    assert loaded["attention cache"] == sizes[1]["attention cache"]


@pytest.mark.parametrize("count", [0, 65, "2", 1.5])
def test_bad_numbers_of_conversations_are_refused(count: object, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="conversations"):
        moechat.load("demo", conversations=count)  # type: ignore[arg-type]
