"""Which servers of this user run: a small file for each, which its server removes at its end."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from moechat.atomic_file import replacing
from moechat.config import user_paths
from moechat.serve.private_socket import remove_temporary

_MOST_BYTES = 1 << 16
# Seconds by which two readings of a process's start may differ.
_SAME_START_S = 2.0


@dataclass(frozen=True)
class RunningServer:
    """A server.

    Attributes:
        pid: Of its process.
        url: Its address, without a path.
        model: As it was named at the start; empty: all of the library.
        started: When its process started, in seconds since 1970; tells it from later ones with its number.
        socket: Path of the socket through which programs of this user can use its engine; empty: none.
    """

    pid: int
    url: str
    model: str
    started: float
    socket: str = ""

    @property
    def lives(self) -> bool:
        """Whether its process still runs."""
        try:
            process = psutil.Process(self.pid)
            started = float(process.create_time())
            ended = process.status() == psutil.STATUS_ZOMBIE  # its parent has not asked for its status yet
        except psutil.Error:
            return False
        return not ended and abs(started - self.started) < _SAME_START_S


@contextmanager
def registered(url: str, model: str | None, socket: str = "") -> Iterator[None]:
    """List this process as a server, until the end of the block; see :class:`RunningServer`.

    A directory that cannot be written is no error: the server is only not listed then.
    """
    process = psutil.Process()
    server = RunningServer(process.pid, url, model or "", process.create_time(), socket)
    path = servers_directory() / f"{server.pid}.json"
    with suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with replacing(path, mode=0o600) as file:
            file.write(json.dumps(asdict(server)).encode())
    try:
        yield
    finally:
        with suppress(OSError):
            path.unlink()


def running_servers() -> list[RunningServer]:
    """All servers of this user that run, the oldest first; what others have left there is removed."""
    found = []
    for path in sorted(servers_directory().glob("*.json")):
        server = _read(path)
        if server is not None and server.lives:
            found.append(server)
        else:
            for left in (path, path.with_suffix(".sock")):
                with suppress(OSError):
                    left.unlink()
            if server is not None:
                remove_temporary(server.socket)
    return sorted(found, key=lambda server: server.started)


def _read(path: Path) -> RunningServer | None:
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW)) as file:
            values = json.loads(file.read(_MOST_BYTES))
        server = RunningServer(
            int(values["pid"]),
            str(values["url"]),
            str(values["model"]),
            float(values["started"]),
            str(values.get("socket", "")),
        )
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return server if server.pid > 1 else None


def servers_directory() -> Path:
    """Where the files and sockets of this user's servers are."""
    return user_paths().state / "servers"
