"""Who may ask, and how much."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from serve_support import ServerProcess, serving

import moechat
from moechat.cli.commands.serve_arguments import ServeCommand
from moechat.errors import UsageError

KEY = "secret-key-1234567890"
BODY = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server with a key and an allowed origin."""
    directory = tmp_path_factory.mktemp("guarded")
    (directory / "key.txt").write_text(KEY + "\n")
    options = ("--api-key-file", str(directory / "key.txt"), "--origin", "http://localhost:3000", "-v")
    with serving(directory, "demo", *options) as server:
        # Its own test: /health needs no key.
        yield server


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer wrong"},
        {"authorization": KEY},
        {"authorization": f"Basic {KEY}"},
        {"authorization": f"Bearer {KEY}x"},
        {"authorization": b"Bearer \xff\xfe"},
        {"x-api-key": "wrong"},
    ],
)
def test_without_the_key_nothing_is_told(guarded: ServerProcess, headers: dict[str, str]) -> None:
    with guarded.client() as client:
        for method, path in (
            ("POST", "/v1/chat/completions"),
            ("GET", "/v1/models"),
            ("GET", "/metrics"),
            ("GET", "/x"),
        ):
            response = client.request(method, path, headers=headers)
            assert response.status_code == 401
            assert response.json()["error"]["code"] == "invalid_api_key"
            assert response.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("headers", [{"authorization": f"Bearer {KEY}"}, {"x-api-key": KEY}])
def test_with_the_key_requests_are_answered(guarded: ServerProcess, headers: dict[str, str]) -> None:
    with guarded.client(headers=headers) as client:
        assert client.post("/v1/chat/completions", json=BODY).status_code == 200


def test_the_log_has_neither_keys_nor_contents(guarded: ServerProcess) -> None:
    secret = "a very private sentence"
    with guarded.client(headers={"authorization": f"Bearer {KEY}"}) as client:
        client.post("/v1/chat/completions", json={**BODY, "messages": [{"role": "user", "content": secret}]})
        client.get(f"/{secret}?key={KEY}")
    log = guarded.log.read_text()
    assert "/v1/chat/completions 200" in log
    assert secret not in log
    assert "private" not in log
    assert KEY not in log


def test_another_origin_may_call_only_if_it_was_allowed(guarded: ServerProcess) -> None:
    key = {"authorization": f"Bearer {KEY}"}
    with guarded.client(headers=key) as client:
        allowed = client.post("/v1/chat/completions", json=BODY, headers={"origin": "http://localhost:3000"})
        assert allowed.status_code == 200
        assert allowed.headers["access-control-allow-origin"] == "http://localhost:3000"
        asked = client.options(
            "/v1/chat/completions",
            headers={
                "origin": "http://localhost:3000",
                "access-control-request-method": "POST",
                "access-control-request-headers": "authorization,content-type",
            },
        )
        assert asked.status_code == 204
        assert "authorization" in asked.headers["access-control-allow-headers"]
        for origin in ("http://evil.example", "http://localhost:3001", "null"):
            refused = client.post("/v1/chat/completions", json=BODY, headers={"origin": origin})
            assert refused.status_code == 403
            assert "access-control-allow-origin" not in refused.headers


def test_a_name_that_was_rebound_to_this_address_is_refused(demo: ServerProcess) -> None:
    port = demo.url.rpartition(":")[2]
    with demo.client() as client:
        for host, status in (
            (f"evil.example:{port}", 403),
            ("evil.example", 403),
            ("", 403),
            (f"localhost:{port}", 200),
            (f"LOCALHOST:{port}", 200),
            (f"127.0.0.1:{port}", 200),
        ):
            assert client.get("/v1/models", headers={"host": host}).status_code == status, host
        own = client.get("/v1/models", headers={"origin": demo.url})
        assert own.status_code == 200
        assert client.get("/v1/models", headers={"origin": "http://evil.example"}).status_code == 403


def test_forms_of_other_sites_are_refused(client: httpx.Client) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
        response = client.post("/v1/chat/completions", content=b"{}", headers={"content-type": kind})
        assert response.status_code == 415


def test_large_bodies_are_refused_announced_or_not(client: httpx.Client) -> None:
    size = (32 << 20) + 1
    announced = client.post(
        "/v1/chat/completions", content=b" " * size, headers={"content-type": "application/json"}
    )
    assert announced.status_code == 413

    def pieces() -> Iterator[bytes]:
        for _ in range(33):
            yield b" " * (1 << 20)

    try:
        found = client.post(
            "/v1/chat/completions", content=pieces(), headers={"content-type": "application/json"}
        )
    except httpx.TransportError:
        return  # the server closed the connection while the client still sent
    assert found.status_code == 413


def test_large_headers_are_refused(demo: ServerProcess) -> None:
    with demo.client() as client:
        with contextlib.suppress(httpx.TransportError):
            assert client.get("/health", headers={"x": "y" * (100 << 10)}).status_code == 431
        assert client.get("/health").status_code == 200


def connected(server: ServerProcess) -> socket.socket:
    host, _, port = server.url.removeprefix("http://").partition(":")
    return socket.create_connection((host, int(port)), timeout=60)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"", b""),
        (b"GET /health HT", b""),
        (b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{", b"408"),
    ],
)
def test_connections_that_send_nothing_more_are_closed(
    demo: ServerProcess, sent: bytes, status: bytes
) -> None:
    with connected(demo) as connection:
        connection.sendall(sent)
        started = time.monotonic()
        answer = connection.recv(4096)
        assert time.monotonic() - started < 45
        assert status in answer
        while answer:
            answer = connection.recv(4096)


@pytest.mark.parametrize(
    ("arguments", "fact"),
    [
        ({"host": "0.0.0.0"}, "no key"),
        ({"host": "::"}, "no key"),
        ({"host": "192.168.1.5"}, "no key"),
        ({"host": "example.com"}, "no key"),
        ({"origin": ["localhost:3000"]}, "no origin"),
        ({"origin": ["http://a/b"]}, "no origin"),
        ({"port": 70000}, "--port"),
        ({"parallel": 0}, "--parallel"),
        ({"queue": 0}, "--queue"),
        ({"parallel": 3, "conversations": 2}, "--conversations"),
    ],
)
def test_unsafe_or_wrong_options_are_refused(arguments: dict[str, object], fact: str) -> None:
    with pytest.raises(UsageError, match=fact):
        ServeCommand(model="demo", **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("content", [b"", b"\n", b"two words", b"\xff", b"x" * 5000])
def test_a_file_without_a_usable_key_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "key").write_bytes(content)
    with pytest.raises(UsageError, match="key"):
        ServeCommand(model="demo", api_key_file=str(tmp_path / "key")).with_key()


def test_a_port_in_use_is_named(demo: ServerProcess) -> None:
    from moechat.serve.offered_models import OfferedModels
    from moechat.serve.server import Server
    from moechat.serve.settings import ServeSettings

    port = int(demo.url.rpartition(":")[2])
    with pytest.raises(UsageError, match=str(port)):
        Server(ServeSettings(port=port), OfferedModels("demo", {}), "demo")
    assert moechat.__version__
