"""The thread that computes: loads models, and answers requests in turns.

One thread owns the engine, so that the engine needs no locks. Requests wait in a queue of limited length in
the order in which they came. Up to ``parallel`` of them are answered at a time: a token of each in one pass
where the model allows it, and a part of each prompt in between. A request for another model waits until those
before it are answered; those behind it wait too, so it is never overtaken.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import closing
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

from moechat.errors import DeviceLostError, StoreDamagedError
from moechat.reply_formats.thinking import prompt_end
from moechat.serve.counters import Counters
from moechat.serve.jobs import Begun, Drawn, Failed, Job, Prefilled, ServerClosingError, Told
from moechat.serve.request_queue import RequestQueue

if TYPE_CHECKING:
    from moechat import Answer, Engine, Step

_R = TypeVar("_R")

# Seconds between two calls of Engine.idle while nothing is asked.
_IDLE_S = 1.0


class Loader(Protocol):
    """Finds and loads models by the names that clients give."""

    def resolve(self, name: str) -> str:
        """The name that a model is loaded by; the empty name means the first model.

        Raises:
            ModelNotFoundError: This server does not offer it.
        """

    def load(self, name: str, progress: Callable[[str, float], None]) -> Engine:
        """Load a model.

        Args:
            name: From :meth:`resolve`.
            progress: Called with what is done and its share, from 0 to 1.

        Raises:
            MoechatError: It cannot be loaded.
        """


class _Answer(NamedTuple):
    """One answer under way."""

    job: Job
    steps: Answer


class Worker:
    """Owns the thread and the model.

    Args:
        loader: Loads models.
        parallel: Most answers at a time.
        queue: Most requests that wait.
        draft_tokens: Most tokens that are guessed at a time where a request does not say it.
        keep_alive_s: Seconds without a request after which the model is unloaded; ``None``: never.
        counters: For ``/metrics``.
        on_failed: Called in the thread when the model of :meth:`start` cannot be loaded, or an error ends the
            thread.
        on_loaded: Called in the thread with each model that was loaded, and its name.
        on_ready: Called in the thread with each model that was loaded, once requests for it are answered.
        on_pause: Called in the thread between tokens and parts of prompts, while a model is loaded, and about
            once a second without work: the engine may be looked at then. Returns the seconds after which it
            wants to be called again though there is no work; ``None``: at the next occasion.

    Attributes:
        loaded: Name of the model that is loaded; empty: none.
        active: Answers under way.
        starting: The first model is being loaded.
        last_used: When the last answer ended, on ``time.time``'s clock.
        drawn: Tokens of all answers so far.
        prompt: Tokens of the prompt at work that are computed, and all of them; ``None``: none is at work.
        loading: What is loaded now, and its share, for ``/health``; ``None``: nothing.
    """

    # All of the model is the thread's own; `loaded`, `loading`, `active`, `drawn` and `prompt` are single
    # values that others may read.
    def __init__(
        self,
        loader: Loader,
        *,
        parallel: int,
        queue: int,
        draft_tokens: int,
        keep_alive_s: float | None,
        counters: Counters,
        on_failed: Callable[[Exception], None],
        on_loaded: Callable[[str, Engine], None] = lambda _name, _engine: None,
        on_ready: Callable[[Engine], None] = lambda _: None,
        on_pause: Callable[[Worker], float | None] = lambda _: None,
    ) -> None:
        self.loaded = ""
        self.loading: tuple[str, str, float] | None = None
        self.active = 0
        self.drawn = 0
        self.prompt: tuple[int, int] | None = None
        self.starting = False
        self.last_used = time.time()
        self._loader = loader
        self._parallel = parallel
        self._queue: RequestQueue[Engine | None] = RequestQueue(queue)
        self._draft_tokens = draft_tokens
        self._keep_alive_s = keep_alive_s
        self._counters = counters
        self._on_failed = on_failed
        self._on_loaded = on_loaded
        self._on_ready = on_ready
        self._on_pause = on_pause
        self._first: str | None = None
        self._pause_s: float | None = None
        self._engine: Engine | None = None
        self._answers: list[_Answer] = []
        self._thread = threading.Thread(target=self._run, name="moechat-answers", daemon=True)

    # ---- for other threads

    def start(self, model: str | None = None) -> None:
        """Start the thread, and load a model at once."""
        self._first, self.starting = model, model is not None
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Queue a request.

        Raises:
            ServerBusyError: The queue is full.
            ServerClosingError: The server ends.
        """
        self._queue.submit(job, free=max(0, self._parallel - self.active))

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._queue)

    @property
    def engine(self) -> Engine | None:
        """The model; for reading statistics only."""
        return self._engine

    def call(self, function: Callable[[Engine | None], _R]) -> Future[_R]:
        """Run a function in the thread between two tokens or parts of prompts; it should be quick.

        Args:
            function: Gets the model; ``None``: none is loaded now.

        Raises:
            ServerClosingError: The server ends.
        """
        return self._queue.call(function)

    def wake(self) -> None:
        """Call ``on_pause`` soon, also if there is no work."""
        self._queue.wake()

    def close(self, timeout_s: float | None = None) -> bool:
        """End answers within a token and unload the model.

        Returns:
            Whether the thread has ended within ``timeout_s``.
        """
        self._queue.close()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # ---- the thread

    def _run(self) -> None:
        try:
            self._load_first()
            while not self._queue.closing:
                self._admit()
                self._queue.answer_calls(self._engine)
                self._pause_s = self._on_pause(self)
                if self._answers:
                    self._advance_all()
                else:
                    self._rest()
        except Exception as error:  # a server without its thread must not go on
            self._on_failed(error)
        finally:
            reason = ServerClosingError("the server is shutting down")
            left = self._queue.end(reason)
            for answer in list(self._answers):
                self._end(answer, reason)
            for job in left:
                job.tell(Failed(reason))
            self._unload()

    def _load_first(self) -> None:
        if self._first is None:
            return
        try:
            self._require_model(self._loader.resolve(self._first))
        except ServerClosingError:
            return  # whoever closes the server knows why
        except Exception as error:
            self._on_failed(error)
        finally:
            self.starting = False

    def _admit(self) -> None:
        """Begin with requests from the head of the queue."""
        while len(self._answers) < self._parallel and not self._queue.closing:
            job = self._queue.head()
            if job is None:
                return
            try:
                name = self._loader.resolve(job.model)
                if name != self.loaded and self._answers:
                    return  # when these are answered
                self._queue.take(job)
                self.active = len(self._answers) + 1
                self._begin(job, self._require_model(name))
            except Exception as error:
                self._queue.take(job)
                self._counters.failed(error)
                job.tell(Failed(error))
            finally:
                self.active = len(self._answers)

    def _begin(self, job: Job, engine: Engine) -> None:
        if job.ask is not None:
            job.tell(Told(job.ask(engine)))
            return
        ids = job.encode(engine)
        end = prompt_end(ids, engine.token_text)
        begun = Begun(engine.name, len(ids), end, engine.token_text, engine.token_bytes)
        if job.counts_only:
            job.tell(begun)
            return
        options = {"draft_tokens": self._draft_tokens, **job.options}
        if callable(options.get("grammar")):
            options["grammar"] = options["grammar"](engine, end)

        from moechat.engine import AnswerGivenUp

        def progress(done: int, total: int) -> None:
            if job.cancelled or self._queue.closing:
                raise AnswerGivenUp
            job.tell(Prefilled(done, total))
            self.prompt = (done, total) if done < total else None
            self._queue.answer_calls(self._engine)
            self._on_pause(self)

        steps = engine.generate_in_turns(ids, progress=progress, **options)
        job.tell(begun)
        self._counters.begun(time.monotonic() - job.arrived)
        self._answers.append(_Answer(job, steps))

    def _advance_all(self) -> None:
        """Compute one token, or one part of the prompt, of every answer."""
        for answer in [answer for answer in self._answers if answer.job.cancelled]:
            self._counters.cancelled()
            self._end(answer)
        assert self._engine is not None
        answers = {answer.steps: answer for answer in self._answers}
        for found in self._engine.advance_all(list(answers)):
            answer, error = answers[found.answer], found.error
            if error is None:
                self._deliver(answer, found.step)
            elif isinstance(error, Exception):
                self._counters.failed(error)
                self._end(answer, error)
                if isinstance(error, StoreDamagedError | DeviceLostError):
                    self._give_up_model(error)
                    return
            elif not self._queue.closing:  # given up; at the end of the server all answers are told so
                self._counters.cancelled()
                self._end(answer)
            if self._queue.closing:
                return
        self.active = len(self._answers)

    def _deliver(self, answer: _Answer, step: Step | None) -> None:
        if step is None:
            return
        self.drawn += 1
        assert self._engine is not None
        if step.finish_reason is None:
            answer.job.tell(Drawn(step))
            return
        stats = self._engine.stats
        answer.job.tell(Drawn(step, stats))
        self._counters.answered(stats)
        self._end(answer)

    def _end(self, answer: _Answer, error: Exception | None = None) -> None:
        if answer in self._answers:
            self._answers.remove(answer)
        with closing(answer.steps):
            pass
        self.prompt = None
        if error is not None:
            answer.job.tell(Failed(error))
        self.active = len(self._answers)
        self.last_used = time.time()

    def _give_up_model(self, error: Exception) -> None:
        """No further answer is possible with this model: the next request loads it again."""
        for answer in list(self._answers):
            self._end(answer, error)
        self._unload()

    def _rest(self) -> None:
        """Wait for a request; meanwhile let the engine do its maintenance, or unload it."""
        engine = self._engine
        if engine is not None:
            engine.idle()
        pauses = (None if engine is None else _IDLE_S, self._pause_s)
        if self._queue.wait(min((pause for pause in pauses if pause is not None), default=None)):
            return
        unused = time.time() - self.last_used
        if engine is not None and self._keep_alive_s is not None and unused >= self._keep_alive_s:
            self._unload()

    # ---- the model

    def _require_model(self, name: str) -> Engine:
        if self._engine is not None and self.loaded == name:
            return self._engine
        self._unload()
        self.loading = (name, "load", 0.0)

        def progress(what: str, share: float) -> None:
            if self._queue.closing:
                raise ServerClosingError("the server is shutting down")
            self.loading = (name, what, share)
            self._queue.answer_calls(self._engine)
            self._on_pause(self)

        try:
            self._engine = self._loader.load(name, progress)
        finally:
            self.loading = None
            self.last_used = time.time()
        self._on_loaded(name, self._engine)
        self.loaded = name
        self._counters.loaded(self._engine)
        self.starting = False
        self._on_ready(self._engine)
        return self._engine

    def _unload(self) -> None:
        engine, self._engine, self.loaded = self._engine, None, ""
        if engine is not None:
            engine.close()
