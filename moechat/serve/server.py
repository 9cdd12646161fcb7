"""Runs the application: sockets, signals, and the order of the end."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from moechat.errors import UsageError
from moechat.serve.app import make_app
from moechat.serve.counters import Counters
from moechat.serve.engine_routes import EngineRoutes
from moechat.serve.guard import MOST_HEADER_BYTES
from moechat.serve.machine_state import StateReader
from moechat.serve.offered_models import OfferedModels
from moechat.serve.settings import ServeSettings
from moechat.serve.state_feed import StateFeed
from moechat.serve.worker import Worker

# Seconds in which the headers of the first request of a connection have to arrive.
_HEADER_TIMEOUT_S = 10
_IDLE_CONNECTION_S = 75
_MOST_CONNECTIONS = 512
# Seconds for answers to be told that the server ends, which takes a token.
_GRACE_S = 5
_BACKLOG = 256
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class _PatientProtocol(H11Protocol):
    """Closes connections that send no request in time."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._headers_due = self.loop.call_later(_HEADER_TIMEOUT_S, self._close_silent)

    def _close_silent(self) -> None:
        if self.cycle is None and not self.transport.is_closing():
            self.transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        self._headers_due.cancel()
        super().connection_lost(error)


class _Uvicorn(uvicorn.Server):
    """Leaves signals to :class:`Server`."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Server:
    """A server that is about to run.

    Args:
        settings: Of the server.
        models: That it offers.
        first: The model that is loaded at once; ``None``: none.
        private: A socket for programs of the same user, which get the engine itself; ``None``: none.

    Raises:
        UsageError: The address cannot be used.
    """

    def __init__(
        self,
        settings: ServeSettings,
        models: OfferedModels,
        first: str | None,
        *,
        private: socket.socket | None = None,
    ) -> None:
        self.settings = settings
        self._first = first
        self._counters = Counters()
        self._error: Exception | None = None
        self._signal: int | None = None
        self._engine_routes = EngineRoutes(models)
        self._feed = StateFeed(StateReader(self._counters))
        self.worker = Worker(
            models,
            parallel=settings.parallel,
            queue=settings.queue,
            draft_tokens=settings.draft_tokens,
            keep_alive_s=settings.keep_alive_s,
            counters=self._counters,
            on_failed=self._on_failed,
            on_loaded=self._engine_routes.note_loaded,
            on_ready=models.note_ready,
            on_pause=self._feed.on_pause,
        )
        self._feed.attach(self.worker, self.worker.wake)
        self._socket = _listen(settings)
        config = uvicorn.Config(
            make_app(settings, self.worker, models.names, self._counters, self._feed, models.defaults),
            http=_PatientProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            h11_max_incomplete_event_size=MOST_HEADER_BYTES,
            timeout_keep_alive=_IDLE_CONNECTION_S,
            timeout_graceful_shutdown=_GRACE_S,
            limit_concurrency=_MOST_CONNECTIONS,
        )
        logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
        self._uvicorn = _Uvicorn(config)
        self._private = private
        self._private_uvicorn = _Uvicorn(
            uvicorn.Config(
                self._engine_routes.app(self.worker),
                http="h11",
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                timeout_graceful_shutdown=_GRACE_S,
            )
        )

    @property
    def url(self) -> str:
        """Where it listens."""
        host, port = self._socket.getsockname()[:2]
        return f"http://{f'[{host}]' if ':' in host else host}:{port}"

    def run(self, ready: Callable[[], None] = lambda: None) -> None:
        """Serve until a signal arrives.

        Args:
            ready: Called when requests are accepted; the model may still load.

        Raises:
            Exception: The first model cannot be loaded, or the thread that computes has failed.
            BaseException: What the handler of the signal raises that ended the server: for Ctrl-C
                KeyboardInterrupt. A second signal acts at once.
        """
        # A handler that raises would leave the event loop, and the clients, in the middle of something.
        handlers = {
            number: handler
            for number in _ENDING
            if (handler := signal.getsignal(number)) not in (signal.SIG_IGN, None)
        }
        try:
            asyncio.run(self._serve(ready, handlers))
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
            self._socket.close()
            self.worker.close()
        if self._error is not None:
            raise self._error
        if self._signal is not None:
            signal.raise_signal(self._signal)

    async def _serve(self, ready: Callable[[], None], handlers: Mapping[signal.Signals, Any]) -> None:
        loop = asyncio.get_running_loop()

        def end(number: int) -> None:
            self._signal = number
            self._uvicorn.should_exit = True
            for each, handler in handlers.items():
                loop.remove_signal_handler(each)
                signal.signal(each, handler)

        for number in handlers:
            loop.add_signal_handler(number, end, number)
        self.worker.start(self._first)
        serving = asyncio.ensure_future(self._uvicorn.serve([self._socket]))
        serving_privately = asyncio.ensure_future(self._serve_privately())
        while not self._uvicorn.started and not serving.done():
            await asyncio.sleep(0.01)
        if not serving.done():
            ready()
        while not self._uvicorn.should_exit and not serving.done():
            await asyncio.sleep(0.1)
        self._feed.close()
        # Answers end before the connections do, so that clients are told.
        await asyncio.to_thread(self.worker.close, _GRACE_S)
        self._private_uvicorn.should_exit = True
        await serving
        await serving_privately

    async def _serve_privately(self) -> None:
        if self._private is not None:
            await self._private_uvicorn.serve([self._private])

    def _on_failed(self, error: Exception) -> None:
        self._error = error
        self._uvicorn.should_exit = True


def _listen(settings: ServeSettings) -> socket.socket:
    try:
        found = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, kind, protocol, _, address = found[0]
        listening = socket.socket(family, kind, protocol)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(address)
            listening.listen(_BACKLOG)
        except BaseException:
            listening.close()
            raise
    except OSError as error:
        raise UsageError(
            f"cannot listen on {settings.host} port {settings.port}: {error.strerror or error}",
            hint="another program may use the port; --port chooses another one",
        ) from error
    return listening
