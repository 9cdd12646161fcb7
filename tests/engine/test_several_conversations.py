"""Answers side by side, and attention caches of several conversations."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
import torch

import moechat
from moechat import Engine, UsageError
from moechat.configurator.systems import CacheSettings
from moechat.engine import AnswerGivenUp
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


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"temperature": 1.0, "seed": 5}])
def test_answers_computed_together_have_the_tokens_that_each_has_alone(
    engine: Engine, options: dict[str, float]
) -> None:
    lengths = [12, 7, 12]  # one ends before the others
    wanted = []
    for prompt, length in zip(PROMPTS, lengths, strict=True):
        engine.drop_prompt_cache()
        wanted.append(alone(engine, prompt, length, **options))
    engine.drop_prompt_cache()
    running = [
        engine.generate_in_turns(prompt, max_new_tokens=length, **options)
        for prompt, length in zip(PROMPTS, lengths, strict=True)
    ]
    with counted_passes(engine) as passes:
        found = advance_together(engine, running)
    assert found == wanted
    assert max(passes.together) == 3
    # Parts of prompts, of which the last one gives the first token, and tokens: nothing is computed twice.
    parts = sum(-(-len(engine.encode(prompt)) // CHUNK) for prompt in PROMPTS)
    assert passes.alone + sum(passes.together) == parts + sum(map(len, wanted)) - len(wanted)
    for prompt, tokens in zip(PROMPTS, wanted, strict=True):
        list(engine.generate([*engine.encode(prompt), *tokens, 9], max_new_tokens=1))
        assert engine.stats.reused_tokens == len(engine.encode(prompt)) + len(tokens) - 1


def test_what_a_shared_pass_reads_is_divided_among_its_answers(engine: Engine) -> None:
    engine.drop_prompt_cache()
    before = engine.loaded.counters.activations
    running = [engine.generate_in_turns(prompt, max_new_tokens=6) for prompt in PROMPTS]
    advance_together(engine, running)
    counted = engine.loaded.counters.activations - before
    assert sum(answer.stats.expert_activations for answer in running) == counted
    accesses = [
        sum((stats.hits_full, stats.hits_prefetched, stats.hits_top, stats.misses))
        for stats in (answer.stats for answer in running)
    ]
    if engine.loaded.near is None:
        assert accesses == [0, 0, 0]
    else:
        # 5 tokens of each choose 2 experts in 8 layers; those that several chose count once.
        assert 5 * 8 * 2 <= sum(accesses) <= 3 * 5 * 8 * 2
        assert min(accesses) > 0
    assert all(answer.stats.output_tokens == 6 for answer in running)
    assert all(answer.stats.tpot_s > 0 for answer in running)


def test_an_answer_given_up_in_the_middle_of_others_does_not_change_them(engine: Engine) -> None:
    engine.drop_prompt_cache()
    wanted = [alone(engine, prompt, temperature=0.0) for prompt in PROMPTS]
    engine.drop_prompt_cache()
    running = [engine.generate_in_turns(prompt, max_new_tokens=12, temperature=0.0) for prompt in PROMPTS]
    found: list[list[int]] = [[], [], []]
    for turn in range(30):
        engine.compute_together(running)
        if turn == 9:
            running[1].close()  # its next token is computed, but not drawn
        for number, answer in enumerate(running):
            step = next(answer, None)
            if step is not None:
                found[number].append(step.token_id)
    assert found[0] == wanted[0]
    assert found[2] == wanted[2]
    assert 0 < len(found[1]) < 12
    assert found[1] == wanted[1][: len(found[1])]
    assert engine.decoder.prompt_cache._taken == []


def test_answers_of_a_pass_that_fails_end_and_the_engine_goes_on(engine: Engine) -> None:
    engine.drop_prompt_cache()
    wanted = [alone(engine, prompt, temperature=0.0) for prompt in PROMPTS]
    engine.drop_prompt_cache()
    running = [engine.generate_in_turns(prompt, max_new_tokens=12, temperature=0.0) for prompt in PROMPTS]
    for _ in range(8):
        engine.compute_together(running)
        for answer in running:
            next(answer)
    last = engine.loaded.model.model.norm
    own = vars(last)["forward"]
    vars(last)["forward"] = lambda _: (_ for _ in ()).throw(KeyboardInterrupt())
    try:
        with pytest.raises(KeyboardInterrupt):
            engine.compute_together(running)
    finally:
        vars(last)["forward"] = own
    assert all(answer.ended for answer in running)
    assert [next(answer, "end") for answer in running] == ["end"] * 3
    assert [alone(engine, prompt, temperature=0.0) for prompt in PROMPTS] == wanted


def test_answers_of_a_model_that_is_not_recognised_are_computed_in_turns(engine: Engine) -> None:
    modules = engine.loaded.native_modules
    kept, modules.together = modules.together, None
    try:
        running = [engine.generate_in_turns(prompt, max_new_tokens=4, temperature=0.0) for prompt in PROMPTS]
        with counted_passes(engine) as passes:
            found = advance_together(engine, running)
    finally:
        modules.together = kept
    assert [len(tokens) for tokens in found] == [4, 4, 4]
    assert passes.alone > 9
    assert not passes.together


def test_a_round_gives_a_step_or_an_error_for_each_answer(engine: Engine) -> None:
    engine.drop_prompt_cache()
    wanted = [alone(engine, prompt, temperature=0.0) for prompt in PROMPTS]
    engine.drop_prompt_cache()

    def give_up(_done: int, _total: int) -> None:
        raise AnswerGivenUp

    running = [engine.generate_in_turns(prompt, max_new_tokens=12, temperature=0.0) for prompt in PROMPTS]
    running.append(engine.generate_in_turns("x " * 40, progress=give_up))
    running.append(engine.generate_in_turns("y " * 40, progress=lambda _done, _total: 1 // 0))
    found: list[list[int]] = [[] for _ in running]
    errors: list[type[BaseException] | None] = [None] * len(running)
    rounds = 0
    while not all(answer.ended for answer in running):
        rounds += 1
        for item in engine.advance_all(running):
            number = running.index(item.answer)
            if item.error is not None:
                errors[number] = type(item.error)
            elif item.step is not None:
                found[number].append(item.step.token_id)
    assert found[:3] == wanted
    assert errors == [None, None, None, AnswerGivenUp, ZeroDivisionError]
    assert rounds < 12 + 12
    assert len(engine.decoder.prompt_cache._taken) <= 3
    for answer in running:
        answer.close()
    assert engine.decoder.prompt_cache._taken == []


def test_a_round_that_is_left_in_the_middle_leaves_the_others_as_they_are(engine: Engine) -> None:
    engine.drop_prompt_cache()
    wanted = [alone(engine, prompt, temperature=0.0) for prompt in PROMPTS]
    engine.drop_prompt_cache()
    running = [engine.generate_in_turns(prompt, max_new_tokens=12, temperature=0.0) for prompt in PROMPTS]
    found: list[list[int]] = [[] for _ in running]
    for turn in range(60):
        for item in engine.advance_all(running):
            if item.step is not None:
                found[running.index(item.answer)].append(item.step.token_id)
            if turn % 3 == 0:
                break
    assert found == wanted


def test_answers_that_are_not_the_engines_own_are_refused(engine: Engine) -> None:
    answer = engine.generate_in_turns(PROMPTS[0])
    with pytest.raises(UsageError, match="twice"):
        engine.compute_together([answer, answer])
    with moechat.load("demo") as other, pytest.raises(UsageError, match="not one of this engine"):
        other.compute_together([answer])


@dataclass
class Passes:
    """Passes of one answer, and numbers of tokens of those that several shared."""

    alone: int = 0
    together: list[int] = field(default_factory=list)


@contextmanager
def counted_passes(engine: Engine) -> Iterator[Passes]:
    found, runner = Passes(), engine.passes
    run, run_together = runner.run, runner.run_together

    def count(ids: torch.Tensor, *rest: Any, **arguments: Any) -> Any:
        found.alone += 1
        return run(ids, *rest, **arguments)

    def count_together(tokens: list[int], caches: list[Any]) -> Any:
        rows = run_together(tokens, caches)
        if rows is not None:
            found.together.append(len(tokens))
        return rows

    vars(runner).update(run=count, run_together=count_together)
    try:
        yield found
    finally:
        del vars(runner)["run"], vars(runner)["run_together"]


def advance_together(engine: Engine, running: list[moechat.Answer]) -> list[list[int]]:
    found: list[list[int]] = [[] for _ in running]
    while not all(answer.ended for answer in running):
        engine.compute_together(running)
        for number, answer in enumerate(running):
            step = next(answer, None)
            if step is not None:
                found[number].append(step.token_id)
    for answer in running:
        answer.close()
    return found


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


def test_the_conversation_that_costs_least_to_compute_again_makes_room(engine: Engine) -> None:
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
    assert engine.decoder.prompt_cache._taken == []
    assert len(engine.decoder.prompt_cache) <= 3
    assert alone(engine, PROMPTS[0], 4, temperature=0.0) == tokens


def test_an_answer_that_never_began_owns_nothing(engine: Engine) -> None:
    engine.generate_in_turns(PROMPTS[0]).close()
    assert engine.decoder.prompt_cache._taken == []


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
