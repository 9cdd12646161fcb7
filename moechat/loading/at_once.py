"""The same call for many things, a few at a time, in threads that do not hold up the end of the program."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")

# Enough for those that can be woken.
_STOPS_WITHIN_S = 1.0


def at_once(
    call: Callable[[T], R], things: Iterable[T], *, threads: int, stop: Callable[[], None]
) -> list[R]:
    """Call for each, and wait for all.

    Args:
        call: Runs in several threads.
        things: What it is called with.
        threads: How many at most.
        stop: Makes the calls that run end soon, by raising. A thread that looks up a host or connects cannot
            be woken: it is given a second, and as a daemon it does not hold up the end of the process.

    Returns:
        What the calls return, in the order of the things.

    Raises:
        BaseException: What the first call that failed has raised; the others have been stopped.
    """
    waiting: SimpleQueue[tuple[int, T]] = SimpleQueue()
    done: SimpleQueue[tuple[int, R] | BaseException] = SimpleQueue()
    count = 0
    for thing in things:
        waiting.put((count, thing))
        count += 1

    def work() -> None:
        with suppress(Empty):
            while True:
                place, thing = waiting.get_nowait()
                try:
                    done.put((place, call(thing)))
                except BaseException as problem:
                    done.put(problem)
                    return

    workers = [
        threading.Thread(target=work, name="moechat-read", daemon=True) for _ in range(min(threads, count))
    ]
    found: dict[int, R] = {}
    try:
        for worker in workers:
            worker.start()
        while len(found) < count:
            outcome = done.get()
            if isinstance(outcome, BaseException):
                raise outcome
            found[outcome[0]] = outcome[1]
    except BaseException:
        with suppress(Empty):
            while True:
                waiting.get_nowait()
        stop()
        raise
    finally:
        latest = time.monotonic() + _STOPS_WITHIN_S
        for worker in workers:
            with suppress(RuntimeError):  # an interrupt came before it was started
                worker.join(max(0.0, latest - time.monotonic()))
    return [found[place] for place in range(count)]
