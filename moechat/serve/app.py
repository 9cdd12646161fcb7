"""The application: routes, and what stands behind them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, Protocol, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from moechat import __version__
from moechat.serve import sse
from moechat.serve.anthropic_messages import MessageAnswer, MessageRequest
from moechat.serve.api_errors import ApiError
from moechat.serve.conversation import AnswerDefaults, Conversation
from moechat.serve.counters import Counters, Gauge
from moechat.serve.guard import Guard
from moechat.serve.handling import JobStream, answering, read_body
from moechat.serve.jobs import Begun, Failed, Job
from moechat.serve.openai_chat import ChatAnswer, ChatRequest
from moechat.serve.openai_completions import CompletionAnswer, CompletionRequest
from moechat.serve.openai_responses import ResponseAnswer, ResponseRequest
from moechat.serve.page_files import page_routes
from moechat.serve.replies import Reply, reply_of
from moechat.serve.saved_conversations import SavedConversations
from moechat.serve.settings import ServeSettings
from moechat.serve.state_feed import StateFeed
from moechat.serve.worker import Worker

_R = TypeVar("_R")


class Answer(Protocol):
    """Writes one reply in the form of a protocol."""

    async def whole(self) -> dict[str, object]:
        """The body of an answer in one piece."""

    def stream(self) -> AsyncIterator[bytes]:
        """The events of an answer in pieces."""


class Service:
    """The handlers of all routes.

    Args:
        worker: Computes answers.
        names: The names of models that clients may use, the first one first.
        counters: For ``/metrics``.
        defaults: What the answers of a model have where a client asks for nothing else, by its name.
    """

    def __init__(
        self,
        worker: Worker,
        names: Callable[[], list[str]],
        counters: Counters,
        defaults: Callable[[str], AnswerDefaults],
    ) -> None:
        self._worker = worker
        self._names = names
        self._defaults = defaults
        self._counters = counters
        self._started = time.time()

    # ---- answers

    async def chat(self, request: Request) -> Response:
        """``POST /v1/chat/completions``."""
        asked = ChatRequest.parse(await read_body(request))
        reply = await self._converse(request, asked.conversation)
        return await _respond(request, ChatAnswer(asked, reply), reply, stream=asked.stream)

    async def completions(self, request: Request) -> Response:
        """``POST /v1/completions``."""
        asked = CompletionRequest.parse(await read_body(request))
        reply = await self._begin(request, asked.job())
        return await _respond(request, CompletionAnswer(asked, reply), reply, stream=asked.stream)

    async def responses(self, request: Request) -> Response:
        """``POST /v1/responses``."""
        asked = ResponseRequest.parse(await read_body(request))
        reply = await self._converse(request, asked.conversation)
        return await _respond(request, ResponseAnswer(asked, reply), reply, stream=asked.stream)

    async def messages(self, request: Request) -> Response:
        """``POST /v1/messages``, Anthropic's protocol."""
        asked = MessageRequest.parse(await read_body(request))
        reply = await self._converse(request, asked.conversation)
        return await _respond(request, MessageAnswer(asked, reply), reply, stream=asked.stream)

    async def count_tokens(self, request: Request) -> Response:
        """``POST /v1/messages/count_tokens``."""
        asked = MessageRequest.parse(await read_body(request), counts_only=True)
        asked.conversation.adopt(self._defaults(asked.conversation.model))
        reply = await self._begin(request, asked.conversation.job(counts_only=True))
        return JSONResponse({"input_tokens": reply.begun.prompt_tokens})

    async def embeddings(self, request: Request) -> Response:
        """``POST /v1/embeddings``: not what these models are for."""
        raise ApiError(
            400,
            "moechat runs models that generate text; they have no embeddings. Use an embedding model in "
            "another server",
            code="unsupported_endpoint",
        )

    async def _converse(self, request: Request, conversation: Conversation) -> Reply:
        """Begin a reply in a conversation; raises as :meth:`_begin`."""
        conversation.adopt(self._defaults(conversation.model))
        return await self._begin(request, conversation.job(), conversation)

    async def _begin(self, request: Request, job: Job, conversation: Conversation | None = None) -> Reply:
        """Wait until the prompt is accepted.

        Raises:
            ApiError: The model is still loading, or the client has left.
            Exception: The request failed.
        """
        if self._worker.starting:
            name, what, share = self._worker.loading or ("the model", "load", 0.0)
            raise ApiError(
                503, f"{name} is loading ({what}, {share:.0%})", kind="server_error", code="model_loading"
            )
        self._worker.submit(job)
        event = await _unless_left(request, job, job.next())
        if isinstance(event, Failed):
            raise event.error
        assert isinstance(event, Begun)
        if conversation is None:
            return Reply(job, event)
        return reply_of(job, event, conversation.format, conversation.offered)

    # ---- facts

    async def models(self, request: Request) -> Response:
        """``GET /v1/models`` and ``GET /v1/models/NAME``."""
        cards = [
            {"id": name, "object": "model", "created": int(self._started), "owned_by": "moechat"}
            for name in await asyncio.to_thread(self._names)
        ]
        engine = self._worker.engine
        for card in cards:
            if engine is not None and card["id"] == engine.name:
                card["context_length"] = engine.context_length
        wanted = request.path_params.get("name")
        if wanted is None:
            return JSONResponse({"object": "list", "data": cards})
        for card in cards:
            if card["id"] == wanted:
                return JSONResponse(card)
        raise ApiError(404, "there is no such model; /v1/models lists them", code="model_not_found")

    async def health(self, request: Request) -> Response:
        """``GET /health``: 200 if requests are answered, 503 while the model loads."""
        worker = self._worker
        loading = None
        if worker.loading is not None:
            name, what, share = worker.loading
            loading = {"model": name, "doing": what, "share": round(share, 3)}
        body = {
            "status": "loading" if worker.starting else "ok",
            "version": __version__,
            "model": worker.loaded or None,
            "loading": loading,
            "answers": worker.active,
            "waiting": worker.waiting,
        }
        if worker.starting:
            return JSONResponse(body, 503, {"Retry-After": "2"})
        return JSONResponse(body)

    async def metrics(self, request: Request) -> Response:
        """``GET /metrics``, for Prometheus."""
        worker = self._worker
        gauges = [
            Gauge("answers_running", "Answers under way.", worker.active),
            Gauge("requests_waiting", "Requests in the queue.", worker.waiting),
            Gauge("model_loaded", "1 if a model is loaded.", float(bool(worker.loaded))),
        ]
        text = self._counters.text(gauges)
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")


