"""Reads the prompt of a single answer: from the argument, piped stdin, or both."""

from __future__ import annotations

import select
import sys
from collections.abc import Iterable
from typing import BinaryIO

from moechat.chat.text_files import read_named, refuse_pictures
from moechat.cli.terminal.consoles import print_notice
from moechat.errors import UsageError

# Far beyond any context window; keeps an endless stream from filling the memory.
_MAX_BYTES = 64 << 20
_NOTICE_AFTER_S = 2.0


def read_prompt(argument: str | None, *, quiet: bool = False) -> str | None:
    """The prompt to answer, or ``None`` for a chat.

    Stdin that is not a terminal is read to its end and precedes the argument, separated by a blank line.
    ``-`` reads stdin even from a terminal. One newline at the end of stdin is dropped, as in shells.

    Args:
        argument: The prompt on the command line.
        quiet: Print no notice while waiting for stdin.

    Raises:
        UsageError: The prompt is blank, a picture, not UTF-8, or larger than 64 MiB.
    """
    piped = not sys.stdin.isatty()
    if argument is None and not piped:
        return None
    given = _read_stdin(quiet=quiet) if piped or argument == "-" else ""
    own = "" if argument in (None, "-") else argument
    parts = [part for part in (given, own) if part and not part.isspace()]
    if not parts:
        raise UsageError("the prompt is empty", hint="give a prompt as an argument or on stdin")
    return "\n\n".join(parts)


def read_files(names: Iterable[str]) -> list[tuple[str, str]]:
    """Names and contents of texts to send with a message.

    Args:
        names: Their paths, or URLs.

    Raises:
        UsageError: See :func:`moechat.chat.text_files.read_named`.
        OfflineError: As there.
    """
    return [read_named(name) for name in names]


def _read_stdin(*, quiet: bool) -> str:
    stream = sys.stdin.buffer
    if not quiet:
        notify_if_waiting(stream, "the prompt")
    data = stream.read(_MAX_BYTES + 1)
    if len(data) > _MAX_BYTES:
        raise UsageError(f"stdin holds more than {_MAX_BYTES >> 20} MiB, more than any context window")
    if b"\0" in data:
        refuse_pictures(data, "stdin")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        refuse_pictures(data, "stdin")
        raise UsageError(
            f"stdin is not UTF-8: byte {error.object[error.start]:#04x} at offset {error.start}",
            hint="convert it first, for example with iconv",
        ) from None
    return text.removesuffix("\n").removesuffix("\r")


def notify_if_waiting(stream: BinaryIO, what: str) -> None:
    """Print a notice if stdin has no data yet, so that the program does not seem to hang.

    Args:
        stream: Stdin.
        what: The expected content, in words.
    """
    if sys.stdin.isatty():
        print_notice(f"reading {what} from the terminal; Ctrl-D on an empty line ends it")
        return
    try:
        ready, _, _ = select.select([stream], [], [], _NOTICE_AFTER_S)
    except OSError:  # regular files and similar never block
        return
    if not ready:
        print_notice("waiting for stdin; use </dev/null if there is none")
