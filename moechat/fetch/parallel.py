"""A parallel map over threads that never delay the end of the process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")

STOP_WAIT_S = 1.0


def map_in_threads(
    call: Callable[[T], R], items: Iterable[T], *, threads: int, stop: Callable[[], None]
) -> list[R]:
    """Call a function for each item in several threads, and wait for all results.

    Unlike a ``ThreadPoolExecutor`` it uses daemon threads and abandons them after :data:`STOP_WAIT_S`: a name
    lookup or a connection attempt cannot be interrupted, and must not delay Ctrl-C.

    Args:
        call: The function.
        items: Its arguments.
        threads: Most threads to use.
        stop: Makes running calls raise soon.

    Returns:
        The results, in the order of the items.

    Raises:
        BaseException: Of the first call that failed; the others are stopped.
    """
    waiting: SimpleQueue[tuple[int, T]] = SimpleQueue()
    done: SimpleQueue[tuple[int, R] | BaseException] = SimpleQueue()
    count = 0
    for item in items:
        waiting.put((count, item))
        count += 1

    def work() -> None:
        with suppress(Empty):
            while True:
                index, item = waiting.get_nowait()
                try:
                    done.put((index, call(item)))
                except BaseException as problem:
                    done.put(problem)
                    return

    workers = [
        threading.Thread(target=work, name="moechat-read", daemon=True) for _ in range(min(threads, count))
    ]
    results: dict[int, R] = {}
    try:
        for worker in workers:
            worker.start()
        while len(results) < count:
            outcome = done.get()
            if isinstance(outcome, BaseException):
                raise outcome
            results[outcome[0]] = outcome[1]
    except BaseException:
        with suppress(Empty):
            while True:
                waiting.get_nowait()
        stop()
        raise
    finally:
        deadline = time.monotonic() + STOP_WAIT_S
        for worker in workers:
            with suppress(RuntimeError):  # not started, because of an interrupt
                worker.join(max(0.0, deadline - time.monotonic()))
    return [results[index] for index in range(count)]
