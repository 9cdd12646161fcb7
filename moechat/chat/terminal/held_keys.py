"""What is typed while the program works: not shown inside an answer, not lost, and not taken apart."""

from __future__ import annotations

import os
import sys
import termios
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import TracebackType
from typing import Any

from moechat.chat.signals import when_continued

# The terminal puts marks around what is pasted, so that its lines stay one message.
_PASTES_MARKED, _PASTES_PLAIN = b"\x1b[?2004h", b"\x1b[?2004l"


class HeldKeys:
    """Keys wait, unseen, for the next prompt; Ctrl-C still interrupts. A context manager, also within itself.

    For prompts of prompt_toolkit only: Enter stays a carriage return, and pastes have marks around them,
    which other readers do not know.
    """

    # Invariant: while it is entered and nobody edits, the terminal is in _held, and marks pastes.
    def __init__(self) -> None:
        self._depth = 0
        self._descriptor: int | None = None
        self._before: list[Any] = []
        self._held: list[Any] = []
        self._editing = False
        self._exits = ExitStack()

    def __enter__(self) -> HeldKeys:
        self._depth += 1
        if self._depth > 1:
            return self
        try:
            descriptor = sys.stdin.fileno()
            self._before = termios.tcgetattr(descriptor)
            self._held = termios.tcgetattr(descriptor)
        except (OSError, ValueError, termios.error):  # no terminal
            return self
        self._held[0] &= ~termios.ICRNL
        self._held[3] &= ~(termios.ECHO | termios.ICANON)
        self._descriptor = descriptor
        self._exits.enter_context(when_continued(self.hold))
        self.hold()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._depth -= 1
        if self._depth:
            return
        descriptor, self._descriptor = self._descriptor, None
        self._exits.close()
        if descriptor is not None:
            with suppress(termios.error):  # the terminal may be gone
                termios.tcsetattr(descriptor, termios.TCSANOW, self._before)
            _tell_terminal(_PASTES_PLAIN)

    def hold(self) -> None:
        """Hold keys again, after somebody else had the terminal: an editor, or the shell after Ctrl-Z."""
        descriptor = self._descriptor
        if descriptor is None or self._editing:
            return
        with suppress(OSError, termios.error):  # the terminal may be gone
            if os.tcgetpgrp(descriptor) != os.getpgrp():
                return  # in the background it is the shell's
            termios.tcsetattr(descriptor, termios.TCSANOW, self._held)
            _tell_terminal(_PASTES_MARKED)

    @contextmanager
    def editing(self) -> Iterator[None]:
        """Meanwhile the terminal is an editor's."""
        self._editing = True
        try:
            yield
        finally:
            self._editing = False
            self.hold()


# A process has one terminal.
held_keys = HeldKeys()


def _tell_terminal(sequence: bytes) -> None:
    """Write past Python's streams: this may be a handler of signals that came while they were written to."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            if stream.isatty():
                os.write(stream.fileno(), sequence)
                return
