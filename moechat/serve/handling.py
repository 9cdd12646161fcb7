"""What handlers of requests share: reading a JSON body, and errors as answers."""

from __future__ import annotations

import traceback
from collections.abc import Awaitable, Callable

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from moechat.errors import MoechatError
from moechat.serve.api_errors import ApiError, api_error
from moechat.serve.fields import Fields, parse_body
from moechat.serve.guard import log

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


def answering(handler: Handler) -> Handler:
    """A handler whose errors are answers."""

    async def call(request: Request) -> Response:
        try:
            return await handler(request)
        except Exception as error:
            if not isinstance(error, ApiError | MoechatError):
                # Without the error's text, which may have parts of a prompt.
                frames = "".join(traceback.format_tb(error.__traceback__))
                log.error("unexpected %s\n%s", type(error).__name__, frames)
            return api_error(error).response(anthropic=request.url.path.startswith("/v1/messages"))

    return call
