"""Handlers for Ctrl-C and for continuing after Ctrl-Z."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import FrameType


@contextmanager
def when_continued(action: Callable[[], None]) -> Iterator[None]:
    """In this context, call ``action`` whenever the program continues after a stop (Ctrl-Z, fg).

    Args:
        action: Called after the previous handler, inside a signal handler, so it must be short.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGCONT)

    def handler(number: int, frame: FrameType | None) -> None:
        if callable(before):
            before(number, frame)
        action()

    signal.signal(signal.SIGCONT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGCONT, before)


def no_more_interrupts() -> None:
    """Ignore Ctrl-C from now on, for short final work that must complete."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ignore Ctrl-C in this context."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class OneInterrupt:
    """Raises ``KeyboardInterrupt`` on the first Ctrl-C, ignores further ones, so that clean-up completes."""

    def over(self) -> None:
        """Ignore Ctrl-C from now on: only short work is left."""
        no_more_interrupts()

    def _first(self, number: int, frame: FrameType | None) -> None:
        self.over()
        raise KeyboardInterrupt

    @contextmanager
    def watching(self) -> Iterator[OneInterrupt]:
        """Handle Ctrl-C in this context, which covers an answer and its recording."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        before = signal.signal(signal.SIGINT, self._first)
        try:
            yield self
        finally:
            signal.signal(signal.SIGINT, before)
