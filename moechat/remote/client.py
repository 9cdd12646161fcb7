"""Requests to an OpenAI-compatible server, and its errors as ours."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any
from urllib.parse import urlsplit

import httpx

from moechat import __version__
from moechat.errors import (
    ModelNotFoundError,
    MoechatError,
    NotAllowedError,
    OfflineError,
    PromptTooLongError,
    UsageError,
    one_line,
)
from moechat.remote.keys import VARIABLE, api_key

_CONNECT_S = 10.0
# A long prompt takes minutes to its first token.
_READ_S = 600.0
_MOST_BODY = 64 << 20
_MOST_REFUSAL = 1 << 20
# Of one event, which holds a token or a few; and of a whole answer.
_MOST_EVENT = 4 << 20
_MOST_ANSWER = 256 << 20
# Waits before further attempts, in seconds, where the server is busy or restarts.
_WAITS = (0.5, 1.0, 2.0, 4.0, 8.0)
_MOST_WAIT_S = 30.0
_BUSY = (408, 429, 500, 502, 503, 504)
_CONTEXT_MARKS = ("context_length_exceeded", "maximum context length", "context size", "exceed_context")


class RemoteError(MoechatError):
    """Another engine failed, or answers in a form that is not OpenAI's."""


class RemoteClient:
    """Talks to one server.

    Args:
        url: With or without ``/v1``.
        attempts: Times that a request is sent while the server is busy.
        key_variable: The environment variable with the server's key; empty: the one for any server.

    Raises:
        UsageError: It is no URL of a server.
    """

    def __init__(self, url: str, *, attempts: int = len(_WAITS) + 1, key_variable: str = "") -> None:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise UsageError(
                f"{_without_password(url)} is no URL of a server",
                hint="an example is http://localhost:8000/v1",
            )
        if parts.username or parts.password:
            raise UsageError(
                f"the URL of {parts.hostname} has a user or password",
                hint=f"give a key in {VARIABLE} instead: it is not shown in lists of processes",
            )
        path = parts.path.rstrip("/")
        self.base = f"{parts.scheme}://{parts.netloc}{path if path else '/v1'}"
        self.host = parts.netloc
        self._attempts = max(1, attempts)
        # Not compressed: a few bytes could become gigabytes.
        headers = {"User-Agent": f"moechat/{__version__}", "Accept-Encoding": "identity"}
        self._key_variable = key_variable or VARIABLE
        key = api_key(self.host, key_variable)
        if key:
            headers["Authorization"] = f"Bearer {key}"
        timeout = httpx.Timeout(_READ_S, connect=_CONNECT_S)
        self._http = httpx.Client(headers=headers, timeout=timeout, follow_redirects=False)

    def close(self) -> None:
        """Close all connections."""
        self._http.close()

    def get(self, path: str) -> Any:
        """The JSON value at a path below ``/v1``.

        Raises:
            MoechatError: The server cannot be reached, refuses, or answers something else.
        """
        with self._sent("GET", path, None) as response:
            return _json(response, self.host)

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """Send a JSON object; returns the JSON value of the answer. Errors as for :meth:`get`."""
        with self._sent("POST", path, body) as response:
            return _json(response, self.host)

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Send a JSON object; returns the events of the answer, without the last ``[DONE]``.

        Closing the iterator closes the connection, and the server then stops the answer.

        Raises:
            MoechatError: As for :meth:`get`, also in the middle.
        """
        with self._sent("POST", path, body) as response:
            kind = response.headers.get("content-type", "")
            if not kind.startswith("text/event-stream"):
                yield _object(_json(response, self.host), self.host)
                return
            try:
                for data in _events(response, self.host):
                    if data == "[DONE]":
                        return
                    try:
                        found = _object(json.loads(data), self.host)
                    except (ValueError, RecursionError):
                        raise RemoteError(f"{self.host} sends an event that is not JSON") from None
                    if found.get("error"):
                        raise _refusal(500, found, self.host, self._key_variable)
                    yield found
            except httpx.TimeoutException:
                raise RemoteError(f"{self.host} has sent nothing for {_READ_S:g} s") from None
            except httpx.HTTPError as error:
                raise RemoteError(f"the connection to {self.host} broke: {one_line(error)}") from None

    @contextmanager
    def _sent(self, method: str, path: str, body: dict[str, Any] | None) -> Iterator[httpx.Response]:
        """Send a request, again while the server is busy; the answer is good and not read yet."""
        for attempt in range(self._attempts):
            wait = _WAITS[min(attempt, len(_WAITS) - 1)]
            last = attempt == self._attempts - 1
            try:
                request = self._http.build_request(method, f"{self.base}{path}", json=body)
                response = self._http.send(request, stream=True)
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                if last:
                    raise OfflineError(
                        f"{self.host} cannot be reached: {one_line(error) or 'no answer'}",
                        hint="check the URL, and that the server runs",
                    ) from None
                time.sleep(wait)
                continue
            except httpx.TimeoutException:
                raise RemoteError(f"{self.host} has sent nothing for {_READ_S:g} s") from None
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                raise RemoteError(f"the request to {self.host} failed: {one_line(error)}") from None
            with closing(response):
                if response.is_success:
                    yield response
                    return
                if response.status_code in _BUSY and not last:
                    time.sleep(_retry_after(response, wait))
                    continue
                raise _refused(response, self.host, self._key_variable)


def _retry_after(response: httpx.Response, default: float) -> float:
    value = response.headers.get("retry-after", "")
    return min(float(value), _MOST_WAIT_S) if value.isascii() and value.isdigit() else default


def _pieces(response: httpx.Response, host: str, most: int) -> Iterator[bytes]:
    """The body of an answer as it comes.

    Raises:
        RemoteError: It is compressed, or larger than ``most`` bytes.
    """
    coding = response.headers.get("content-encoding", "identity")
    if coding not in ("identity", ""):
        raise RemoteError(f"{host} sends data as {coding[:40]}, although it was asked for it as it is")
    size = 0
    for piece in response.iter_raw():
        size += len(piece)
        if size > most:
            raise RemoteError(f"{host} sends more than {most >> 20} MiB")
        yield piece


def _read(response: httpx.Response, host: str) -> bytes:
    return b"".join(_pieces(response, host, _MOST_BODY))


def _events(response: httpx.Response, host: str) -> Iterator[str]:
    """The data of the events of a stream, without empty ones.

    Raises:
        RemoteError: One is larger than 4 MiB, or the answer than 256 MiB.
    """
    rest, data, size = b"", list[bytes](), 0
    for piece in _pieces(response, host, _MOST_ANSWER):
        rest += piece
        # Lines end in CR, LF or both; of a CR at the end, the LF may be still on its way.
        held = b"\r" if rest.endswith(b"\r") else b""
        *lines, rest = re.split(b"\r\n|\r|\n", rest.removesuffix(b"\r"))
        rest += held
        for line in lines:
            field, _, value = line.partition(b":")
            if field == b"data":
                data.append(value.removeprefix(b" "))
                size += len(value)
            elif not line:
                if any(data):
                    yield b"\n".join(data).decode("utf-8", "replace")
                data, size = [], 0
        if size + len(rest) > _MOST_EVENT:
            raise RemoteError(f"{host} sends an event of more than {_MOST_EVENT >> 20} MiB")


def _json(response: httpx.Response, host: str) -> Any:
    try:
        return json.loads(_read(response, host))
    except (ValueError, RecursionError):
        raise RemoteError(
            f"{host} answers something else than JSON",
            hint="the URL of an OpenAI-compatible server mostly ends in /v1",
        ) from None
    except httpx.HTTPError as error:
        raise RemoteError(f"the connection to {host} broke: {one_line(error)}") from None


def _object(value: Any, host: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise RemoteError(f"{host} answers something else than an object")
    return value


def _refused(response: httpx.Response, host: str, variable: str) -> MoechatError:
    data = b""
    try:
        for piece in _pieces(response, host, _MOST_BODY):
            data += piece
            if len(data) > _MOST_REFUSAL:  # no words of a server are that long
                break
        found = json.loads(data)
    except (ValueError, RecursionError, RemoteError, httpx.HTTPError):
        found = {}
    return _refusal(response.status_code, found if isinstance(found, dict) else {}, host, variable)


def _refusal(status: int, found: dict[str, Any], host: str, variable: str) -> MoechatError:
    """The error of a body in OpenAI's form, or in vLLM's older one."""
    inner = found.get("error")
    error: dict[str, Any] = inner if isinstance(inner, dict) else found
    text = error.get("message") or (inner if isinstance(inner, str) else "") or f"HTTP status {status}"
    message = f"{host}: {one_line(text)}"
    if any(mark in f"{error.get('code')} {error.get('type')} {text}" for mark in _CONTEXT_MARKS):
        return PromptTooLongError(message)
    if status in (401, 403):
        return NotAllowedError(message, hint=f"set {variable} to the key of this server")
    if status == 404:
        return ModelNotFoundError(message, hint="the URL mostly ends in /v1; /v1/models lists the models")
    if 400 <= status < 500 and status not in _BUSY:
        return UsageError(message)
    return RemoteError(message, hint="try again later" if status in _BUSY else None)


def _without_password(url: str) -> str:
    return f"…@{url.rpartition('@')[2]}" if "@" in url else url
