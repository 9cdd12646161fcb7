"""Signals while an answer comes, and while what must not be cut short is done."""

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
    """Meanwhile something is done whenever the program goes on after it was stopped (Ctrl-Z, fg).

    Args:
        action: It, after what others do then; in a handler of signals, so it must be short.
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
    """From now on Ctrl-C does nothing: what is left is short, and must come out whole."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Meanwhile Ctrl-C does nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class OneInterrupt:
    """Lets the first Ctrl-C interrupt; what follows it is short, and comes out whole."""

    def over(self) -> None:
        """From now on none interrupts: nothing is left that takes long."""
        no_more_interrupts()

    def _first(self, number: int, frame: FrameType | None) -> None:
        self.over()
        raise KeyboardInterrupt

    @contextmanager
    def watching(self) -> Iterator[OneInterrupt]:
        """For as long as an answer and what belongs to it take."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        before = signal.signal(signal.SIGINT, self._first)
        try:
            yield self
        finally:
            signal.signal(signal.SIGINT, before)
