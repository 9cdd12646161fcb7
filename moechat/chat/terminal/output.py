"""An answer's way to stdout as plain text, and thoughts' way to stderr."""

from __future__ import annotations

import os
from typing import Protocol, TextIO

from moechat.chat.neutral import neutralise
from moechat.errors import MoechatError

DIM, NORMAL = "\x1b[2m", "\x1b[0m"
_DUMB = ("", "dumb", "unknown")


class Sink(Protocol):
    """Where the text of an answer goes as it comes."""

    def write(self, text: str) -> None:
        """Show a piece of text at once."""

    def end(self) -> None:
        """The answer has ended; the next thing begins on a line of its own. Harmless when repeated."""

    def moved(self) -> None:
        """Somebody else has written to the terminal; the cursor is at the beginning of a row now."""


def can_redraw(stream: TextIO) -> bool:
    """Whether a stream is a terminal that can move its cursor."""
    return stream.isatty() and os.environ.get("TERM", "").lower() not in _DUMB


def write_output(stream: TextIO, text: str) -> None:
    """Write to stdout at once.

    Raises:
        BrokenPipeError: Nobody reads it any more.
        MoechatError: It cannot be written, for example because a disk is full.
    """
    try:
        stream.write(text)
        stream.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise MoechatError(f"the output cannot be written: {error.strerror}") from error


class Answer:
    """The answer on its way to stdout: flushed piece by piece, ended by a newline if it has none.

    On a terminal control characters are neutralised: what a model writes must not drive the user's
    terminal. Through a pipe every byte is the model's own.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._neutral = stream.isatty()
        self._last = ""

    def write(self, text: str) -> None:
        """Show a piece of text at once."""
        if text:
            self._last = text[-1]  # first, so that an interrupt while writing leaves it right
            self._put(neutralise(text) if self._neutral else text)

    def end(self) -> None:
        """End the line if it is not ended; nothing if there was no text at all."""
        if self._last and self._last != "\n":
            self._put("\n")
        self._last = ""

    def moved(self) -> None:
        """The text goes on from there."""

    def _put(self, text: str) -> None:
        write_output(self._stream, text)


class Thoughts:
    """What a model thinks before it answers, on its way to stderr; dimmed where that is possible.

    Args:
        stream: stderr.
        dim: Whether the stream is a terminal that knows how to dim.
    """

    def __init__(self, stream: TextIO, *, dim: bool) -> None:
        self._stream = stream
        self._neutral = stream.isatty()
        self._dim = dim
        self._last = ""

    def write(self, text: str) -> None:
        """Show a piece at once; blank lines at the beginning are left out."""
        if not self._last:
            text = text.lstrip("\n")
        if not text:
            return
        self._last = text[-1]
        text = neutralise(text) if self._neutral else text
        self._put(f"{DIM}{text}{NORMAL}" if self._dim else text)

    def end(self) -> None:
        """End the thought with a blank line, so that the answer stands apart; nothing if there was none."""
        if self._last:
            self._put("\n" if self._last == "\n" else "\n\n")
        self._last = ""

    def moved(self) -> None:
        """The thought goes on from there."""

    def _put(self, text: str) -> None:
        # Where stderr is gone, the answer may still have its reader.
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):
            pass


class Nowhere:
    """Takes what is not to be shown."""

    def write(self, text: str) -> None:
        """Nothing."""

    def end(self) -> None:
        """Nothing."""

    def moved(self) -> None:
        """Nothing."""
