"""A model hub on this machine: a real HTTP server with the hub's protocol, which can fail in many ways.

Requests of huggingface_hub: ``/api/models/ID[/revision/REV]?blobs=true``, ``/ID/resolve/COMMIT/FILE`` and
``/api/models?search=WORDS``, which finds repositories whose names have all words;
files in large file storage are redirected to another address, as the real hub does it.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
_PIECE = 16 << 10
WEIGHTS = (".safetensors", ".gguf")

REPOSITORY = "tiny/moe-chat"


@dataclass
class Faults:
    """Faults of the server; tests set them.

    Attributes:
        cuts: How many more bodies of shards end early, each after ``cut_after`` bytes.
        stall: Bodies of shards stop coming after ``cut_after`` bytes, the connection stays.
        mute: Requests for shards get no answer at all, the connection stays.
        only: Name of the one shard that ``cuts``, ``stall`` and ``mute`` are for.
        status: Every request for a file or the model gets this status with these headers.
        times: How many requests get that status; 0: all.
        page: Every shard is this instead, with status 200, headers apart.
        busy: How many more requests for shards get status 503.
        busy_headers: How many more requests for headers of shards do.
        alter: Name of a file whose last byte is sent wrongly.
        grow: Name of a file that is sent with one byte more.
        pace_s: Seconds between pieces of shards.
        ignore_ranges: Ranges are answered with the whole file.
        gated: The model is shown, its files are not given.
        reached: After so many bytes of shards, ``at_reached`` is called once.
        at_reached: See there.
        endless: What never ends: the body of ``model`` (its description), ``error``, ``redirect`` or ``file``
            (whose size is not announced), or the head of a ``head``.
        pause_s: Seconds between the pieces of what never ends, which are one byte each then.
        coding: Content coding that files and descriptions claim to have.
        circle: Files are redirected to themselves.
    """

    cuts: int = 0
    cut_after: int = 0
    stall: bool = False
    mute: bool = False
    only: str = ""
    status: int = 0
    times: int = 0
    page: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    busy: int = 0
    busy_headers: int = 0
    alter: str = ""
    grow: str = ""
    pace_s: float = 0.0
    ignore_ranges: bool = False
    gated: bool = False
    reached: int = 0
    at_reached: Callable[[], None] | None = None
    endless: str = ""
    pause_s: float = 0.0
    coding: str = ""
    circle: bool = False


@dataclass(frozen=True)
class Request:
    """A request: path, range, whether it had a token, bytes sent."""

    path: str
    range: str
    token: str
    sent: int


class Hub:
    """The server.

    Attributes:
        repositories: Files by repository and name.
        tags: Tags by repository, such as ``base_model:quantized:org/name``.
        commit: Of every repository.
        sending: Requests that are being answered.
        say: Keys of a model's description with wrong values.
        say_raw: The whole description, in place of the correct one.
        events: Shards that were requested (``requested``, name) and sent completely (``sent``, name), without
            requests of headers, in order; tests add other events.
    """

    def __init__(self) -> None:
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.card: dict[str, Any] = {"license": "apache-2.0"}
        self.tags: dict[str, list[str]] = {}
        self.faults = Faults()
        self.requests: list[Request] = []
        self.sending = 0
        self.commit = COMMIT
        self.say: dict[str, Any] = {}
        self.say_raw: bytes | None = None
        self.events: list[tuple[str, str]] = []
        hub = self

        class Handler(_Handler):
            owner = hub

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        # Large files come from another origin, which is not to see the token.
        self._storage = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._storage.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        self.reset_storage()

    def reset_storage(self) -> None:
        self.storage = f"http://127.0.0.1:{self._storage.server_port}"

    def add(self, repository: str, directory: Path) -> None:
        self.repositories[repository] = {
            str(path.relative_to(directory)): path.read_bytes()
            for path in sorted(directory.rglob("*"))
            if path.is_file()
        }

    def reset(self) -> None:
        self.faults = Faults()
        self.reset_storage()
        self.say, self.say_raw, self.commit = {}, None, COMMIT
        self.tags.clear()
        self.requests.clear()
        self.events.clear()

    def sent(self, suffix: str = ".safetensors") -> int:
        """Bytes of bodies sent of files with this suffix, those of headers of shards included."""
        return sum(request.sent for request in self.requests if request.path.endswith(suffix))

    @contextmanager
    def running(self) -> Iterator[Hub]:
        servers = (self._server, self._storage)
        threads = [
            threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
            for server in servers
        ]
        for thread in threads:
            thread.start()
        try:
            yield self
        finally:
            for server, thread in zip(servers, threads, strict=True):
                server.shutdown()
                server.server_close()
                thread.join()


class _Handler(BaseHTTPRequestHandler):
    owner: Hub
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else every answer waits 40 ms between its head and its body

    def log_message(self, format: str, *arguments: object) -> None:
        pass

    def handle(self) -> None:
        with suppress(ConnectionResetError):  # the client was killed
            super().handle()

    def do_GET(self) -> None:
        self._sent = 0
        self.owner.sending += 1
        path = unquote(urlsplit(self.path).path)
        try:
            self._answer(path)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True
        finally:
            token = self.headers.get("authorization", "")
            self.owner.requests.append(Request(path, self.headers.get("range", ""), token, self._sent))
            self.owner.sending -= 1

    do_HEAD = do_GET  # noqa: N815

    def _answer(self, path: str) -> None:
        faults = self.owner.faults
        if faults.status:
            self._plain(faults.status, faults.headers)
            faults.times -= 1
            if faults.times == 0:
                faults.status = 0
            return
        if faults.endless in ("error", "head") or (faults.endless == "model" and path.startswith("/api/")):
            self._send_without_end(500 if faults.endless == "error" else 200, {})
        elif faults.endless in ("redirect", "file") and "/resolve/" in path:
            where = f"{self.owner.endpoint}{self.path}"
            self._send_without_end(
                *((302, {"Location": where}) if faults.endless == "redirect" else (200, {}))
            )
        elif faults.circle and "/resolve/" in path:
            self._plain(302, {"Location": f"{self.owner.endpoint}{self.path}"})
        elif path == "/api/models":
            self._search(parse_qs(urlsplit(self.path).query))
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?", path):
            self._model(match[1], match[2])
        elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self._resolve(match[1], match[2], match[3])
        elif match := re.fullmatch(r"/cdn/([^/]+/[^/]+)/(.+)", path):
            self._body(match[1], match[2])
        else:
            self._plain(404, {})

    def _search(self, query: dict[str, list[str]]) -> None:
        words = query.get("search", [""])[0].lower().split()
        found = [name for name in self.owner.repositories if all(word in name.lower() for word in words)]
        most = int(query.get("limit", ["1000"])[0])
        body = [
            {"id": name, "downloads": 1000 - place, "tags": self.owner.tags.get(name, []), "private": False}
            for place, name in enumerate(found[:most])
        ]
        body_bytes = self.owner.say_raw or json.dumps(body).encode()
        self._send(200, body_bytes, {"Content-Type": "application/json"})

    def _model(self, repository: str, revision: str | None) -> None:
        files = self.owner.repositories.get(repository)
        if files is None:
            self._plain(401, {"X-Error-Code": "RepoNotFound"})
            return
        if revision not in (None, "main", self.owner.commit):
            self._plain(404, {"X-Error-Code": "RevisionNotFound"})
            return
        siblings = []
        for name, data in files.items():
            entry: dict[str, Any] = {"rfilename": name, "size": len(data), "blobId": _blob(data)}
            if name.endswith((*WEIGHTS, ".bin")):
                entry["lfs"] = {
                    "size": len(data),
                    "sha256": hashlib.sha256(data).hexdigest(),
                    "pointerSize": 130,
                }
            siblings.append(entry)
        card = self.owner.card
        body = {
            "id": repository,
            "sha": self.owner.commit,
            "siblings": siblings,
            "cardData": card,
            "tags": [],
        }
        body_bytes = self.owner.say_raw or json.dumps({**body, **self.owner.say}).encode()
        self._send(200, body_bytes, {"Content-Type": "application/json"})

    def _resolve(self, repository: str, revision: str, name: str) -> None:
        data = self.owner.repositories.get(repository, {}).get(name)
        if self.owner.faults.gated:
            self._plain(401, {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access is restricted"})
        elif data is None or revision != self.owner.commit:
            self._plain(404, {"X-Error-Code": "EntryNotFound"})
        elif name.endswith(WEIGHTS):
            etag = hashlib.sha256(data).hexdigest()
            self._plain(
                302,
                {
                    "Location": f"{self.owner.storage}/cdn/{repository}/{name}?X-Signature=secret",
                    "X-Repo-Commit": self.owner.commit,
                    "X-Linked-Etag": f'"{etag}"',
                    "X-Linked-Size": str(len(data)),
                },
            )
        else:
            self._send(200, data, {"ETag": f'"{_blob(data)}"', "X-Repo-Commit": self.owner.commit})

    def _body(self, repository: str, name: str) -> None:
        faults = self.owner.faults
        data = self.owner.repositories[repository][name]
        if faults.alter == name:
            data = data[:-1] + bytes([data[-1] ^ 1])
        if faults.grow == name:
            data += b"x"
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("range", ""))
        if match is None or faults.ignore_ranges:
            begin, end, status = 0, len(data), 200
        else:
            begin, end, status = int(match[1]), int(match[2] or len(data) - 1) + 1, 206
        is_header = match is not None and match[2] != ""
        if faults.busy_headers and is_header:
            faults.busy_headers -= 1
            self._plain(503, {})
            return
        if faults.page and not is_header:
            self._send(200, faults.page, {"Content-Type": "text/html"})
            return
        if faults.busy and not is_header:
            faults.busy -= 1
            self._plain(503, {})
            return
        chosen = not is_header and faults.only in ("", name)
        if not is_header:
            self.owner.events.append(("requested", name))
        if faults.mute and chosen:
            self._keep_waiting(faults)
            return
        headers = {"Content-Length": str(end - begin)}
        if status == 206:
            headers["Content-Range"] = f"bytes {begin}-{end - 1}/{len(data)}"
        self._begin(status, headers)
        most = end
        failing = chosen and (faults.cuts > 0 or faults.stall)
        if failing:
            most = min(end, begin + faults.cut_after)
            faults.cuts -= faults.cuts > 0
        for start in range(begin, most, _PIECE):
            piece = data[start : min(start + _PIECE, most)]
            self.wfile.write(piece)
            self._sent += len(piece)
            if is_header:
                continue
            time.sleep(faults.pace_s)
            faults.reached -= len(piece)
            if faults.reached <= 0 and faults.at_reached is not None:
                call, faults.at_reached = faults.at_reached, None
                call()
        if failing and faults.stall:
            self.wfile.flush()
            self._keep_waiting(faults)
        if most < end:
            self.close_connection = True
        elif not is_header:
            self.owner.events.append(("sent", name))

    def _keep_waiting(self, faults: Faults) -> None:
        while faults is self.owner.faults:
            time.sleep(0.05)
        self.close_connection = True

    def _send_without_end(self, status: int, headers: dict[str, str]) -> None:
        faults = self.owner.faults
        self.close_connection = True
        if faults.endless == "head":
            self.wfile.write(b"HTTP/1.1 200 OK\r\nX-Slow: ")
        else:
            self._begin(status, {**headers, "Content-Type": "application/json", "Connection": "close"})
        while faults is self.owner.faults:
            piece = b" " if faults.pause_s else b'{"a":[[],"' + b"x" * _PIECE + b'"],'
            self.wfile.write(piece)
            self._sent += len(piece)
            time.sleep(faults.pause_s)

    def _plain(self, status: int, headers: dict[str, str]) -> None:
        self._send(status, b"", headers)

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        if self.owner.faults.coding:
            headers = {**headers, "Content-Encoding": self.owner.faults.coding}
        self._begin(status, {"Content-Length": str(len(body)), **headers})
        if self.command != "HEAD":
            self.wfile.write(body)
            self._sent += len(body)

    def _begin(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()


def _blob(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
