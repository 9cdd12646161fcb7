"""The engine for other programs of the same user, over the private socket: all that ``moechat run`` needs.

Unlike the public protocols it has tokens, the engine's own statistics, and its errors by their classes.

- ``GET /engine``: what is loaded and how; ``model`` is null if nothing is. The others take its name.
- ``POST /engine/encode``: ``{"model", "prompt", "template_options"}`` gives ``{"tokens", "texts", "bytes"}``,
  the last two of the last tokens, bytes in hexadecimal.
- ``POST /engine/texts``: ``{"model", "tokens"}`` gives ``{"texts", "bytes"}``.
- ``POST /engine/map``: ``{"model"}`` gives where every expert is.
- ``POST /engine/generate``: ``{"model", "tokens", "options"}`` gives a JSON object a line:
  ``{"begun": true}``, ``{"prefilled": [done, total]}``, ``{"step": …}``, and at last ``{"stats": …}`` or
  ``{"error": …}``.

A model that was unloaded meanwhile is loaded again.

Errors have the status 400 and the body ``{"error": {"class", "message", "hint"}}``.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from moechat import __version__
from moechat.errors import MoechatError, UsageError
from moechat.hub.names import resolve
from moechat.serve.handling import JobStream, log_unexpected
from moechat.serve.jobs import Begun, Drawn, Failed, Job, Prefilled, Told
from moechat.serve.offered_models import OfferedModels
from moechat.serve.worker import Worker

if TYPE_CHECKING:
    from moechat import Engine, Step

_R = TypeVar("_R")


# Last tokens of a prompt whose texts `encode` gives: a chat looks there for the mark that begins thinking.
_END_TOKENS = 16


class _AnotherModelError(Exception):
    """The model that is asked for is not the one that is loaded."""


class EngineRoutes:
    """The handlers.

    Args:
        models: Those that the server offers.
    """

    # Invariant: _facts is replaced as a whole, by the thread that computes.
    def __init__(self, models: OfferedModels) -> None:
        self._models = models
        self._facts: dict[str, Any] = {}
        self._worker: Worker | None = None

    def app(self, worker: Worker) -> Starlette:
        """The application, for the worker that owns the engine."""
        self._worker = worker
        return Starlette(
            routes=[
                Route("/engine", _answering(self.describe)),
                Route("/engine/encode", _answering(self.encode), methods=["POST"]),
                Route("/engine/texts", _answering(self.texts), methods=["POST"]),
                Route("/engine/map", _answering(self.map), methods=["POST"]),
                Route("/engine/generate", _answering(self.generate), methods=["POST"]),
            ]
        )

    def note_loaded(self, name: str, engine: Engine) -> None:
        """Note the facts of a model, so that telling them later waits for no pass."""
        described, variables = engine.describe(), engine.template_variables
        model, options = self._models.loading(name)
        self._facts = {
            "version": __version__,
            "model": name,
            "is": repr(resolve(model, bits=options.get("bits"))),
            "options": {key: value for key, value in options.items() if key != "conversations"},
            "name": engine.name,
            "context_length": engine.context_length,
            "has_chat_template": engine.has_chat_template,
            "template_variables": None if variables is None else sorted(variables),
            "sampling": vars(engine.sampling),
            "description": described.to_json(),
            "rows": described.rows(_size_mark),
        }

    async def describe(self, _: Request) -> Response:
        """``GET /engine``."""
        facts = self._facts
        if not facts or self._own_worker.loaded != facts["model"]:
            return JSONResponse({"version": __version__, "model": None})
        return JSONResponse(facts)

    async def encode(self, request: Request) -> Response:
        """``POST /engine/encode``."""
        asked = await _parsed(request, model=str, prompt=(str, list), template_options=dict)

        def found(engine: Engine) -> dict[str, Any]:
            tokens = engine.encode(asked["prompt"], template_options=asked["template_options"])
            return {"tokens": tokens, **_texts_of(engine, tokens[-_END_TOKENS:])}

        return JSONResponse(await self._ask(asked["model"], found))

    async def texts(self, request: Request) -> Response:
        """``POST /engine/texts``."""
        asked = await _parsed(request, model=str, tokens=list)
        return JSONResponse(
            await self._ask(asked["model"], lambda engine: _texts_of(engine, asked["tokens"]))
        )

    async def map(self, request: Request) -> Response:
        """``POST /engine/map``."""
        asked = await _parsed(request, model=str)
        found = await self._ask(asked["model"], lambda engine: engine.expert_map())
        return JSONResponse({**vars(found), "counts": found.counts()})

    async def generate(self, request: Request) -> Response:
        """``POST /engine/generate``."""
        asked = await _parsed(request, model=str, tokens=list, options=dict)
        options = dict(asked["options"])
        if options.get("grammar") is not None:
            from moechat import Grammar

            options["grammar"] = Grammar(**options["grammar"])
        job = Job(asked["model"], lambda _: asked["tokens"], options)
        self._own_worker.submit(job)
        return JobStream(job, _lines(job), "application/x-ndjson")

    @property
    def _own_worker(self) -> Worker:
        assert self._worker is not None
        return self._worker

    async def _ask(self, model: str, function: Callable[[Engine], _R]) -> _R:
        """The result of a function of a model: between two tokens if it is loaded, else in its turn."""
        worker = self._own_worker

        def at_once(engine: Engine | None) -> _R:
            if engine is None or worker.loaded != model:
                raise _AnotherModelError
            return function(engine)

        try:
            return await asyncio.wrap_future(worker.call(at_once))
        except _AnotherModelError:
            job = Job(model, lambda _: [], ask=function)
            worker.submit(job)
            event = await job.next()
            if isinstance(event, Failed):
                raise event.error from None
            assert isinstance(event, Told)
            found: _R = event.value
            return found


def _texts_of(engine: Engine, tokens: Sequence[int]) -> dict[str, list[str]]:
    return {
        "texts": [engine.token_text(token) for token in tokens],
        "bytes": [engine.token_bytes(token).hex() for token in tokens],
    }


async def _lines(job: Job) -> AsyncIterator[bytes]:
    while True:
        event = await job.next()
        if isinstance(event, Begun):
            yield _line({"begun": True})
        elif isinstance(event, Prefilled):
            yield _line({"prefilled": [event.done, event.total]})
        elif isinstance(event, Failed):
            yield _line({"error": _error(event.error)})
            return
        else:
            assert isinstance(event, Drawn)
            yield _line({"step": _step(event.step)})
            if event.stats is not None:
                yield _line({"stats": event.stats.to_json()})
                return


def _line(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"


def _step(step: Step) -> dict[str, Any]:
    found: dict[str, Any] = {"text": step.text, "token_id": step.token_id}
    if step.finish_reason is not None:
        found |= {"finish_reason": step.finish_reason, "stop": step.stop}
    if step.logprob is not None:
        found |= {"logprob": step.logprob, "top_logprobs": [list(one) for one in step.top_logprobs]}
    return found


def _size_mark(count: float) -> str:
    """Stands for a number of bytes, which the reader formats."""
    return f"\N{NULL}{count!r}\N{NULL}"


def _error(error: Exception) -> dict[str, Any]:
    if not isinstance(error, MoechatError):
        error = MoechatError(f"the server failed: {type(error).__name__}")
    return {"class": type(error).__name__, "message": str(error), "hint": error.hint}


async def _parsed(request: Request, **wanted: type | tuple[type, ...]) -> dict[str, Any]:
    """The fields of the body, each of a type.

    Raises:
        UsageError: It is no JSON object with these fields.
    """
    try:
        found = json.loads(await request.body())
    except (ValueError, RecursionError):
        raise UsageError("the request is no JSON") from None
    for name, kinds in wanted.items():
        if not isinstance(found, dict) or not isinstance(found.get(name), kinds):
            raise UsageError(f"the request has no {name}, or one of another type")
    return dict(found)


def _answering(handler: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
    """A handler whose errors are answers."""

    async def call(request: Request) -> Response:
        try:
            return await handler(request)
        except Exception as error:
            if not isinstance(error, MoechatError):
                log_unexpected(error)
            return JSONResponse({"error": _error(error)}, 400 if isinstance(error, MoechatError) else 500)

    return call
