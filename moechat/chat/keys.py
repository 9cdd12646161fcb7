"""What is typed while the program works: not shown in the middle of an answer, and not lost."""

from __future__ import annotations

import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def held_keys() -> Iterator[None]:
    """Keys wait, unseen, for the next prompt; Ctrl-C still interrupts.

    For prompts of prompt_toolkit only: Enter stays a carriage return, which other readers do not know.
    """
    try:
        descriptor = sys.stdin.fileno()
        before = termios.tcgetattr(descriptor)
    except (OSError, ValueError, termios.error):  # no terminal
        yield
        return
    held = termios.tcgetattr(descriptor)
    held[0] &= ~termios.ICRNL
    held[3] &= ~(termios.ECHO | termios.ICANON)
    termios.tcsetattr(descriptor, termios.TCSANOW, held)
    try:
        yield
    finally:
        with suppress(termios.error):  # the terminal may be gone
            termios.tcsetattr(descriptor, termios.TCSANOW, before)
