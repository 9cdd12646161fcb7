"""Ten thousand hostile requests: no crash, nothing left behind, none without an answer."""

from __future__ import annotations

import json
import random
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from serve_support import PATIENCE_S, ServerProcess, serving

COUNT = 10_000
THREADS = 4
PATHS = [
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/embeddings",
    "/v1/models",
    "/health",
    "/metrics",
    "/moechat/conversations",
    "/moechat/conversations?search=%00&limit=3",
    "/moechat/conversations/1/turns",
    "/",
    "/../../etc/passwd",
    "/%00",
    "//",
    "/v1/models/../../x",
]
FIELDS = [
    *(
        "messages",
        "prompt",
        "input",
        "model",
        "stream",
        "stream_options",
        "max_tokens",
        "temperature",
        "top_p",
    ),
    *("top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "seed"),
    *(
        "stop",
        "logprobs",
        "top_logprobs",
        "n",
        "tools",
        "tool_choice",
        "parallel_tool_calls",
        "response_format",
    ),
    *(
        "reasoning_effort",
        "chat_template_kwargs",
        "system",
        "stop_sequences",
        "thinking",
        "instructions",
        "text",
    ),
    *("turns", "undone", "title", "through"),
    *("reasoning", "max_output_tokens", "suffix", "echo", "best_of", "user", "functions"),
]
_SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 2**31, 2**63, -(2**63), 10**400, 0.5, 1e308),
    *("", "x", "\0", "\ud800", "x" * 5000, "auto", "required", "low"),
    *([], {}, [None], [[]], ["a", 1], ["text"], [1, 2, 3], [10**9], {"a": {}}, {"1": 100}, {"999999999": 1}),
    {"type": "function"},
    {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}},
    {"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}},
    {"format": {"type": "json_object"}},
    {"enable_thinking": True},
    {"effort": "high"},
    [{"role": "user", "content": "hello"}],
    [{"role": "user", "content": [{"type": "text", "text": "x"}]}],
    [{"role": "user", "content": {"a": 1}}],
    [{"role": "system"}],
    [{"role": "tool", "content": "x"}],
    [{"role": "assistant", "tool_calls": [{}]}],
    [{"role": 5}],
    [{"type": "function", "function": {"name": "f", "parameters": _SCHEMA}}],
    [{"type": "function", "function": {"name": "f" * 100}}],
    [{"name": "f", "input_schema": {}}],
    [{"question": "a", "answer": "b"}],
    [{"question": "\ud800", "answer": "\0", "mark": "x"}],
]


def json_body(draw: random.Random) -> bytes:
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": "hello"}],
        "prompt": "hello",
        "input": "hello",
    }
    body |= {"max_tokens": 1, "max_output_tokens": 1}
    for _ in range(draw.randrange(4)):
        body[draw.choice(FIELDS)] = draw.choice(VALUES)
    if body.get("max_tokens") is None or draw.random() < 0.9:
        body["max_tokens"] = body["max_output_tokens"] = 1
    body.pop("max_completion_tokens", None)
    return json.dumps(body).encode("utf-8", "surrogatepass")


def hostile(draw: random.Random) -> tuple[bytes, bool]:
    """A request, valid HTTP with a hostile body or hostile HTTP, and whether it may be incomplete."""
    kind = draw.randrange(10)
    if kind == 0:
        return draw.randbytes(draw.randrange(1, 400)), True
    body = json_body(draw)
    if kind == 1:
        body = body[: draw.randrange(len(body))]
    elif kind == 2:
        damaged = bytearray(body)
        for _ in range(draw.randrange(1, 5)):
            damaged[draw.randrange(len(damaged))] = draw.randrange(256)
        body = bytes(damaged)
    elif kind == 3:
        depth = draw.choice([10, 100, 5000])
        body = b'{"messages":' + b"[" * depth + b"]" * depth + b"}"
    method = draw.choice(["POST"] * 8 + ["GET", "PUT", "OPTIONS", "HEAD", "TRACE", "X"])
    headers = {
        "Host": draw.choice(["localhost"] * 9 + ["evil.example"]),
        "Content-Type": draw.choice(["application/json"] * 9 + ["text/plain"]),
        "Content-Length": str(len(body)),
        "Connection": "close",
    }
    if kind == 4:
        headers[draw.choice(["X-A", "Origin", "Expect", "Transfer-Encoding", "Authorization", "Cookie"])] = (
            draw.choice(["x", "", "chunked", "100-continue", "null", "y" * 3000, "\x7f"])
        )
    elif kind == 5:
        headers["Content-Length"] = draw.choice(["-1", "x", "0", "99999999999999999999", str(len(body) - 1)])
    head = f"{method} {draw.choice([*PATHS[:5] * 4, *PATHS])} HTTP/{draw.choice(['1.1'] * 9 + ['1.0'])}\r\n"
    head += "".join(f"{name}: {value}\r\n" for name, value in headers.items()) + "\r\n"
    return head.encode("latin-1") + body, kind in (4, 5)


def send(server: ServerProcess, request: bytes, incomplete: bool) -> str:
    """What became of a request: a status, ``closed``, or ``silence``."""
    host, _, port = server.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as connection:
        try:
            connection.sendall(request)
            if incomplete:  # else the server would wait for the rest
                connection.shutdown(socket.SHUT_WR)
            answer = b""
            while len(answer) < 1 << 20:
                piece = connection.recv(65536)
                if not piece:
                    break
                answer += piece
        except TimeoutError:
            return "silence"
        except OSError:
            return "closed"
    return answer[9:12].decode("latin-1") if answer.startswith(b"HTTP/1.1 ") else "closed"


@pytest.mark.slow
def test_hostile_requests_leave_nothing_behind(tmp_path: Path) -> None:
    # A queue that is never full: every request has to be looked at.
    with serving(tmp_path, "demo", "--parallel", "2", "--queue", "1000") as server:
        process = psutil.Process(server.process.pid)

        def some(seed: int, count: int) -> list[str]:
            draw = random.Random(seed)
            return [send(server, *hostile(draw)) for _ in range(count)]

        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(some, range(100, 100 + THREADS), [COUNT // 10 // THREADS] * THREADS))  # warms up
            server.wait_idle()
            before = process.memory_info().rss, process.num_threads(), process.num_fds()
            seen = [
                one for part in pool.map(some, range(THREADS), [COUNT // THREADS] * THREADS) for one in part
            ]
        server.wait_idle()
        time.sleep(0.5)
        after = process.memory_info().rss, process.num_threads(), process.num_fds()
        counts = {outcome: seen.count(outcome) for outcome in sorted(set(seen))}
        assert "silence" not in counts, counts
        assert "500" not in counts, counts
        assert counts["200"] > COUNT // 20, counts
        assert counts["400"] > COUNT // 10, counts
        # Connections that are closed without an answer are those that are no HTTP.
        assert counts.get("closed", 0) < COUNT // 5, counts
        assert after[0] < before[0] + (24 << 20), (before, after)
        assert after[1] <= before[1] + 2
        assert after[2] <= before[2] + 4
        good = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
        with server.client() as client:
            assert client.post("/v1/chat/completions", json=good).status_code == 200
        print(counts, before, after)