def make_app(
    settings: ServeSettings,
    worker: Worker,
    names: Callable[[], list[str]],
    counters: Counters,
    feed: StateFeed,
    defaults: Callable[[str], AnswerDefaults] = lambda _name: AnswerDefaults(),
) -> Guard:
    """The application, guarded.

    Args:
        settings: Of the server.
        worker: Computes answers; started by the caller.
        names: The names of models that clients may use.
        counters: Counts requests and answers.
        feed: The state of the machine.
        defaults: What the answers of a model have where a client asks for nothing else, by its name.
    """
    service = Service(worker, names, counters, defaults)
    routes = [
        Route("/v1/chat/completions", answering(service.chat), methods=["POST"]),
        Route("/v1/completions", answering(service.completions), methods=["POST"]),
        Route("/v1/responses", answering(service.responses), methods=["POST"]),
        Route("/v1/messages", answering(service.messages), methods=["POST"]),
        Route("/v1/messages/count_tokens", answering(service.count_tokens), methods=["POST"]),
        Route("/v1/embeddings", answering(service.embeddings), methods=["POST"]),
        Route("/v1/models", answering(service.models)),
        Route("/v1/models/{name:path}", answering(service.models)),
        Route("/health", answering(service.health)),
        Route("/metrics", answering(service.metrics)),
        Route("/moechat/state", answering(feed.get)),
        Route("/moechat/state/stream", answering(feed.stream)),
        *SavedConversations(settings.history, has_key=bool(settings.api_key)).routes(),
    ]
    page = page_routes()
    app = Starlette(routes=[*routes, *page], exception_handlers={HTTPException: _handle_http})
    paths = frozenset(route.path for route in (*routes, *page))
    return Guard(app, settings, counters, paths, frozenset(route.path for route in page))


async def _respond(request: Request, answer: Answer, reply: Reply, *, stream: bool) -> Response:
    if stream:
        return JobStream(reply.job, answer.stream(), "text/event-stream", sse.HEADERS)
    return JSONResponse(await _unless_left(request, reply.job, answer.whole()))


async def _unless_left(request: Request, job: Job, work: Coroutine[Any, Any, _R]) -> _R:
    """Wait for a result, and cancel the answer when the client leaves."""

    async def left() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(left())
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ApiError(499, "the client has left")
        result = task.result()
    except BaseException:
        job.cancel()
        raise
    else:
        return result
    finally:
        for each in (task, watch):
            each.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await each


async def _handle_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    text = {404: "there is nothing at this address", 405: "this address does not have this method"}
    found = ApiError(error.status_code, text.get(error.status_code, str(error.detail)))
    return found.response(anthropic=request.url.path.startswith("/v1/messages"))
