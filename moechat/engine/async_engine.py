"""The engine for asyncio: answers are computed in a thread, several at a time, and can be cancelled."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar, Unpack

from moechat.engine.api import Engine, GenerateKeywords, load
from moechat.engine.prompt import Message, Prompt
from moechat.engine.running_answer import Answer
from moechat.engine.stats import Stats
from moechat.engine.together import AnswerGivenUp
from moechat.errors import MoechatError
from moechat.loading import Progress
from moechat.options import LoadKeywords
from moechat.steps import Step
from moechat.validation import require_callable

_R = TypeVar("_R")


@dataclass(frozen=True)
class _Ended:
    """The last item of an answer: its measurements, or its error."""

    stats: Stats | None = None
    error: BaseException | None = None


@dataclass(eq=False)
class _Asked:
    """One answer that a task waits for.

    Attributes:
        begin: Makes the answer; called in the thread.
        items: Steps, then an :class:`_Ended`.
        answer: Once it has begun.
        cancelled: Nobody waits any more.
    """

    begin: Callable[[_Asked], Answer]
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    items: asyncio.Queue[Step | _Ended] = field(default_factory=asyncio.Queue)
    answer: Answer | None = None
    cancelled: bool = False

    def tell(self, item: Step | _Ended) -> None:
        """Called in the thread."""
        try:
            self.loop.call_soon_threadsafe(self.items.put_nowait, item)
        except RuntimeError:  # the event loop is closed, so no task waits for the answer
            self.cancelled = True


class AsyncEngine:
    """A model for asyncio. All methods are safe in several tasks at once.

    Answers are computed in a thread of the engine's own, so the event loop stays free. As many as the engine
    has ``conversations`` are under way at a time, and share passes (:meth:`Engine.compute_together`); further
    ones wait in the order in which they were asked for. An asynchronous context manager.

    Example::

        async with await moechat.AsyncEngine.load("demo", conversations=4) as engine:
            async for step in engine.generate("Once upon a time"):
                print(step.text, end="", flush=True)

    Args:
        engine: A loaded model, which nothing else may use from now on.

    Attributes:
        name: As the user named the model.
        context_length: Most tokens of prompt and answer together.
        stats: Measurements of the answer that ended last.
    """

    # Invariant: _engine, _waiting and _running are used in the thread alone, and _rounds by it; one call of
    # _round is in the thread's queue exactly if _rounds is true.
    def __init__(self, engine: Engine) -> None:
        self.name = engine.name
        self.context_length = engine.context_length
        self.stats = engine.stats
        self._engine = engine
        self._most = engine.loaded.conversations
        self._waiting: deque[_Asked] = deque()
        self._running: list[_Asked] = []
        self._rounds = False
        self._closed = False
        self._closing: Future[None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="moechat-engine")

    @classmethod
    async def load(
        cls,
        model: str | Path,
        *,
        progress: Callable[[Progress], None] | None = None,
        **options: Unpack[LoadKeywords],
    ) -> AsyncEngine:
        """Load a model in a thread; arguments and errors as for :func:`moechat.load`.

        Args:
            model: The model.
            progress: Called in that thread.
            options: See :class:`moechat.LoadOptions`.
        """
        return cls(await asyncio.to_thread(partial(load, model, progress=progress, **options)))

    async def __aenter__(self) -> AsyncEngine:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End answers under way within a token, and free the memory; harmless when repeated."""
        self._closed = True
        if self._closing is None:
            self._closing = self._thread.submit(self._close)
            self._thread.shutdown(wait=False)
        await asyncio.shield(asyncio.wrap_future(self._closing))

    async def encode(
        self,
        prompt: str | Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_options: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Tokens of a text or of messages; arguments and errors as for :meth:`Engine.encode`."""
        return await self.call(
            lambda engine: engine.encode(prompt, tools=tools, template_options=template_options)
        )

    async def call(self, function: Callable[[Engine], _R]) -> _R:
        """Run a function with the engine in its thread, between two tokens; it should be quick.

        Raises:
            MoechatError: The engine is closed.
            Exception: What the function raises.
        """
        self._require_open()
        return await asyncio.wrap_future(self._thread.submit(function, self._engine))

    async def generate(
        self, prompt: Prompt, **options: Unpack[GenerateKeywords]
    ) -> AsyncGenerator[Step, None]:
        """Generate an answer, token by token.

        When the task is cancelled, or the iterator is closed, the answer ends within a token, or within a
        part of its prompt; the engine and other answers go on.

        Args:
            prompt: As for :meth:`Engine.generate`, and so are options and errors.
            options: See there. ``progress`` is called in the engine's thread.
        """
        self._require_open()
        progress = options.get("progress")
        require_callable("progress", progress)
        rest: dict[str, Any] = {name: value for name, value in options.items() if name != "progress"}

        def begin(asked: _Asked) -> Answer:
            def report(done: int, total: int) -> None:
                if asked.cancelled or self._closed:
                    raise AnswerGivenUp
                if progress is not None:
                    _call_quietly(progress, done, total)

            return self._engine.generate_in_turns(prompt, progress=report, **rest)

        asked = _Asked(begin)
        self._thread.submit(self._ask, asked)
        try:
            while True:
                item = await asked.items.get()
                if isinstance(item, Step):
                    yield item
                    continue
                if item.error is not None:
                    raise item.error
                if item.stats is not None:
                    self.stats = item.stats
                return
        finally:
            asked.cancelled = True

    # ---- in the thread

    def _ask(self, asked: _Asked) -> None:
        self._waiting.append(asked)
        self._go_on()

    def _go_on(self) -> None:
        if not self._rounds and not self._closed and (self._waiting or self._running):
            self._rounds = True
            self._thread.submit(self._round)

    def _round(self) -> None:
        """Compute one token, or one part of the prompt, of every answer; other calls come in between."""
        self._rounds = False
        for asked in [asked for asked in self._running if asked.cancelled]:
            self._end(asked)
        while self._waiting and len(self._running) < self._most:
            self._admit(self._waiting.popleft())
        running = {asked.answer: asked for asked in self._running if asked.answer is not None}
        for found in self._engine.advance_all(list(running)):
            asked, step = running[found.answer], found.step
            if isinstance(found.error, Exception):
                self._end(asked, _Ended(error=found.error))
            elif found.error is not None:
                if asked.cancelled:
                    self._end(asked)
                # Else the engine is being closed, which tells all answers.
            elif step is not None:
                asked.tell(step)
                if step.finish_reason is not None:
                    self._end(asked, _Ended(self._engine.stats))
        self._go_on()

    def _admit(self, asked: _Asked) -> None:
        if asked.cancelled:
            return
        try:
            asked.answer = asked.begin(asked)
        except Exception as error:
            asked.tell(_Ended(error=error))
        else:
            self._running.append(asked)

    def _end(self, asked: _Asked, last: _Ended | None = None) -> None:
        self._running.remove(asked)
        if asked.answer is not None:
            asked.answer.close()
        if last is not None:
            asked.tell(last)

    def _close(self) -> None:
        closed = MoechatError(f"{self.name} was closed", hint="load it again")
        for asked in [*self._running, *self._waiting]:
            if asked.answer is not None:
                asked.answer.close()
            asked.tell(_Ended(error=closed))
        self._running, self._waiting = [], deque()
        self._engine.close()

    def _require_open(self) -> None:
        if self._closed:
            raise MoechatError(f"{self.name} was closed", hint="load it again")


def _call_quietly(progress: Callable[[int, int], None], done: int, total: int) -> None:
    """Call the caller's function; what would end a program, such as SystemExit, ends its answer only."""
    try:
        progress(done, total)
    except Exception:
        raise
    except BaseException as error:
        raise RuntimeError(f"progress raised {type(error).__name__}") from error
