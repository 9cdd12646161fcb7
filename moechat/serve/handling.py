"""What handlers of requests share: reading a JSON body, and errors as answers."""

from __future__ import annotations

import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from moechat.errors import MoechatError
from moechat.serve.api_errors import ApiError, api_error
from moechat.serve.fields import Fields, parse_body
from moechat.serve.guard import log
from moechat.serve.jobs import Job

Handler = Callable[[Request], Awaitable[Response]]


async def read_body(request: Request) -> Fields:
    """The JSON object of a request's body.

    Raises:
        ApiError: It is of another type, no JSON object, or the client has left.
    """
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json":
        # Forms of other sites can send any other type without asking first.
        raise ApiError(415, "the body must have the content type application/json")
    try:
        return parse_body(await request.body())
    except ClientDisconnect:
        raise ApiError(499, "the client has left") from None


class JobStream(StreamingResponse):
    """A stream of events of an answer; however it ends, nothing more is computed.

    Args:
        job: The answer.
        events: Encoded.
        media_type: Of the stream.
        headers: Further ones.
    """

    def __init__(
        self,
        job: Job,
        events: AsyncIterator[bytes],
        media_type: str,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(events, media_type=media_type, headers=headers)
        self._job = job

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._job.cancel()


def log_unexpected(error: Exception) -> None:
    """Log where an error comes from, without its text, which may have parts of a prompt."""
    frames = "".join(traceback.format_tb(error.__traceback__))
    log.error("unexpected %s\n%s", type(error).__name__, frames)


def answering(handler: Handler) -> Handler:
    """A handler whose errors are answers."""

    async def call(request: Request) -> Response:
        try:
            return await handler(request)
        except Exception as error:
            if not isinstance(error, ApiError | MoechatError):
                log_unexpected(error)
            return api_error(error).response(anthropic=request.url.path.startswith("/v1/messages"))

    return call
