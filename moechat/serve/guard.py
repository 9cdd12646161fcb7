"""What every request has to pass: its host, its origin, its key, and limits of its body."""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moechat.serve.api_errors import ApiError
from moechat.serve.counters import Counters
from moechat.serve.settings import ServeSettings

log = logging.getLogger("moechat.serve")

# Bytes of all headers of a request.
MOST_HEADER_BYTES = 64 << 10
# Need no key: they tell nothing but that the server lives.
_OPEN = ("/health",)
_METHODS = "GET, POST, OPTIONS"
# The SDKs of OpenAI and Anthropic send headers of their own.
_MAX_AGE_S = "600"


class Guard:
    """The outermost layer of the application.

    Args:
        app: The layer below.
        settings: Of the server.
        counters: Counts requests.
        routes: Paths that exist, for counting.
        open_paths: Paths that need no key, besides ``/health``.
    """

    def __init__(
        self,
        app: ASGIApp,
        settings: ServeSettings,
        counters: Counters,
        routes: frozenset[str],
        open_paths: frozenset[str] = frozenset(),
    ) -> None:
        self._app = app
        self._settings = settings
        self._counters = counters
        self._routes = routes
        self._open = open_paths.union(_OPEN)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            # Websockets: closed at once.
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008})
            return
        started = time.monotonic()
        headers = Headers(scope=scope)
        status = 0

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message.get("headers", []), *self._added(headers)]}
            await send(message)

        limited = _LimitedBody(receive, self._settings.most_body, self._settings.body_timeout_s)
        try:
            refusal = self._refusal(scope, headers)
            if refusal is not None:
                # Without reading the body; the connection cannot be used again.
                await _respond(refusal, scope, answer, {"Connection": "close"})
            elif scope["method"] == "OPTIONS":
                await answer({"type": "http.response.start", "status": 204, "headers": []})
                await answer({"type": "http.response.body", "body": b""})
            else:
                await self._app(scope, limited, answer)
        except ApiError as error:  # from the body's limits
            if status == 0:
                await _respond(error, scope, answer, {"Connection": "close"})
        finally:
            path = scope["path"] if scope["path"] in self._routes else "other"
            self._counters.requested(path, status)
            # Neither contents nor keys; an unknown path may hold either.
            log.info("%s %s %s %.3f s", scope["method"], path, status or "-", time.monotonic() - started)

    def _refusal(self, scope: Scope, headers: Headers) -> ApiError | None:
        settings = self._settings
        if scope.get("server") is not None and not settings.allows_host(headers.get("host", "")):
            return ApiError(403, "the Host header names another server", code="wrong_host")
        origin = headers.get("origin")
        if origin is not None and not self._allows(origin, headers):
            return ApiError(
                403, "pages of this origin may not call the server; --origin allows one", code="wrong_origin"
            )
        if sum(len(name) + len(value) for name, value in scope["headers"]) > MOST_HEADER_BYTES:
            return ApiError(431, f"the headers are larger than {MOST_HEADER_BYTES >> 10} KiB")
        if scope["method"] == "OPTIONS" or scope["path"] in self._open:
            return None
        if settings.api_key and not _same(settings.api_key, _key_of(headers)):
            return ApiError(
                401, "the API key is missing or wrong", kind="authentication_error", code="invalid_api_key"
            )
        length = headers.get("content-length", "0")
        if not length.isascii() or not length.isdigit() or int(length[:20]) > settings.most_body:
            return ApiError(
                413, f"the body is larger than {settings.most_body >> 20} MiB", code="request_too_large"
            )
        return None

    def _allows(self, origin: str, headers: Headers) -> bool:
        """Whether a page of an origin may call: one that was allowed, or the server's own page."""
        return origin in self._settings.origins or urlsplit(origin).netloc == headers.get("host")

    def _added(self, headers: Headers) -> list[tuple[bytes, bytes]]:
        added = {"X-Content-Type-Options": "nosniff", "Cache-Control": "no-store"}
        origin = headers.get("origin")
        if origin in self._settings.origins:
            added |= {
                "Access-Control-Allow-Origin": origin or "",
                "Access-Control-Allow-Methods": _METHODS,
                "Access-Control-Allow-Headers": _printable(
                    headers.get("access-control-request-headers", "*")
                ),
                "Access-Control-Max-Age": _MAX_AGE_S,
                "Vary": "Origin",
            }
        return [(name.lower().encode(), value.encode()) for name, value in added.items()]


class _LimitedBody:
    """Receives a body of limited size in limited time."""

    def __init__(self, receive: Receive, most: int, timeout_s: float) -> None:
        self._receive = receive
        self._left = most
        self._most = most
        self._timeout_s = timeout_s
        self._ends = time.monotonic() + timeout_s
        self._complete = False

    async def __call__(self) -> Message:
        if self._complete:  # from here on it waits for the client to leave
            return await self._receive()
        try:
            message = await asyncio.wait_for(self._receive(), max(0.0, self._ends - time.monotonic()))
        except TimeoutError:
            raise ApiError(
                408, f"the body did not arrive within {self._timeout_s:g} s", code="body_timeout"
            ) from None
        if message["type"] == "http.request":
            self._left -= len(message.get("body", b""))
            if self._left < 0:
                raise ApiError(
                    413, f"the body is larger than {self._most >> 20} MiB", code="request_too_large"
                )
            self._complete = not message.get("more_body", False)
        return message


async def _respond(error: ApiError, scope: Scope, send: Send, extra: dict[str, str]) -> None:
    response = error.response(anthropic=scope["path"].startswith("/v1/messages"))
    response.headers.update(extra)

    async def nothing() -> Message:
        return {"type": "http.disconnect"}

    await response(scope, nothing, send)


def _key_of(headers: Headers) -> str:
    kind, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if kind.lower() == "bearer" else headers.get("x-api-key", "")


def _same(wanted: str, given: str) -> bool:
    """Compare in a time that does not depend on where they differ."""
    return hmac.compare_digest(wanted.encode(), given.encode("utf-8", "surrogateescape"))


def _printable(value: str) -> str:
    return "".join(c for c in value[:1000] if c.isalnum() or c in "-_, *")
