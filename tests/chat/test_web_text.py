"""Texts from URLs: what is read, how HTML becomes text, and what is refused."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moechat.chat import web_text
from moechat.chat.text_files import read_named
from moechat.chat.web_text import read_url, text_of_html
from moechat.errors import OfflineError, UsageError

PAGE = """<!doctype html><html><head><title>Foxes</title><style>p { color: red }</style>
<script>if (1 < 2) alert("no")</script></head><body>
<h1>The   fox</h1><p>A fox &amp; a
kite.<p>Second<br>line <b>bold</b>text
<pre>def f():
    return 1
</pre><ul><li>one</li><li>two</li></ul><svg><text>no</text></svg></body></html>"""
WORDS = "Foxes\nThe fox\nA fox & a kite.\nSecond\nline boldtext\ndef f():\n    return 1\none\ntwo"


class Site(BaseHTTPRequestHandler):
    """Answers by path."""

    answers: ClassVar[dict[str, tuple[int, dict[str, str], bytes]]] = {}

    def do_GET(self) -> None:
        status, headers, body = self.answers.get(self.path, (404, {}, b"none"))
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if "Location" not in headers:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    Site.answers = {
        "/notes/fox%20tale.txt": (200, {"Content-Type": "text/plain; charset=utf-8"}, "Füchse\n".encode()),
        "/": (200, {"Content-Type": "text/html"}, PAGE.encode()),
        "/data": (200, {"Content-Type": "application/vnd.api+json"}, b'{"a": 1}'),
        "/latin": (200, {"Content-Type": "text/plain; charset=iso-8859-1"}, "Füchse".encode("latin-1")),
        "/wrong": (200, {"Content-Type": "text/plain"}, b"\xff\xfe\xfd"),
        "/odd": (200, {"Content-Type": "text/plain; charset=x-none"}, b"a"),
        "/picture.png": (200, {"Content-Type": "image/png"}, b"\x89PNG"),
        "/packed": (
            200,
            {"Content-Type": "text/plain", "Content-Encoding": "gzip"},
            gzip.compress(b"a" * 100),
        ),
        "/moved": (302, {"Location": "/data"}, b""),
        "/round": (302, {"Location": "/round"}, b""),
    }
    server = ThreadingHTTPServer(("127.0.0.1", 0), Site)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_a_text_has_its_name_and_charset(site: str) -> None:
    assert read_named(f"{site}/notes/fox%20tale.txt") == ("fox tale.txt", "Füchse\n")
    assert read_url(f"{site}/latin") == ("latin", "Füchse")
    assert read_url(f"{site}/moved") == ("data", '{"a": 1}')


def test_a_page_becomes_its_text(site: str) -> None:
    assert read_url(f"{site}/") == (site.removeprefix("http://"), WORDS)


@given(st.text(alphabet="<>/abpre&;!-\"'= \n\0", max_size=80))
def test_no_page_is_refused(page: str) -> None:
    assert "\0" not in text_of_html(page)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/none", "answers with status 404"),
        ("/wrong", "is not utf-8"),
        ("/odd", "is not x-none"),
        ("/picture.png", "is not text: its type is image/png"),
        ("/packed", "is compressed"),
    ],
)
def test_what_is_no_text_is_refused(site: str, path: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read_url(site + path)


def test_sizes_times_redirects_and_silence_are_limited(site: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OfflineError, match="redirects"):
        read_url(f"{site}/round")
    with pytest.raises(OfflineError, match="9/x cannot be read"):
        read_url("http://127.0.0.1:9/x")
    with pytest.raises(UsageError, match="is no URL"):
        read_url("http://[::1/x")
    monkeypatch.setattr(web_text, "_MOST_BYTES", 5)
    with pytest.raises(UsageError, match="more than any context holds"):
        read_url(f"{site}/data")
    monkeypatch.setattr(web_text, "_MOST_BYTES", 100)
    monkeypatch.setattr(web_text, "_MOST_S", -1.0)
    with pytest.raises(OfflineError, match="takes more than"):
        read_url(f"{site}/data")
