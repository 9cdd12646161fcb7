"""Sinks for the text of an answer: plain text on stdout, thinking on stderr."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Protocol, TextIO

from moechat.errors import MoechatError
from moechat.safe_text import neutralise

DIM, NORMAL = "\x1b[2m", "\x1b[0m"
_DUMB = ("", "dumb", "unknown")


class Sink(Protocol):
    """Output for streamed text."""

    def write(self, text: str) -> None:
        """Show a piece of text at once."""

    def end(self) -> None:
        """End the text, so that the next output begins on a new line; may be called again."""

    def moved(self) -> None:
        """Another program wrote to the terminal: the cursor is now at the beginning of a row."""


def can_redraw(stream: TextIO) -> bool:
    """Whether a stream is a terminal that can move its cursor."""
    return stream.isatty() and os.environ.get("TERM", "").lower() not in _DUMB


def write_output(stream: TextIO, text: str) -> None:
    """Write and flush.

    Raises:
        BrokenPipeError: The reader of the stream is gone.
        MoechatError: The stream cannot be written, for example on a full disk.
    """
    try:
        stream.write(text)
        stream.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise MoechatError(f"the output cannot be written: {error.strerror}") from error


class PlainAnswer:
    """Writes the answer to stdout: flushes every piece, ends with a newline.

    On a terminal, control characters are neutralised, so that a model cannot control the user's terminal. A
    pipe gets the model's bytes unchanged.

    Args:
        stream: stdout.
        wrap: Breaks lines before the terminal does; ``None`` leaves that to the terminal.
    """

    def __init__(self, stream: TextIO, wrap: Callable[[str], str] | None = None) -> None:
        self._stream = stream
        self._wrap = wrap
        self._neutral = stream.isatty()
        self._last = ""

    def write(self, text: str) -> None:
        """Show a piece of text at once."""
        if text:
            self._last = text[-1]  # before writing, so that an interrupt leaves it correct
            self._put(neutralise(text) if self._neutral else text)

    def end(self) -> None:
        """End the last line, if there was text."""
        if self._last and self._last != "\n":
            self._put("\n")
        self._last = ""

    def moved(self) -> None:
        """Do nothing: the text continues at the cursor."""

    def _put(self, text: str) -> None:
        write_output(self._stream, text if self._wrap is None else self._wrap(text))


class Thoughts:
    """Writes the model's thinking to stderr.

    Args:
        stream: stderr.
        dim: Whether the stream is a terminal that can dim text.
        wrap: Breaks lines before the terminal does; ``None`` leaves that to the terminal.
    """

    def __init__(self, stream: TextIO, *, dim: bool, wrap: Callable[[str], str] | None = None) -> None:
        self._stream = stream
        self._wrap = wrap or (lambda text: text)
        self._neutral = stream.isatty()
        self._dim = dim
        self._last = ""

    def write(self, text: str) -> None:
        """Show a piece at once, without blank lines at the beginning."""
        if not self._last:
            text = text.lstrip("\n")
        if not text:
            return
        self._last = text[-1]
        text = self._wrap(neutralise(text) if self._neutral else text)
        self._put(f"{DIM}{text}{NORMAL}" if self._dim else text)

    def end(self) -> None:
        """Separate the thinking from the answer by a blank line, if there was any."""
        if self._last:
            self._put(self._wrap("\n" if self._last == "\n" else "\n\n"))
        self._last = ""

    def moved(self) -> None:
        """Do nothing: the text continues at the cursor."""

    def _put(self, text: str) -> None:
        # stdout may still be open when stderr is closed.
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):
            pass


class NullSink:
    """Discards text."""

    def write(self, text: str) -> None:
        """Do nothing."""

    def end(self) -> None:
        """Do nothing."""

    def moved(self) -> None:
        """Do nothing."""
