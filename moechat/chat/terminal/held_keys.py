"""Holds keys typed while the program works: not echoed into an answer, not lost, pastes kept whole."""

from __future__ import annotations

import os
import sys
import termios
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import TracebackType
from typing import Any

from moechat.chat.signals import when_continued

# Bracketed paste: the terminal marks pastes, so that their lines stay one message.
_BRACKETED_PASTE_ON, _BRACKETED_PASTE_OFF = b"\x1b[?2004h", b"\x1b[?2004l"


class HeldKeys:
    """A reentrant context in which keys wait without echo for the next prompt; Ctrl-C still interrupts.

    For prompts of prompt_toolkit only: Enter stays a carriage return and pastes are bracketed, which other
    readers do not understand.
    """

    # Invariant: inside the context and outside editing(), the terminal has the attributes _held and brackets
    # pastes.
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
            _send_to_terminal(_BRACKETED_PASTE_OFF)

    def hold(self) -> None:
        """Hold keys again after another owner of the terminal: an editor, or the shell after Ctrl-Z."""
        descriptor = self._descriptor
        if descriptor is None or self._editing:
            return
        with suppress(OSError, termios.error):  # the terminal may be gone
            if os.tcgetpgrp(descriptor) != os.getpgrp():
                return  # in the background the terminal belongs to the shell
            termios.tcsetattr(descriptor, termios.TCSANOW, self._held)
            _send_to_terminal(_BRACKETED_PASTE_ON)

    @contextmanager
    def editing(self) -> Iterator[None]:
        """Leave the terminal to an editor in this context."""
        self._editing = True
        try:
            yield
        finally:
            self._editing = False
            self.hold()


# A process has one terminal.
held_keys = HeldKeys()


def _send_to_terminal(sequence: bytes) -> None:
    """Write without Python's streams, because a signal handler may have interrupted a write to them."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            if stream.isatty():
                os.write(stream.fileno(), sequence)
                return
