"""What is written where: the answer on stdout, everything else on stderr."""

from __future__ import annotations

import errno
import io
import os
import sys
from functools import cache
from typing import TYPE_CHECKING, TextIO

from moechat.errors import MoechatError

if TYPE_CHECKING:
    from rich.console import Console

# C0 without tab and newline, DEL, and C1: what can move the cursor, change the title or the keyboard, or
# start an escape sequence. C0 and DEL are shown as their Unicode pictures, C1 (which has none) as the
# replacement character.
_VISIBLE = {code: 0x2400 + code for code in range(0x20) if code not in (0x09, 0x0A)}
_VISIBLE[0x7F] = 0x2421
_VISIBLE |= dict.fromkeys(range(0x80, 0xA0), 0xFFFD)


def neutralise(text: str) -> str:
    """The text with every control character but newline and tab replaced by a visible one."""
    return text.translate(_VISIBLE)


@cache
def console() -> Console:
    """The console on stderr; it honours ``NO_COLOR`` and ``TERM=dumb``."""
    from rich.console import Console

    class ErrorConsole(Console):
        def on_broken_pipe(self) -> None:
            self.quiet = True  # rich would end the program; but the answer may still have its reader

    return ErrorConsole(stderr=True, highlight=False, soft_wrap=True)


def is_animated() -> bool:
    """Whether stderr is a terminal that can redraw a line; ``FORCE_COLOR`` does not make it one."""
    return sys.stderr.isatty() and not console().is_dumb_terminal


def print_error(message: str, hint: str | None = None) -> None:
    """Say on stderr what happened, and what to do about it."""
    _print_labelled("error:", "bold red", message)
    if hint:
        _print_labelled("hint:", "bold cyan", hint)


def print_notice(message: str) -> None:
    """Say something on stderr that is not an error."""
    from rich.text import Text

    console().print(Text(neutralise(message), style="dim"))


def can_ask() -> bool:
    """Whether somebody sees a question and can answer it."""
    return sys.stdin.isatty() and sys.stderr.isatty()


def ask(question: str, *, default: bool) -> bool:
    """Ask for yes or no on stderr; anything else is asked again, the end of stdin is a no."""
    choices = "[Y/n]" if default else "[y/N]"
    while True:
        console().print(neutralise(f"{question} {choices} "), end="", markup=False)
        sys.stderr.flush()
        line = sys.stdin.readline()
        answer = line.strip().lower()
        if not line:
            console().print()
            return False
        if not answer:
            return default
        if answer in ("y", "yes", "n", "no"):
            return answer.startswith("y")


def _print_labelled(label: str, style: str, message: str) -> None:
    from rich.text import Text

    console().print(Text.assemble((label, style), " ", neutralise(message)))


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


class ClosedStream(io.TextIOBase):
    """Stands in for a standard output that was closed before the start: it behaves like a broken pipe."""

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return 1  # the null device by then, see _prepare_standard_streams

    def write(self, text: str) -> int:
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


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

    def _put(self, text: str) -> None:
        write_output(self._stream, text)
