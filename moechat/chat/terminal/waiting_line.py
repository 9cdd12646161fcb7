"""A dim line on the terminal that shows progress until the first text of an answer."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from moechat.chat.terminal.output import DIM, NORMAL, Sink

# Quick answers show no line at all.
_FIRST_AFTER_S, _REDRAW_EVERY_S = 0.5, 0.25
_ERASE = "\r\x1b[K"


class WaitingLine:
    """Shows how much of the prompt is read, then how long the model has been busy.

    Args:
        stream: A terminal that can redraw a line, with the cursor at the beginning of an empty one.
        shown: Whether to draw at all.
        busy: Shown after the prompt is read, such as ``thinking``.
    """

    # Invariant: under _lock the line is on the screen if and only if _line is not empty; after remove() it is
    # never drawn again. The computing thread writes the counts, the drawing thread reads them.
    def __init__(self, stream: TextIO, *, shown: bool, busy: str) -> None:
        self._stream = stream
        self._shown = shown
        self._busy = busy
        self._lock = threading.Lock()
        self._removed = threading.Event()
        self._line = ""
        self._read = self._tokens = 0
        self._started = time.monotonic()

    def start(self) -> None:
        """Start drawing in a thread."""
        self._started = time.monotonic()
        if self._shown:
            threading.Thread(target=self._draw_until_removed, name="moechat-waiting", daemon=True).start()

    def progress(self, read: int, tokens: int) -> None:
        """Record progress; the callback of ``Engine.generate``.

        Args:
            read: Tokens of the prompt that are computed or cached.
            tokens: All tokens of the prompt.
        """
        self._read, self._tokens = read, tokens

    def remove(self) -> None:
        """Erase the line for good; may be called again."""
        if not self._shown:
            return
        with self._lock:
            self._removed.set()
            self._erase()

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Erase the line while something else is written to the terminal."""
        with self._lock:
            self._erase()
            yield

    def before(self, sink: Sink) -> Sink:
        """A sink that removes the line before its first text."""
        return _RemovingSink(self, sink) if self._shown else sink

    def _draw_until_removed(self) -> None:
        pause = _FIRST_AFTER_S
        while not self._removed.wait(pause):
            pause = _REDRAW_EVERY_S
            with self._lock:
                line = self._text()[: self._columns() - 1]
                if not self._removed.is_set() and line != self._line:
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
        return f"{self._busy if self._tokens else 'reading'}, {seconds}"

    def _columns(self) -> int:
        try:
            return os.get_terminal_size(self._stream.fileno()).columns or 80
        except (OSError, ValueError):
            return 80

    def _put(self, text: str) -> None:
        # stdout may still be open when the terminal is closed.
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):
            self._removed.set()


class _RemovingSink:
    """Removes the waiting line before the first text."""

    def __init__(self, waiting: WaitingLine, inner: Sink) -> None:
        self._waiting = waiting
        self._inner = inner

    def write(self, text: str) -> None:
        """See :class:`Sink`."""
        if text:
            self._waiting.remove()
        self._inner.write(text)

    def end(self) -> None:
        """See :class:`Sink`."""
        self._inner.end()

    def moved(self) -> None:
        """See :class:`Sink`."""
        self._inner.moved()
