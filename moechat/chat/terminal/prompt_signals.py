"""Signals that end the program while prompt_toolkit reads a line."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from prompt_toolkit.application import Application

_ENDING = (signal.SIGTERM, signal.SIGHUP)


@contextmanager
def raising_after(application: Application[Any]) -> Iterator[None]:
    """Within, SIGTERM and SIGHUP end the application; their own handlers run when its event loop has ended.

    A handler that raises does so wherever the loop is. asyncio would give what is raised in a callback to the
    loop's exception handler, and prompt_toolkit's prints it and waits for Enter. A second signal of a kind
    goes to its own handler at once. Ignored signals stay ignored.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: handler for number in _ENDING if callable(handler := signal.getsignal(number))}
    received: list[int] = []

    def receive(number: int, _frame: FrameType | None) -> None:
        received.append(number)
        signal.signal(number, before[signal.Signals(number)])
        loop = application.loop
        if loop is not None:
            with suppress(RuntimeError):  # the loop is closed already
                loop.call_soon_threadsafe(end)

    def end() -> None:
        if received and application.future is not None and not application.future.done():
            application.exit(exception=EOFError)

    application.pre_run_callables.append(end)  # for a signal before the loop is there
    try:
        for number in before:
            signal.signal(number, receive)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if received:
            signal.raise_signal(received[0])
