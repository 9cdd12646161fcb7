"""Ends a transfer from another thread, where it waits for bytes as well."""

from __future__ import annotations

import socket
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any
from weakref import WeakSet


class Stopped(BaseException):
    """A transfer was told to stop; what has come is kept. No ``Exception``: nobody is to try again."""


class StopSwitch:
    """Tells transfers to stop, for good.

    A transfer asks :meth:`check` before all that it writes. So after :meth:`stop` it writes one piece more at
    most; while it looks up a host or connects it cannot be woken, and ends when that does.

    Invariant: each socket in ``_sockets`` is shut down by the time ``stop`` has returned, and each that is
    added later is shut down at once; so nobody goes on waiting for bytes of one.
    """

    def __init__(self) -> None:
        self._stopped = threading.Event()
        self._sockets: WeakSet[socket.socket] = WeakSet()
        self._guard = threading.Lock()  # of the set: a thread may add to it while another goes through it

    def stop(self) -> None:
        """Stop whoever uses this switch; from any thread."""
        with self._guard:
            self._stopped.set()
            for connection in list(self._sockets):
                _shut_down(connection)

    def check(self) -> None:
        """Go on?

        Raises:
            Stopped: No.
        """
        if self._stopped.is_set():
            raise Stopped

    def sleep(self, seconds: float) -> None:
        """Wait.

        Raises:
            Stopped: Before the time was over.
        """
        if self._stopped.wait(seconds):
            raise Stopped

    def watch(self, stream: Any) -> None:
        """Know the socket of one of the HTTP client's network streams."""
        connection = stream.get_extra_info("socket") if stream is not None else None
        if not isinstance(connection, socket.socket):
            return
        with self._guard:
            self._sockets.add(connection)
            if self._stopped.is_set():
                _shut_down(connection)

    def trace(self, event: str, info: Mapping[str, Any]) -> None:
        """The HTTP client's ``trace`` extension: know each connection from when there is one."""
        if event.endswith((".connect_tcp.complete", ".start_tls.complete")):
            self.watch(info.get("return_value"))


def _shut_down(connection: socket.socket) -> None:
    # Closing it would wake nobody. The method of a TLS socket would forget its state, which its reader needs.
    with suppress(OSError):
        socket.socket.shutdown(connection, socket.SHUT_RDWR)
