"""Writes several files at a time in threads, and reports progress in the thread that waits for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from queue import SimpleQueue
from threading import Event, Lock, Thread
from typing import TypeVar

File = TypeVar("File")
# Bytes, stage, detail.
Advance = Callable[[int, str, str], None]


class _Stopped(Exception):  # noqa: N818 - no error
    """Ends the work on a file."""


def write_side_by_side(
    files: Iterable[File], write: Callable[[File, Advance], None], advance: Advance, threads: int
) -> None:
    """Write files in threads; they are begun in their order.

    Args:
        files: The files.
        write: Writes one, in a thread. It calls the function that it is given after each piece, from that
            thread; the call raises an exception, which it must let pass, if the work is to end.
        advance: Called from this thread with the arguments of those calls. It may raise.
        threads: Number of files that are written at a time.

    Raises:
        BaseException: The first failure of ``write``, or that of ``advance``. All threads have ended then:
            they stop at their next piece and begin no other file.
    """
    remaining, taking = iter(files), Lock()
    stop = Event()
    # None: a thread has ended.
    events: SimpleQueue[tuple[int, str, str] | BaseException | None] = SimpleQueue()

    def progressed(size: int, stage: str, detail: str) -> None:
        if stop.is_set():
            raise _Stopped
        events.put((size, stage, detail))

    def work() -> None:
        try:
            while not stop.is_set():
                with taking:
                    file = next(remaining, None)
                if file is None:
                    return
                write(file, progressed)
        except _Stopped:
            pass
        except BaseException as problem:
            stop.set()
            events.put(problem)
        finally:
            events.put(None)

    workers = [Thread(target=work, name=f"moechat-file-{number}", daemon=True) for number in range(threads)]
    try:
        for worker in workers:
            worker.start()
        for _ in workers:
            while (event := events.get()) is not None:
                if isinstance(event, BaseException):
                    raise event
                advance(*event)
    finally:
        stop.set()
        for worker in workers:
            if worker.ident is not None:
                worker.join()
