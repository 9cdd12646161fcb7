"""Other engines: the forms that they answer in, busy and broken ones."""

from __future__ import annotations

import gzip
import itertools
import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from local_server import serving_with

from moechat.cli.terminal.answer_stats import rows
from moechat.errors import MoechatError, NotAllowedError, OfflineError, PromptTooLongError, UsageError
from moechat.remote import client
from moechat.remote.client import RemoteClient, RemoteError
from moechat.remote.engine import RemoteEngine

Handler = Any


@contextmanager
def answering(answer: Handler) -> Iterator[str]:
    """A server that answers POST requests in some way, and lists one model."""

    class Server(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        count = 0

        def do_GET(self) -> None:
            self.reply(200, json.dumps({"data": [{"id": "m", "max_model_len": 100}]}).encode())

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            type(self).count += 1
            answer(self, type(self).count)

        def reply(self, status: int, body: bytes, kind: str = "application/json", **headers: str) -> None:
            self.send_response(status)
            for name, value in {"content-type": kind, "content-length": str(len(body)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with serving_with(Server) as url:
        yield f"{url}/v1"


def sse(*events: Any, done: bool = True) -> bytes:
    lines = [f"data: {json.dumps(event)}\n\n" for event in events]
    return "".join([*lines, "data: [DONE]\n\n" if done else ""]).encode()


def delta(reason: str | None = None, **fields: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": reason}]}


def answer_of(url: str) -> str:
    engine = RemoteEngine(url)
    try:
        return "".join(step.text for step in engine.generate([{"role": "user", "content": "x"}]))
    finally:
        engine.close()


def test_a_busy_server_is_asked_again() -> None:
    def answer(server: Any, count: int) -> None:
        if count < 3:
            server.reply(429 if count == 1 else 503, b"{}", **{"retry-after": "0"})
        else:
            server.reply(200, sse(delta(content="a"), delta("stop")), "text/event-stream")

    with answering(answer) as url:
        assert answer_of(url) == "a"


def test_the_forms_of_other_servers_are_understood() -> None:
    def vllm(server: Any, count: int) -> None:
        events = [
            {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]},
            delta(reasoning="hm"),
            delta(content="a"),
            {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop", "stop_reason": "END"}]},
            {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9}},
        ]
        server.reply(200, b": ping\n\n" + sse(*events), "text/event-stream; charset=utf-8")

    with answering(vllm) as url:
        engine = RemoteEngine(url)
        assert engine.context_length == 100
        steps = list(engine.generate([{"role": "user", "content": "x"}]))
        assert "".join(step.text for step in steps) == "<think>hm</think>a"
        assert (steps[-1].finish_reason, steps[-1].stop) == ("stop", "END")
        assert engine.stats.prompt_tokens == 7


def test_the_seed_of_an_answer_is_the_one_that_was_sent() -> None:
    def reply(server: Any, count: int) -> None:
        message = {"choices": [{"message": {"content": "b"}, "finish_reason": "stop"}]}
        server.reply(200, json.dumps(message).encode())

    with answering(reply) as url:
        engine = RemoteEngine(url)
        for seed in (None, 0, 5):
            list(engine.generate([{"role": "user", "content": "x"}], seed=seed))
            assert engine.stats.to_json()["seed"] == seed
            assert [value for key, value in rows(engine.stats.to_json()) if key == "seed"] == (
                [] if seed is None else [seed]
            )


def test_a_server_that_cannot_stream_is_understood() -> None:

    def whole(server: Any, count: int) -> None:  # a server that cannot stream
        message = {"role": "assistant", "content": "b"}
        server.reply(200, json.dumps({"choices": [{"message": message, "finish_reason": "length"}]}).encode())

    with answering(whole) as url:
        assert answer_of(url) == "b"


BROKEN: list[tuple[int, bytes, str, type[MoechatError], str]] = [
    (200, b"<html>", "text/html", RemoteError, "JSON"),
    (200, b"[]", "application/json", RemoteError, "object"),
    (200, b"data: {\n\n", "text/event-stream", RemoteError, "JSON"),
    (200, sse(delta(content="a")), "text/event-stream", RemoteError, "without a reason"),
    (200, sse({"error": {"message": "out of memory"}}), "text/event-stream", RemoteError, "out of memory"),
    (
        400,
        b'{"error": {"message": "too long", "code": "context_length_exceeded"}}',
        "application/json",
        PromptTooLongError,
        "too long",
    ),
    (
        400,
        b'{"message": "This model\'s maximum context length is 9", "type": "BadRequestError"}',
        "application/json",
        PromptTooLongError,
        "9",
    ),
    (400, b'{"error": "what?"}', "application/json", UsageError, "what"),
    (422, b"\xff", "text/plain", UsageError, "422"),
    (401, b"{}", "application/json", NotAllowedError, "401"),
    (302, b"", "text/plain", RemoteError, "302"),
]


@pytest.mark.parametrize(("status", "body", "kind", "error", "fact"), BROKEN)
def test_broken_answers_are_clear_errors(
    status: int, body: bytes, kind: str, error: type[MoechatError], fact: str
) -> None:
    with (
        answering(lambda server, _count: server.reply(status, body, kind)) as url,
        pytest.raises(error, match=fact),
    ):
        answer_of(url)


def test_a_connection_that_breaks_is_a_clear_error() -> None:
    def answer(server: Any, count: int) -> None:
        server.send_response(200)
        server.send_header("content-type", "text/event-stream")
        server.send_header("content-length", "100000")
        server.end_headers()
        server.wfile.write(sse(delta(content="a"), done=False))
        server.close_connection = True

    with answering(answer) as url:
        engine = RemoteEngine(url)
        steps = engine.generate([{"role": "user", "content": "x"}])
        assert next(steps).text == "a"
        with pytest.raises(RemoteError, match="broke"):
            next(steps)


def test_a_server_that_cannot_be_reached_is_offline() -> None:
    with pytest.raises(OfflineError, match="cannot be reached"):
        RemoteClient("127.0.0.1:9", attempts=1).get("/models")


def endless(status: int, kind: str, start: bytes, piece: bytes) -> Handler:
    """Answers without end."""

    def answer(server: Any, _count: int) -> None:
        server.close_connection = True
        server.send_response(status)
        server.send_header("content-type", kind)
        server.end_headers()
        with suppress(OSError):
            server.wfile.write(start)
            while True:
                server.wfile.write(piece)

    return answer


@pytest.mark.parametrize(
    ("status", "kind", "start", "piece", "fact"),
    [
        (200, "application/json", b'{"a": "', b"x" * 65536, "sends more than 64 MiB"),
        (200, "text/event-stream", b"data: ", b"x" * 65536, "sends an event of more than 4 MiB"),
        (200, "text/event-stream", b"", b"data: xxxxxxxx\n" * 4096, "sends an event of more than 4 MiB"),
        (200, "text/event-stream", b"", b": ping\n\n" * 8192, "sends more than 1 MiB"),
        (400, "application/json", b'{"error": "', b"x" * 65536, "HTTP status 400"),
    ],
)
def test_an_answer_without_end_is_refused(
    status: int, kind: str, start: bytes, piece: bytes, fact: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if fact == "sends more than 1 MiB":
        monkeypatch.setattr(client, "_MOST_ANSWER", 1 << 20)
    with answering(endless(status, kind, start, piece)) as url, pytest.raises(MoechatError, match=fact):
        answer_of(url)


def test_a_compressed_answer_is_refused() -> None:
    bomb = gzip.compress(bytes(1 << 20))
    for kind in ("application/json", "text/event-stream"):

        def answer(server: Any, _count: int, kind: str = kind) -> None:
            assert server.headers["accept-encoding"] == "identity"
            server.reply(200, bomb, kind, **{"content-encoding": "gzip"})

        with answering(answer) as url, pytest.raises(RemoteError, match="sends data as gzip, although"):
            answer_of(url)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(
    st.lists(st.text(st.characters(exclude_categories=("Cs",)), max_size=5), max_size=5),
    st.sampled_from((b"\n", b"\r\n", b"\r")),
    st.lists(st.integers(0, 60), max_size=5),
)
def test_events_are_the_same_however_they_are_cut(texts: list[str], end: bytes, cuts: list[int]) -> None:
    whole = b"".join(
        b"id: 1" + end + b"data: " + json.dumps({"t": text}).encode() + end + end for text in texts
    )
    edges = sorted({0, *(min(cut, len(whole)) for cut in cuts), len(whole)})
    parts = [whole[begin:stop] for begin, stop in itertools.pairwise(edges)]
    response = httpx.Response(200, content=iter(parts))
    # After a CR at the very end, a LF may follow: the last event then waits for more.
    found = [json.loads(data)["t"] for data in client._events(response, "host")]
    assert found == texts[: len(found)]
    assert len(found) >= len(texts) - (end == b"\r")
