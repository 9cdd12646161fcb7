"""Stops transfers from another thread, even while they wait for bytes."""

from __future__ import annotations

import socket
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any
from weakref import WeakSet


class TransferStopped(BaseException):
    """A transfer was stopped; its bytes are kept. Not an ``Exception``, so that it is never retried."""


class StopSwitch:
    """Stops all transfers that use it, permanently.

    Transfers call :meth:`check` before every write. So after :meth:`stop` a transfer writes at most one more
    piece. A name lookup or a connection attempt cannot be interrupted; the transfer ends after it.

    Invariant: when ``stop`` has returned, each socket in ``_sockets`` is shut down, and each one added later
        is
    shut down at once; so no thread keeps waiting for bytes.
    """

    def __init__(self) -> None:
        self._stopped = threading.Event()
        self._sockets: WeakSet[socket.socket] = WeakSet()
        self._lock = threading.Lock()  # of _sockets

    def stop(self) -> None:
        """Stop all transfers; may be called from any thread."""
        with self._lock:
            self._stopped.set()
            for connection in list(self._sockets):
                shut_down(connection)

    def check(self) -> None:
        """Do nothing unless stopped.

        Raises:
            TransferStopped: :meth:`stop` was called.
        """
        if self._stopped.is_set():
            raise TransferStopped

    def sleep(self, seconds: float) -> None:
        """Sleep.

        Raises:
            TransferStopped: :meth:`stop` was called before the end.
        """
        if self._stopped.wait(seconds):
            raise TransferStopped

    def watch(self, stream: Any) -> None:
        """Register the socket of a network stream of the HTTP client."""
        connection = stream.get_extra_info("socket") if stream is not None else None
        if not isinstance(connection, socket.socket):
            return
        with self._lock:
            self._sockets.add(connection)
            if self._stopped.is_set():
                shut_down(connection)

    def trace(self, event: str, info: Mapping[str, Any]) -> None:
        """Register each new connection; the HTTP client's ``trace`` extension."""
        if event.endswith((".connect_tcp.complete", ".start_tls.complete")):
            self.watch(info.get("return_value"))


def shut_down(connection: socket.socket) -> None:
    """Shut a connection down: threads that wait for its bytes return at once."""
    # close() does not wake a reader, and SSLSocket.shutdown() drops the state that the reader still needs.
    with suppress(OSError):
        socket.socket.shutdown(connection, socket.SHUT_RDWR)
