"""Carries states of the machine from the thread that computes to the clients that follow them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from moechat.serve import sse
from moechat.serve.api_errors import ApiError
from moechat.serve.guard import log
from moechat.serve.machine_state import MachineState, StateReader, WorkerFacts, outline

MOST_LISTENERS = 8
# Seconds between two states.
_LEAST_GAP_S = 0.2
# Seconds for which a new client takes a state that others got.
_FRESH_S = 1.0
# Seconds that a request waits for the thread that computes, which may be in a long part of a prompt.
_PATIENCE_S = 1.0
# Seconds between signs of life in a stream that has nothing to send.
_SIGN_OF_LIFE_S = 10.0


class _Listener:
    """Holds the newest state for one client, so that a slow one misses states and fills no memory."""

    def __init__(self) -> None:
        self.changed = asyncio.Event()
        self.state: MachineState | None = None

    def put(self, state: MachineState | None) -> None:
        self.state = state
        self.changed.set()

    async def take(self, seconds: float) -> MachineState | None:
        """The next state; ``None``: the feed has ended.

        Raises:
            TimeoutError: There was none for so long.
        """
        await asyncio.wait_for(self.changed.wait(), seconds)
        self.changed.clear()
        return self.state


class StateFeed:
    """States of the machine, read only while somebody wants them, and at most five a second.

    Args:
        reader: Makes states.
    """

    # _listeners changes in the event loop only; the other thread looks whether there are any.
    def __init__(self, reader: StateReader) -> None:
        self._reader = reader
        self._listeners: set[_Listener] = set()
        self._followers = 0
        self._read_at = 0.0
        self._last: MachineState | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False
        self._wake: Callable[[], None] = lambda: None
        self._facts: WorkerFacts | None = None

    # ---- in the thread that computes

    def on_pause(self, worker: WorkerFacts) -> float | None:
        """Between tokens: read a state if somebody wants one.

        Returns:
            Seconds until the next one may be read; ``None``: it was read, or nobody wants one.
        """
        now = time.monotonic()
        if not self._listeners or self._loop is None:
            return None
        if now - self._read_at < _LEAST_GAP_S:
            return self._read_at + _LEAST_GAP_S - now
        self._read_at = now
        try:
            state = self._reader.read(worker)
        except Exception:  # answers go on without it
            log.exception("the state cannot be read")
            return None
        try:
            self._loop.call_soon_threadsafe(self._publish, state)
        except RuntimeError:  # the loop is closed: nobody listens any more
            self._listeners = set()
        return None

    # ---- in the event loop

    def attach(self, facts: WorkerFacts, wake: Callable[[], None]) -> None:
        """Connect the worker.

        Args:
            facts: Facts that any thread may read.
            wake: Lets an idle worker call :meth:`on_pause` soon.
        """
        self._facts, self._wake = facts, wake

    def close(self) -> None:
        """End all streams."""
        self._closed = True
        for listener in self._listeners:
            listener.put(None)

    async def now(self) -> MachineState:
        """The state, at most a fifth of a second old. If the thread computes for longer than a second, the
        last one that there was.
        """
        assert self._facts is not None
        if self._last is not None and time.monotonic() - self._read_at < _LEAST_GAP_S:
            return self._last
        listener = self._add()
        try:
            self._wake()
            found = await listener.take(_PATIENCE_S)
        except TimeoutError:
            found = self._last
        finally:
            self._listeners.discard(listener)
        return outline(self._facts) if found is None else found

    async def follow(self) -> AsyncIterator[MachineState | None]:
        """States as they come; ``None``: none for some seconds."""
        listener = self._add()
        if self._last is not None and time.monotonic() - self._read_at < _FRESH_S:
            listener.put(self._last)
        try:
            self._wake()
            while not self._closed:
                try:
                    state = await listener.take(_SIGN_OF_LIFE_S)
                except TimeoutError:
                    yield None
                    continue
                if state is not None:
                    yield state
        finally:
            self._listeners.discard(listener)

    def _add(self) -> _Listener:
        self._loop = asyncio.get_running_loop()
        listener = _Listener()
        self._listeners.add(listener)
        return listener

    def _publish(self, state: MachineState) -> None:
        self._last = state
        for listener in self._listeners:
            listener.put(state)

    # ---- handlers

    async def get(self, request: Request) -> Response:
        """``GET /moechat/state``: see :class:`moechat.serve.machine_state.MachineState`."""
        return JSONResponse((await self.now()).to_json())

    async def stream(self, request: Request) -> Response:
        """``GET /moechat/state/stream``: the same as events, whenever it changes, at most five a second.

        Raises:
            ApiError: Eight clients follow already.
        """
        if self._followers >= MOST_LISTENERS:
            raise ApiError(
                429, f"{MOST_LISTENERS} clients follow the state already", kind="server_error", code="busy"
            )
        self._followers += 1
        return _Following(self._events(), self._left)

    def _left(self) -> None:
        self._followers -= 1

    async def _events(self) -> AsyncIterator[bytes]:
        before: MachineState | None = None
        sent_at = time.monotonic()
        async for state in self.follow():
            if state is None or (before is not None and replace(state, at=before.at) == before):
                if time.monotonic() - sent_at >= _SIGN_OF_LIFE_S:
                    sent_at = time.monotonic()
                    yield sse.comment("nothing new")
                continue
            same_map = before is not None and before.map == state.map
            before, sent_at = state, time.monotonic()
            yield sse.event((replace(state, map=None) if same_map else state).to_json())


class _Following(StreamingResponse):
    """A stream that tells when it ends, however that happens."""

    def __init__(self, events: AsyncIterator[bytes], ended: Callable[[], None]) -> None:
        super().__init__(events, media_type="text/event-stream", headers=sse.HEADERS)
        self._events = events
        self._ended = ended

    async def __call__(self, *asgi: object) -> None:
        try:
            await super().__call__(*asgi)  # type: ignore[arg-type]
        finally:
            self._ended()
