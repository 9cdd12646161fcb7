"""Requests whose answers cannot take more memory or time than they may: bodies, errors, redirects, silence.

A mirror, a proxy or a portal may send anything. Every answer of a hub is read here: JSON up to a size and a
time, bodies of errors up to their beginning, redirects without their bodies, and files piece by piece, no
slower than any connection is. Compressed answers are refused, because a few bytes can become gigabytes.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any
from weakref import WeakSet

from moechat.errors import OfflineError
from moechat.fetch.hub_client import host_name, http_library, hub_utilities, session
from moechat.fetch.stop_switch import StopSwitch, shut_down

# A description takes 300 bytes a file; the largest repositories have some ten thousand files.
MAX_ANSWER_BYTES = 32 << 20
_MAX_ANSWER_VALUES = 1 << 20
_MAX_ERROR_BYTES = 64 << 10
_MAX_REDIRECTS = 8
# Until the last head has come, names and connections included; and until a whole JSON answer has.
_HEAD_S = 90.0
_ANSWER_S = 120.0
# A connection that is slower over a minute counts as one that has stalled.
SLOWEST_BYTES_PER_S = 1024
_WINDOW_S = 60.0


@contextmanager
def requested(
    url: str,
    *,
    headers: Mapping[str, str],
    timeout: Any,
    params: Mapping[str, Any] | None = None,
    stop: StopSwitch | None = None,
) -> Iterator[Any]:
    """Send a GET request, and yield the answer, of which only the head has been read.

    Args:
        url: Its address.
        headers: Its headers. The client removes the token from redirects to another host.
        timeout: Of the HTTP client: for connecting, and for each read.
        params: Added to the address.
        stop: Closes the connection from another thread.

    Raises:
        HTTPError: Of the HTTP client or of huggingface_hub: no connection, no head in time, too many
            redirects, or a status of failure.
    """
    client, library = session(), http_library()
    stop = StopSwitch() if stop is None else stop

    def trace(event: str, info: Mapping[str, Any]) -> None:
        stop.trace(event, info)
        if event.endswith((".connect_tcp.complete", ".start_tls.complete")):
            _watch(info.get("return_value"))

    request = client.build_request(
        "GET",
        url,
        params=params,
        # Compressed bytes could be neither counted nor resumed.
        headers={**headers, "Accept-Encoding": "identity"},
        timeout=timeout,
        extensions={"trace": trace},
    )
    with deadline(_HEAD_S, request):
        for redirects in range(_MAX_REDIRECTS + 1):
            stop.check()
            response = client.send(request, stream=True, follow_redirects=False)
            stream = response.extensions.get("network_stream")
            stop.watch(stream)  # reused connections do not call `trace`
            _watch(stream)
            if not response.has_redirect_location:
                break
            response.close()  # its body, which may have no end, is not read
            if response.next_request is None:
                raise library.InvalidURL("the address of a redirect is invalid")
            if redirects == _MAX_REDIRECTS:
                raise library.TooManyRedirects(f"more than {_MAX_REDIRECTS} redirects", request=request)
            request = response.next_request
    try:
        if response.status_code >= 400:
            with deadline(_ANSWER_S, request):
                hub_utilities().hf_raise_for_status(_beginning(response))
        yield response
    finally:
        response.close()


def _beginning(response: Any) -> Any:
    """An answer of failure with the beginning of its body, enough for the words in it."""
    data = b""
    for piece in response.iter_raw():
        data = (data + piece)[:_MAX_ERROR_BYTES]
        if len(data) == _MAX_ERROR_BYTES:
            break
    left_out = ("content-encoding", "content-length", "transfer-encoding")
    headers = [pair for pair in response.headers.multi_items() if pair[0].lower() not in left_out]
    return http_library().Response(
        response.status_code, headers=headers, content=data, request=response.request
    )


def pieces(response: Any) -> Iterator[bytes]:
    """The body of an answer as it comes.

    Raises:
        HTTPError: The connection broke, has stalled, or brings less than :data:`SLOWEST_BYTES_PER_S`.
        OfflineError: It is compressed.
    """
    coding = response.headers.get("content-encoding", "identity")
    if coding not in ("identity", ""):
        raise OfflineError(
            f"{host_name()} sends data as {coding[:40]}, although it was asked for it as it is",
            hint="a proxy or mirror is at fault: check HF_ENDPOINT and the proxy variables",
        )
    waited, arrived = 0.0, 0
    parts = iter(response.iter_raw())
    while True:
        start = time.monotonic()
        data = next(parts, None)
        if data is None:
            return
        waited += time.monotonic() - start  # not the time that the caller takes
        arrived += len(data)
        yield data
        if waited >= _WINDOW_S:
            if arrived < SLOWEST_BYTES_PER_S * waited:
                raise http_library().ReadTimeout(
                    f"{arrived} bytes in {waited:.0f} s", request=response.request
                )
            waited, arrived = 0.0, 0


def ask_json(
    url: str, *, headers: Mapping[str, str], timeout: Any, params: Mapping[str, Any] | None = None
) -> Any:
    """The JSON value at an address.

    Raises:
        HTTPError: As :func:`requested`.
        OfflineError: The answer is larger than :data:`MAX_ANSWER_BYTES`, or compressed.
        ValueError: It is no JSON, or has more values than any answer of a hub.
    """
    data = bytearray()
    with (
        requested(url, headers=headers, timeout=timeout, params=params) as response,
        deadline(_ANSWER_S, response.request),
    ):
        for piece in pieces(response):
            data += piece
            if len(data) > MAX_ANSWER_BYTES:
                raise OfflineError(
                    f"{host_name()} does not answer like a model hub: its answer has more than "
                    f"{MAX_ANSWER_BYTES >> 20} MiB",
                    hint="check HF_ENDPOINT; the mirror that it names, or a proxy, is at fault",
                )
    if data.count(b",") + data.count(b"[") + data.count(b"{") > _MAX_ANSWER_VALUES:
        raise ValueError(f"more than {_MAX_ANSWER_VALUES:,} values")
    return json.loads(data)


# The connections of all requests. The head of an answer may come over a connection that was opened for an
# earlier request, and which one that is, the client does not say before the head is complete.
_CONNECTIONS: WeakSet[socket.socket] = WeakSet()
_LOCK = threading.Lock()


def _watch(stream: Any) -> None:
    with suppress(AttributeError):
        connection = stream.get_extra_info("socket")
        if isinstance(connection, socket.socket):
            with _LOCK:
                _CONNECTIONS.add(connection)


@contextmanager
def deadline(seconds: float, request: Any) -> Iterator[None]:
    """Close all connections if the block takes longer, which wakes any wait for bytes. Other requests at the
    same time are sent again by their retries.

    Raises:
        ReadTimeout: Of the HTTP client: it has taken longer.
    """
    expired = threading.Event()

    def end() -> None:
        expired.set()
        with _LOCK:
            for connection in list(_CONNECTIONS):
                shut_down(connection)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    library = http_library()
    try:
        yield
    except library.HTTPError:
        if expired.is_set():
            raise library.ReadTimeout(f"not complete after {seconds:g} s", request=request) from None
        raise
    finally:
        timer.cancel()
    if expired.is_set():
        raise library.ReadTimeout(f"not complete after {seconds:g} s", request=request)
