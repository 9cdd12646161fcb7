"""Reads the user's messages: with a line editor on a terminal, as plain lines elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from moechat.chat.terminal.multiline import MORE, PROMPT, is_unfinished
from moechat.chat.terminal.output import can_redraw


class Reader(Protocol):
    """Reads messages.

    Attributes:
        typed: Whether the line held text when Ctrl-C was pressed.
    """

    typed: bool

    def read(self) -> str:
        r"""The next message, including triple quotes around it; lines are separated by ``\n``.

        Raises:
            EOFError: Ctrl-D on an empty line, or the terminal is closed.
            KeyboardInterrupt: Ctrl-C.
            UnicodeError: The input is not UTF-8.
        """

    def working(self) -> AbstractContextManager[object]:
        """A context in which typed keys are held for the next prompt, where the terminal allows it."""


class PlainReader:
    """Reads lines from a terminal that cannot move its cursor, or whose output is redirected."""

    def __init__(self) -> None:
        self.typed = False

    def read(self) -> str:
        """See :class:`Reader`."""
        self.typed = False
        text = self._line(PROMPT)
        while is_unfinished(text):
            text += "\n" + self._line(MORE)
        return text

    def working(self) -> AbstractContextManager[object]:
        """Holds nothing: the terminal itself edits and echoes the line."""
        return nullcontext()

    @staticmethod
    def _line(prompt: str) -> str:
        # On stderr: stdout may be the file that collects the answers.
        sys.stderr.write(prompt)
        sys.stderr.flush()
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        line.encode("utf-8")  # raises for lone surrogates, which stand for invalid bytes
        return line.removesuffix("\n")


def has_editor() -> bool:
    """Whether this terminal supports a line editor."""
    return sys.stdin.isatty() and (can_redraw(sys.stdout) or can_redraw(sys.stderr))


def new_reader(*, keep_history: bool, status: Callable[[], str], warn: Callable[[str], None]) -> Reader:
    """The best reader for this terminal.

    Args:
        keep_history: Store typed lines for later chats.
        status: Returns the text at the right of the prompt, shown where there is room.
        warn: Receives messages about failures of the history file, which do not stop the chat.
    """
    if not has_editor():
        return PlainReader()
    from moechat.chat.terminal.editor import PromptReader

    return PromptReader(keep_history=keep_history, status=status, warn=warn)
