"""Prefetches shards in a background thread while others are converted."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Self, TypeVar

from moechat.store.shard_supply import FetchedShard, ShardSource

# Enough for the write in progress when the thread is stopped.
_STOP_WAIT_S = 1.0

T = TypeVar("T")


class BackgroundCall:
    """Runs one call at a time in a thread; a context manager that stops the thread at its end.

    Invariants:
        There is at most one thread; ``_thread`` is set from its start until the owner has processed its end.
        Callbacks of the call wait in ``_callbacks`` until the owner runs them. So they run in the owner's
        thread, may raise there, and none runs after the owner left the context. ``_error`` is the exception
        of the last call, set when the owner processes its end.

    A name lookup or a connection attempt cannot be interrupted: the owner waits a second, and the daemon
        thread
    does not delay the end of the process. A stopped thread writes nothing more.
    """

    def __init__(self, stop: Callable[[], None]) -> None:
        """Create without starting a thread.

        Args:
            stop: Makes a running call raise soon.
        """
        self._stop = stop
        self._callbacks: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        if self._thread is not None:
            self._stop()
            with suppress(RuntimeError):  # not started, because of an interrupt
                self._thread.join(_STOP_WAIT_S)

    def in_owner_thread(self, callback: Callable[[T], None]) -> Callable[[T], None]:
        """A function for the call to use that makes the owner run the callback."""
        return lambda value: self._callbacks.put(lambda: callback(value))

    def start(self, call: Callable[[], None]) -> None:
        """Start a call, after the previous one.

        Raises:
            BaseException: Of the previous call.
        """
        self.wait()
        self._thread = threading.Thread(target=self._run, args=(call,), name="moechat-fetch", daemon=True)
        self._thread.start()

    def run_callbacks(self) -> None:
        """Run waiting callbacks; raises their exceptions."""
        while not self._callbacks.empty():
            self._callbacks.get()()

    def wait(self) -> None:
        """Run callbacks until the call has ended.

        Raises:
            BaseException: Of the call, or of a callback.
        """
        while self._thread is not None:
            self._callbacks.get()()
        self.check()

    def check(self) -> None:
        """Raise the exception of the call, if it has failed.

        Raises:
            BaseException: Of the call.
        """
        self.run_callbacks()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self, call: Callable[[], None]) -> None:
        error: BaseException | None = None
        try:
            call()
        except BaseException as problem:
            error = problem
        self._callbacks.put(lambda: self._ended(error))

    def _ended(self, error: BaseException | None) -> None:
        assert self._thread is not None
        self._thread.join()
        self._thread, self._error = None, error


class PrefetchingSource:
    """A source of shards that starts fetching the next one before it is needed.

    Invariant: at most one shard, ``_prefetched``, is being fetched or present ahead of its use; so the disk
        holds
    at most one shard more than without. There is one connection at a time.
    """

    def __init__(
        self,
        source: ShardSource,
        background: BackgroundCall,
        on_wait: Callable[[str], None],
        *,
        ahead: bool,
    ) -> None:
        """Create without fetching.

        Args:
            source: Fetches shards; called in the background thread.
            background: Used by this source alone.
            on_wait: Receives the name of a shard before waiting for it.
            ahead: ``False`` fetches shards only when they are needed.
        """
        self._source = source
        self._background = background
        self._on_wait = on_wait
        self._ahead = ahead
        self._prefetched: str | None = None
        self._fetched: FetchedShard | None = None

    def fetch(self, name: str) -> FetchedShard:
        """See :class:`ShardSource`; raises the exceptions of the source."""
        self._on_wait(name)
        if self._prefetched != name:
            self._start(name)
        self._background.wait()
        self._prefetched = None
        assert self._fetched is not None
        return self._fetched

    def expect(self, name: str | None) -> None:
        """See :class:`ShardSource`."""
        if self._prefetched is not None:
            self._background.check()
        elif self._ahead and name is not None:
            self._start(name)

    def discard(self, name: str) -> None:
        """See :class:`ShardSource`."""
        self._source.discard(name)

    def _start(self, name: str) -> None:
        def fetch() -> None:
            self._fetched = self._source.fetch(name)

        self._background.start(fetch)
        self._prefetched = name
