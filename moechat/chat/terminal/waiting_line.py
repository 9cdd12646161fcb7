"""What is awaited before an answer has begun: one dim line on a terminal, gone before the first text."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from moechat.chat.output import DIM, NORMAL, Sink

# Quick answers show nothing at all.
_FIRST_AFTER_S, _REDRAW_EVERY_S = 0.5, 0.25
_ERASE = "\r\x1b[K"


class Waiting:
    """Says how far the prompt is read, and then how long the model has been busy.

    Args:
        stream: A terminal that can redraw a line; the cursor stands at the beginning of an empty one.
        shown: Whether anything is said.
        then: What the model does when the prompt is read: ``thinking``.
    """

    # Invariant: under _lock the line is on the screen if and only if _line is not empty; after over() it is
    # never drawn again. Counts are written by the thread that computes and read by the one that draws.
    def __init__(self, stream: TextIO, *, shown: bool, then: str) -> None:
        self._stream = stream
        self._shown = shown
        self._then = then
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._line = ""
        self._read = self._tokens = 0
        self._started = time.monotonic()

    def start(self) -> None:
        """From now on somebody waits."""
        self._started = time.monotonic()
        if self._shown:
            threading.Thread(target=self._draw_until_over, name="moechat-waiting", daemon=True).start()

    def progress(self, read: int, tokens: int) -> None:
        """Take how far it is, as the engine's ``generate`` tells it.

        Args:
            read: Tokens of the prompt that are computed, or known from before.
            tokens: All of them.
        """
        self._read, self._tokens = read, tokens

    def over(self) -> None:
        """Take the line away: there is something to show. Harmless when repeated."""
        if not self._shown:
            return
        with self._lock:
            self._over.set()
            self._erase()

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Meanwhile something else is written to the terminal."""
        with self._lock:
            self._erase()
            yield

    def before(self, sink: Sink) -> Sink:
        """The sink, but that the line is gone before it shows anything."""
        return _After(self, sink) if self._shown else sink

    def _draw_until_over(self) -> None:
        pause = _FIRST_AFTER_S
        while not self._over.wait(pause):
            pause = _REDRAW_EVERY_S
            with self._lock:
                line = self._text()[: self._columns() - 1]
                if not self._over.is_set() and line != self._line:
                    self._put(f"\r{DIM}{line}{NORMAL}\x1b[K")
                    self._line = line

    def _erase(self) -> None:
        if self._line:
            self._put(_ERASE)
            self._line = ""

    def _text(self) -> str:
        seconds = f"{time.monotonic() - self._started:.0f} s"
        if self._read < self._tokens:
            return f"reading {self._read:,} of {self._tokens:,} tokens, {seconds}"
        return f"{self._then if self._tokens else 'reading'}, {seconds}"

    def _columns(self) -> int:
        try:
            return os.get_terminal_size(self._stream.fileno()).columns or 80
        except (OSError, ValueError):
            return 80

    def _put(self, text: str) -> None:
        # Where the terminal is gone, the answer may still have its reader.
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):
            self._over.set()


class _After:
    """A sink whose first text takes the line away."""

    def __init__(self, waiting: Waiting, inner: Sink) -> None:
        self._waiting = waiting
        self._inner = inner

    def write(self, text: str) -> None:
        """See :class:`Sink`."""
        if text:
            self._waiting.over()
        self._inner.write(text)

    def end(self) -> None:
        """See :class:`Sink`."""
        self._inner.end()

    def moved(self) -> None:
        """See :class:`Sink`."""
        self._inner.moved()
