"""The engine for other programs of the same user, over the private socket: all that ``moechat run`` needs.

Unlike the public protocols it has tokens, the engine's own statistics, and its errors by their classes.

- ``GET /engine``: what is loaded and how; ``model`` is null if nothing is.
- ``POST /engine/encode``: ``{"prompt", "template_options"}`` gives ``{"tokens"}``.
- ``POST /engine/texts``: ``{"tokens"}`` gives ``{"texts", "bytes"}``, the latter in hexadecimal.
- ``GET /engine/map``: where every expert is.
- ``POST /engine/generate``: ``{"tokens", "options"}`` gives a JSON object a line: ``{"begun": true}``,
  ``{"prefilled": [done, total]}``, ``{"step": …}``, and at last ``{"stats": …}`` or ``{"error": …}``.

Errors have the status 400 and the body ``{"error": {"class", "message", "hint"}}``.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from moechat import __version__
from moechat.errors import MoechatError, NoModelError, UsageError
from moechat.hub.names import resolve
from moechat.serve.jobs import Begun, Drawn, Failed, Job, Prefilled
from moechat.serve.offered_models import OfferedModels
from moechat.serve.worker import Worker

if TYPE_CHECKING:
    from moechat import Engine, Step

_R = TypeVar("_R")


class EngineRoutes:
    """The handlers.

    Args:
        worker: Owns the engine.
        models: Those that the server offers.
    """

    def __init__(self, worker: Worker, models: OfferedModels) -> None:
        self._worker = worker
        self._models = models

    def app(self) -> Starlette:
        """The application."""
        return Starlette(
            routes=[
                Route("/engine", _answering(self.describe)),
                Route("/engine/encode", _answering(self.encode), methods=["POST"]),
                Route("/engine/texts", _answering(self.texts), methods=["POST"]),
                Route("/engine/map", _answering(self.map)),
                Route("/engine/generate", _answering(self.generate), methods=["POST"]),
            ]
        )

    async def describe(self, _: Request) -> Response:
        """``GET /engine``."""
        name = self._worker.loaded

        def facts(engine: Engine | None) -> dict[str, Any]:
            if engine is None:
                return {"version": __version__, "model": None}
            described, variables = engine.describe(), engine.template_variables
            model, options = self._models.loading(name)
            return {
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

        return JSONResponse(await self._call(facts))

    async def encode(self, request: Request) -> Response:
        """``POST /engine/encode``."""
        asked = await request.json()
        options = asked.get("template_options") or {}
        tokens = await self._call(
            lambda engine: _loaded(engine).encode(asked["prompt"], template_options=options)
        )
        return JSONResponse({"tokens": list(tokens)})

    async def texts(self, request: Request) -> Response:
        """``POST /engine/texts``."""
        tokens = (await request.json())["tokens"]

        def found(engine: Engine | None) -> dict[str, list[str]]:
            own = _loaded(engine)
            return {
                "texts": [own.token_text(token) for token in tokens],
                "bytes": [own.token_bytes(token).hex() for token in tokens],
            }

        return JSONResponse(await self._call(found))

    async def map(self, _: Request) -> Response:
        """``GET /engine/map``."""
        found = await self._call(lambda engine: _loaded(engine).expert_map())
        return JSONResponse({**vars(found), "counts": found.counts()})

    async def generate(self, request: Request) -> Response:
        """``POST /engine/generate``."""
        asked = await request.json()
        options = dict(asked["options"])
        if options.get("grammar") is not None:
            from moechat import Grammar

            options["grammar"] = Grammar(**options["grammar"])
        if "logit_bias" in options:
            options["logit_bias"] = {int(key): value for key, value in options["logit_bias"].items()}
        tokens = [int(token) for token in asked["tokens"]]
        job = Job(str(asked["model"]), lambda _: tokens, options)
        self._worker.submit(job)
        return _Lines(job)

    async def _call(self, function: Callable[[Engine | None], _R]) -> _R:
        return await asyncio.wrap_future(self._worker.call(function))


class _Lines(StreamingResponse):
    """The events of an answer; however it ends, nothing more is computed."""

    def __init__(self, job: Job) -> None:
        super().__init__(_lines(job), media_type="application/x-ndjson")
        self._job = job

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._job.cancel()


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


def _loaded(engine: Engine | None) -> Engine:
    if engine is None:
        raise NoModelError("the server has unloaded the model", hint="run the same command again")
    return engine


def _error(error: Exception) -> dict[str, Any]:
    if not isinstance(error, MoechatError):
        error = MoechatError(f"the server failed: {type(error).__name__}")
    return {"class": type(error).__name__, "message": str(error), "hint": error.hint}


def _answering(handler: Callable[[Request], Any]) -> Callable[[Request], Any]:
    """A handler whose errors are answers."""

    async def call(request: Request) -> Response:
        try:
            found: Response = await handler(request)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            wrong = UsageError(f"the request is malformed: {type(error).__name__}")
            return JSONResponse({"error": _error(wrong)}, 400)
        except MoechatError as error:
            return JSONResponse({"error": _error(error)}, 400)
        return found

    return call
