"""Where the user's lines come from: an editor on a terminal, or plain lines where there is none."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from moechat.chat.output import can_redraw

PROMPT, MORE = ">>> ", "... "
QUOTES = '"""'


class Reader(Protocol):
    """Reads messages.

    Attributes:
        typed: Whether something stood on the line when Ctrl-C was pressed.
    """

    typed: bool

    def read(self) -> str:
        r"""What was typed next, with quotes around it; several lines are separated by ``\n``.

        Raises:
            EOFError: Ctrl-D on an empty line, or the terminal is gone.
            KeyboardInterrupt: Ctrl-C.
            UnicodeError: Bytes that are not UTF-8.
        """

    def working(self) -> AbstractContextManager[object]:
        """What is typed meanwhile waits for the next prompt, where that is possible."""


def unfinished(text: str) -> bool:
    """Whether a message has begun with three quotes, and has not ended with three more."""
    text = text.strip()
    return text.startswith(QUOTES) and (len(text) < 2 * len(QUOTES) or not text.endswith(QUOTES))


def is_quoted(text: str) -> bool:
    """Whether three quotes stand around a message."""
    return text.strip().startswith(QUOTES) and not unfinished(text)


def without_quotes(text: str) -> str:
    """The message inside the three quotes that stand around it, if they do."""
    if is_quoted(text):
        return text.strip()[len(QUOTES) : -len(QUOTES)].strip("\n")
    return text


class PlainReader:
    """Lines from a terminal that cannot move its cursor, or whose output goes elsewhere."""

    def __init__(self) -> None:
        self.typed = False

    def read(self) -> str:
        """See :class:`Reader`."""
        self.typed = False
        text = self._line(PROMPT)
        while unfinished(text):
            text += "\n" + self._line(MORE)
        return text

    def working(self) -> AbstractContextManager[object]:
        """The terminal itself edits the line, and shows it at once."""
        return nullcontext()

    @staticmethod
    def _line(prompt: str) -> str:
        # On stderr: stdout may be the file that collects the answers.
        sys.stderr.write(prompt)
        sys.stderr.flush()
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        line.encode("utf-8")  # bytes that are none may come as lone surrogates
        return line.removesuffix("\n")


def has_editor() -> bool:
    """Whether this terminal can do what an editor of lines needs."""
    return sys.stdin.isatty() and (can_redraw(sys.stdout) or can_redraw(sys.stderr))


def new_reader(*, keep_history: bool, status: Callable[[], str], tell: Callable[[str], None]) -> Reader:
    """The best reader for this terminal.

    Args:
        keep_history: What is typed is kept for later chats.
        status: Gives what stands at the right of the prompt, where there is room.
        tell: Called with what goes wrong, which stops nothing.
    """
    if not has_editor():
        return PlainReader()
    from moechat.chat.editor import PromptReader

    return PromptReader(keep_history=keep_history, status=status, tell=tell)
