"""What is written where: the answer on stdout, everything else on stderr."""

from __future__ import annotations

import errno
import io
import json
import os
import sys
from functools import cache
from typing import TYPE_CHECKING, Any, TextIO

from moechat.chat.neutral import neutralise
from moechat.chat.output import Answer, write_output

if TYPE_CHECKING:
    from rich.console import Console

__all__ = [
    "Answer",
    "ClosedStream",
    "console",
    "is_animated",
    "neutralise",
    "print_error",
    "print_notice",
    "write_output",
]


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


def write_json_line(stream: TextIO, value: Any) -> None:
    """Write a JSON object as one line; raises as :func:`write_output`."""
    # On a terminal all but ASCII is escaped: C1 control characters would pass through JSON as they are.
    plain = stream.isatty() or (stream.encoding or "").lower().replace("-", "") != "utf8"
    write_output(stream, json.dumps(value, ensure_ascii=plain) + "\n")


def print_warning(message: str) -> None:
    """Say on stderr that something is not as it was asked for."""
    _print_labelled("warning:", "bold yellow", message)


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


class ClosedStream(io.TextIOBase):
    """Stands in for a standard output that was closed before the start: it behaves like a broken pipe."""

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return 1  # the null device by then, see _prepare_standard_streams

    def write(self, text: str) -> int:
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))
