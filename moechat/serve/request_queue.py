"""What waits for the thread that computes: requests in their order, and functions to call in between."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

from moechat.serve.jobs import Job, ServerBusyError, ServerClosingError

_Owned = TypeVar("_Owned")
_R = TypeVar("_R")


class RequestQueue(Generic[_Owned]):
    """Requests and calls for one thread, from any thread.

    Calls get what the thread owns, which is their type parameter.

    Args:
        most: Most requests that wait.

    Attributes:
        closing: The server ends: nothing more is taken.
    """

    # Invariant: all is guarded by _changed. Only the thread that computes takes requests and calls out.
    def __init__(self, most: int) -> None:
        self.closing = False
        self._most = most
        self._changed = threading.Condition()
        self._jobs: deque[Job] = deque()
        self._calls: deque[tuple[Future[Any], Callable[[_Owned], Any]]] = deque()
        self._woken = False

    def __len__(self) -> int:
        return len(self._jobs)

    # ---- for other threads

    def submit(self, job: Job, *, free: int) -> None:
        """Add a request.

        Args:
            job: The request.
            free: Requests that can begin at once, which do not really wait.

        Raises:
            ServerBusyError: The queue is full.
            ServerClosingError: The server ends.
        """
        with self._changed:
            self._require_open()
            self._jobs = deque(job for job in self._jobs if not job.cancelled)
            if len(self._jobs) >= self._most + free:
                raise ServerBusyError(
                    f"{len(self._jobs)} requests are waiting, which is the limit",
                    hint="try again later, or start the server with a longer --queue",
                )
            self._jobs.append(job)
            self._changed.notify()

    def call(self, function: Callable[[_Owned], _R]) -> Future[_R]:
        """Have a function called.

        Raises:
            ServerClosingError: The server ends.
        """
        future: Future[_R] = Future()
        with self._changed:
            self._require_open()
            self._calls.append((future, function))
            self._changed.notify()
        return future

    def wake(self) -> None:
        """End :meth:`wait`."""
        with self._changed:
            self._woken = True
            self._changed.notify()

    def close(self) -> None:
        """Take nothing more."""
        with self._changed:
            self.closing = True
            self._changed.notify()

    def _require_open(self) -> None:
        if self.closing:
            raise ServerClosingError("the server is shutting down")

    # ---- for the thread that computes

    def head(self) -> Job | None:
        """The first request that somebody still waits for; it stays in the queue."""
        with self._changed:
            while self._jobs and self._jobs[0].cancelled:
                self._jobs.popleft()
            return self._jobs[0] if self._jobs else None

    def take(self, job: Job) -> None:
        """Remove a request if it is still the first."""
        with self._changed:
            if self._jobs and self._jobs[0] is job:
                self._jobs.popleft()

    def answer_calls(self, owned: _Owned) -> None:
        """Call all functions that wait."""
        while self._calls:
            with self._changed:
                future, function = self._calls.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(function(owned))
            except Exception as error:
                future.set_exception(error)

    def wait(self, timeout_s: float | None) -> bool:
        """Wait until there is something to do.

        Returns:
            Whether there is: a request, a call, or the end; else somebody called :meth:`wake`, or the time is
            over.
        """
        with self._changed:
            if not (self._some_work() or self._woken):
                self._changed.wait(timeout_s)
            self._woken = False
            return self._some_work()

    def end(self, reason: Exception) -> list[Job]:
        """Close, and refuse all calls; returns the requests that still waited."""
        with self._changed:
            self.closing = True
            jobs, self._jobs = list(self._jobs), deque()
            calls, self._calls = list(self._calls), deque()
        for future, _ in calls:
            if future.set_running_or_notify_cancel():
                future.set_exception(reason)
        return jobs

    def _some_work(self) -> bool:
        return bool(self.closing or self._jobs or self._calls)
