"""The engine for asyncio: the same tokens, several answers at a time, cancellation."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

import pytest

import moechat
from moechat import AsyncEngine, Engine, MoechatError, PromptTooLongError, Step, UsageError

PROMPTS = ["Once upon a time", "The little owl", "A bear and a fox", "My mother said"]
_R = TypeVar("_R")


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with moechat.load("demo") as loaded:
        yield loaded


def run(work: Coroutine[Any, Any, _R]) -> _R:
    return asyncio.run(asyncio.wait_for(work, 120))


async def texts(engine: AsyncEngine, prompt: Any, **options: Any) -> list[int]:
    return [step.token_id async for step in engine.generate(prompt, **options)]


def test_answers_are_those_of_the_engine_and_share_passes(engine: Engine) -> None:
    wanted = []
    for prompt in PROMPTS:
        engine.drop_prompt_cache()
        wanted.append([step.token_id for step in engine.generate(prompt, max_new_tokens=20, temperature=0.0)])

    async def work() -> list[list[int]]:
        async with await AsyncEngine.load("demo", conversations=3) as found:
            answers = [texts(found, prompt, max_new_tokens=20, temperature=0.0) for prompt in PROMPTS]
            together = await asyncio.gather(*answers)
            assert found.stats.output_tokens == 20
            assert await found.encode("Once") == engine.encode("Once")
            assert (found.name, found.context_length) == ("demo", engine.context_length)
            return together

    assert run(work()) == wanted


def test_the_event_loop_stays_free_and_steps_come_one_by_one() -> None:
    async def work() -> tuple[int, int]:
        async with await AsyncEngine.load("demo") as found:
            ticks, between = 0, 0

            async def tick() -> None:
                nonlocal ticks
                while True:
                    ticks += 1
                    await asyncio.sleep(0)

            beside = asyncio.create_task(tick())
            before = -1
            async for _ in found.generate(PROMPTS[0], max_new_tokens=30, logit_bias={0: -100.0, 4: -100.0}):
                between += ticks > before
                before = ticks
            beside.cancel()
            return ticks, between

    ticks, between = run(work())
    assert ticks > 30
    assert between >= 2  # on a busy machine several steps come at a time


def test_a_cancelled_task_ends_its_answer_and_others_go_on() -> None:
    async def work() -> None:
        async with await AsyncEngine.load("demo", conversations=2) as found:
            long = {"max_new_tokens": 900, "logit_bias": {0: -100.0, 4: -100.0}}
            begun = asyncio.Event()

            async def endless() -> None:
                async for _ in found.generate(PROMPTS[0], **long):  # type: ignore[arg-type]
                    begun.set()
                    await asyncio.sleep(0)  # steps that were computed already are handed out without a pause

            task = asyncio.create_task(endless())
            await begun.wait()
            beside = asyncio.create_task(texts(found, PROMPTS[1], max_new_tokens=40, temperature=0.0))
            await asyncio.sleep(0)  # the second answer is asked for
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert 0 < len(await beside) <= 40
            # A token later nothing of it is left: its place in the prompt cache is free.
            await texts(found, PROMPTS[2], max_new_tokens=2)
            assert await found.call(lambda engine: engine.decoder.prompt_cache._taken) == []
            assert not found._running

    run(work())


def test_leaving_the_loop_and_waiting_answers_that_are_cancelled_cost_nothing() -> None:
    async def work() -> None:
        async with await AsyncEngine.load("demo") as found:
            steps = found.generate(PROMPTS[0], max_new_tokens=500)
            await anext(steps)
            waiting = asyncio.create_task(texts(found, PROMPTS[1], max_new_tokens=500))
            await asyncio.sleep(0.01)
            waiting.cancel()
            await steps.aclose()
            assert len(await texts(found, PROMPTS[2], max_new_tokens=3, temperature=0.0)) <= 3
            assert not found._running
            assert not found._waiting

    run(work())


def test_a_long_prompt_is_given_up_in_the_middle() -> None:
    async def work() -> float:
        async with await AsyncEngine.load("demo") as found:
            reached: list[int] = []
            prompt = [5 + i % 900 for i in range(1000)]
            steps = found.generate(prompt, max_new_tokens=5, progress=lambda done, _: reached.append(done))
            task = asyncio.ensure_future(anext(steps))
            while not reached:
                await asyncio.sleep(0.001)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, StopAsyncIteration):
                await task
            begun = time.monotonic()
            assert await texts(found, "Hello", max_new_tokens=2)
            return time.monotonic() - begun

    assert run(work()) < 30


def test_errors_are_those_of_the_engine() -> None:
    async def work() -> None:
        async with await AsyncEngine.load("demo", conversations=2) as found:
            with pytest.raises(PromptTooLongError):
                await texts(found, [5] * 5000)
            with pytest.raises(UsageError):
                await texts(found, "x", temperature=-1.0)
            with pytest.raises(UsageError):
                await texts(found, "x", progress=5)
            with pytest.raises(UsageError):
                await found.encode("")
            assert await texts(found, "x", max_new_tokens=1)
        with pytest.raises(MoechatError, match="closed"):
            await texts(found, "x")
        with pytest.raises(MoechatError, match="closed"):
            await found.encode("x")
        await found.close()

    run(work())


def test_closing_ends_answers_under_way_and_those_that_wait() -> None:
    async def work() -> list[BaseException | list[int]]:
        found = await AsyncEngine.load("demo")
        options = {"max_new_tokens": 900, "logit_bias": {0: -100.0, 4: -100.0}}
        answers = [asyncio.create_task(texts(found, prompt, **options)) for prompt in PROMPTS[:3]]
        await asyncio.sleep(0.2)
        await found.close()
        return await asyncio.gather(*answers, return_exceptions=True)

    assert [str(found) for found in run(work())] == ["demo was closed"] * 3


def test_closing_in_the_middle_of_a_prompt_tells_its_task() -> None:
    async def work() -> list[BaseException | list[int]]:
        found = await AsyncEngine.load("demo", conversations=2)
        closing: list[asyncio.Future[None]] = []
        loop = asyncio.get_running_loop()

        def close_now(_done: int, _total: int) -> None:
            if not closing:
                closing.append(loop.create_future())
                loop.call_soon_threadsafe(lambda: asyncio.ensure_future(found.close()))
                found._closed = True  # as the call sets it, before the next part of the prompt

        answers = [texts(found, PROMPTS[0], progress=close_now), texts(found, PROMPTS[1], max_new_tokens=900)]
        return await asyncio.gather(*answers, return_exceptions=True)

    assert [str(found) for found in run(work())] == ["demo was closed"] * 2


def test_what_progress_raises_reaches_its_task_and_no_other() -> None:
    async def work() -> None:
        async with await AsyncEngine.load("demo", conversations=2) as found:

            def fail(_done: int, _total: int) -> None:
                raise SystemExit(3)

            beside = asyncio.create_task(texts(found, PROMPTS[1], max_new_tokens=20, temperature=0.0))
            with pytest.raises(RuntimeError, match="progress"):
                await texts(found, PROMPTS[0], progress=fail)
            assert await beside

    run(work())


def test_misspelt_options_are_refused() -> None:
    async def work() -> None:
        async with await AsyncEngine.load("demo") as found:
            with pytest.raises(UsageError, match="max_tokens is no option"):
                await texts(found, "hello", max_tokens=3)

    run(work())


def test_steps_are_steps() -> None:
    async def work() -> list[Step]:
        async with await AsyncEngine.load("demo") as found:
            return [step async for step in found.generate("Once", max_new_tokens=4, logprobs=1)]

    steps = run(work())
    assert all(isinstance(step, Step) and step.logprob is not None for step in steps)
    assert steps[-1].finish_reason
