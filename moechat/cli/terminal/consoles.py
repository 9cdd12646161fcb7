"""Output of the commands: results go to stdout, everything else to stderr."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, TextIO

from moechat.chat.terminal.output import write_output
from moechat.cli.terminal.wrapping import wrap
from moechat.errors import MoechatError
from moechat.safe_text import neutralise

if TYPE_CHECKING:
    from rich.console import Console

__all__ = [
    "ClosedStream",
    "console",
    "is_animated",
    "neutralise",
    "print_error",
    "print_notice",
    "require_output",
    "write_output",
]


@cache
def console() -> Console:
    """The console on stderr; it honours ``NO_COLOR`` and ``TERM=dumb``."""
    from rich.console import Console

    class ErrorConsole(Console):
        def on_broken_pipe(self) -> None:
            self.quiet = True  # rich would exit, but stdout may still have a reader

    return ErrorConsole(stderr=True, highlight=False, soft_wrap=True)


def is_animated() -> bool:
    """Whether stderr is a terminal that can redraw a line; ``FORCE_COLOR`` does not make it one."""
    return sys.stderr.isatty() and not console().is_dumb_terminal


def print_error(message: str, hint: str | None = None) -> None:
    """Print an error and the next step to stderr."""
    _print_labelled("error:", "bold red", message)
    if hint:
        _print_labelled("hint:", "bold cyan", hint)


def print_notice(message: str) -> None:
    """Print a message that is not an error to stderr."""
    from rich.text import Text

    console().print(Text(_wrapped(neutralise(message)), style="dim"))


def write_json_line(stream: TextIO, value: Any) -> None:
    """Write a JSON object on one line; raises the errors of :func:`write_output`."""
    # ASCII only on a terminal, because JSON does not escape C1 control characters.
    plain = stream.isatty() or (stream.encoding or "").lower().replace("-", "") != "utf8"
    write_output(stream, json.dumps(value, ensure_ascii=plain) + "\n")


def print_warning(message: str) -> None:
    """Print a warning to stderr."""
    _print_labelled("warning:", "bold yellow", message)


def can_ask() -> bool:
    """Whether the user can see and answer a question."""
    return sys.stdin.isatty() and sys.stderr.isatty()


def confirm(question: str, *, default: bool) -> bool:
    """Ask for yes or no on stderr, until the answer is either; the end of stdin means no."""
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


def print_rows(rows: Sequence[tuple[str, str]]) -> None:
    """Print names with values to stderr, the values aligned."""
    from rich.cells import cell_len
    from rich.text import Text

    indent = 2 + max((cell_len(name) for name, _ in rows), default=0)
    for name, value in rows:
        title = name + " " * (indent - cell_len(name))
        whole = _wrapped(title + neutralise(value))
        console().print(Text.assemble((whole[: len(title)], "dim"), whole[len(title) :]))


def _wrapped(text: str, *, first: int = 0) -> str:
    """A text as it is printed on this console: wrapped between words on a terminal."""
    return wrap(text, console().width, first=first) if console().is_terminal else text


def _print_labelled(label: str, style: str, message: str) -> None:
    from rich.text import Text

    text = _wrapped(neutralise(message), first=len(label) + 1)
    console().print(Text.assemble((label, style), " ", text))


def require_output() -> None:
    """Check, before minutes of work, that standard output is open.

    Raises:
        MoechatError: It was closed before the start.
    """
    if isinstance(sys.stdout, ClosedStream):
        raise _output_closed()


def _output_closed() -> MoechatError:
    return MoechatError(
        "the output cannot be written: standard output is closed",
        hint="leave out >&-; >/dev/null discards the output",
    )


class ClosedStream(io.TextIOBase):
    """A standard output that was closed before the start; every write fails.

    Unlike a pipe whose reader has seen enough, this is an error.
    """

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return 1  # the null device, see _prepare_standard_streams

    def write(self, text: str) -> int:
        raise _output_closed()
