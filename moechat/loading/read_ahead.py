"""Shards come in a thread of their own while others are converted; the caller's thread hears of it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Self, TypeVar

from moechat.store.supply import ShardSource

# Enough for what was being written when it was told to stop.
_STOPS_WITHIN_S = 1.0

T = TypeVar("T")


class Background:
    """Runs one call at a time in a thread; a context manager, so that none is left behind.

    Invariants:
        There is at most one thread; it runs ``_call``, and only while ``_thread`` is set.
        The thread calls nothing of its owner's but that: what it reports lies in ``_reports`` until the owner
        listens. So reports are made in the owner's thread, may raise there, and end when the owner leaves.
        ``_error`` is what the last call has raised, known to the owner once it has heard that the call ended.

    A thread that looks up a host or connects cannot be woken: it is given a second, and as a daemon it does
    not hold up the end of the process. Being stopped, it writes nothing more.
    """

    def __init__(self, stop: Callable[[], None]) -> None:
        """Nothing runs yet.

        Args:
            stop: Makes a call that runs end soon, by raising.
        """
        self._stop = stop
        self._reports: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        if self._thread is not None:
            self._stop()
            with suppress(RuntimeError):  # an interrupt came before it was started
                self._thread.join(_STOPS_WITHIN_S)

    def relayed(self, report: Callable[[T], None]) -> Callable[[T], None]:
        """The same report for calls that run here."""
        return lambda value: self._reports.put(lambda: report(value))

    def begin(self, call: Callable[[], None]) -> None:
        """Run a call, once the one before has ended.

        Raises:
            BaseException: What the one before has raised.
        """
        self.wait()
        self._thread = threading.Thread(target=self._run, args=(call,), name="moechat-fetch", daemon=True)
        self._thread.start()

    def listen(self) -> None:
        """Make the reports that are due; raises what they raise."""
        while not self._reports.empty():
            self._reports.get()()

    def wait(self) -> None:
        """Make reports until the call has ended.

        Raises:
            BaseException: What it has raised, or a report raises.
        """
        while self._thread is not None:
            self._reports.get()()
        self.check()

    def check(self) -> None:
        """Find out whether the call has failed.

        Raises:
            BaseException: What it has raised.
        """
        self.listen()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self, call: Callable[[], None]) -> None:
        error: BaseException | None = None
        try:
            call()
        except BaseException as problem:
            error = problem
        self._reports.put(lambda: self._ended(error))

    def _ended(self, error: BaseException | None) -> None:
        assert self._thread is not None
        self._thread.join()
        self._thread, self._error = None, error


class ReadAhead:
    """A source of shards that begins with the next one before it is needed.

    Invariant: of the shards that nobody has asked for yet at most one comes or is here, ``_coming``; so the
    disk holds at most one more than without. There is one connection at a time.
    """

    def __init__(
        self, source: ShardSource, background: Background, waits_for: Callable[[str], None], *, ahead: bool
    ) -> None:
        """Nothing comes yet.

        Args:
            source: Brings shards, in the background's thread.
            background: Of this source alone.
            waits_for: Called with the name of a shard before it is waited for.
            ahead: ``False``: shards come only when they are asked for.
        """
        self._source = source
        self._background = background
        self._waits_for = waits_for
        self._ahead = ahead
        self._coming: str | None = None
        self._path: Path | None = None

    def fetch(self, name: str) -> Path:
        """See :class:`ShardSource`; raises what the source raises."""
        self._waits_for(name)
        if self._coming != name:
            self._begin(name)
        self._background.wait()
        self._coming = None
        assert self._path is not None
        return self._path

    def expect(self, name: str | None) -> None:
        """See :class:`ShardSource`."""
        if self._coming is not None:
            self._background.check()
        elif self._ahead and name is not None:
            self._begin(name)

    def discard(self, name: str) -> None:
        """See :class:`ShardSource`."""
        self._source.discard(name)

    def _begin(self, name: str) -> None:
        def bring() -> None:
            self._path = self._source.fetch(name)

        self._background.begin(bring)
        self._coming = name
