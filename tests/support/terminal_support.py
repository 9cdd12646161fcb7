"""A program on a real pseudo-terminal: keys in, a screen out."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pexpect
import pyte

# Output of the editor when it begins to read a line, and when it releases the terminal.
EDITOR_BEGINS, EDITOR_ENDS = "\x1b[?2004h", "\x1b[?2004l"
PROMPT = ">>>"


@contextmanager
def hanging_up_ends_it() -> Iterator[None]:
    """Restores SIGHUP for programs started meanwhile, even where this process ignores it (nohup)."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


class Terminal:
    """A program on a pseudo-terminal, and its screen.

    Args:
        command: The program and its arguments.
        cwd: Where it runs.
        environment: All its variables but ``TERM``.
        patience_s: How long anything that is waited for may take.

    Attributes:
        child: The process.
        written: All that it has written so far.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        cwd: Path,
        environment: Mapping[str, str],
        columns: int = 70,
        rows: int = 24,
        term: str = "xterm-256color",
        patience_s: float = 20,
    ) -> None:
        self._patience_s = patience_s
        self._screen = pyte.Screen(columns, rows)
        self._stream = pyte.Stream(self._screen)
        with hanging_up_ends_it():
            self.child = pexpect.spawn(
                command[0],
                list(command[1:]),
                env={**environment, "TERM": term},  # type: ignore[arg-type]
                cwd=str(cwd),
                encoding="utf-8",
                timeout=patience_s,
                dimensions=(rows, columns),
            )
        self.child.delaybeforesend = None
        self.written = ""

    def close(self) -> None:
        self.child.close(force=True)

    @property
    def shown(self) -> str:
        return "\n".join(line.rstrip() for line in self._screen.display).rstrip()

    @property
    def last_line(self) -> str:
        return self.shown.split("\n")[-1]

    @property
    def columns(self) -> int:
        return self._screen.columns

    @property
    def rows(self) -> int:
        return self._screen.lines

    def until(self, condition: Callable[[], bool]) -> None:
        """Read what the program writes until the condition holds.

        Raises:
            AssertionError: It never held; with what the screen shows.
        """
        deadline = time.monotonic() + self._patience_s
        while not condition():
            if not self._read():
                assert condition(), f"the program has ended:\n{self.shown}"
                return
            assert time.monotonic() < deadline, (
                f"the condition never became true; the screen shows:\n{self.shown}"
            )

    def end(self) -> int | None:
        """Read all output until the program has ended; returns its exit status."""
        deadline = time.monotonic() + self._patience_s
        while self._read():
            assert time.monotonic() < deadline, f"it does not end; the screen shows:\n{self.shown}"
        self.child.wait()
        self.child.close()
        return self.child.exitstatus

    def _read(self) -> bool:
        """Show the output of the program; returns whether more may follow."""
        try:
            piece = self.child.read_nonblocking(4096, 0.05)
        except pexpect.TIMEOUT:
            return True
        except pexpect.EOF:
            return False
        self.written += piece
        self._stream.feed(piece)
        return True

    def wait(self, text: str) -> None:
        self.until(lambda: text in self.shown)

    def wait_prompt(self) -> None:
        self.until(lambda: self.last_line.startswith(PROMPT))

    def type(self, keys: str, shown: str | None = None) -> None:
        self.child.send(keys)
        if shown is not None:
            self.wait(shown)

    def enter(self, line: str = "", *, whole: bool = True) -> None:
        """Send a line; wait until the next prompt is there, or only until the editor has taken the line."""
        if line:
            self.type(line)
            self.until(lambda: line.split("\n")[-1][-10:] in self.shown)
        before = len(self.written)
        self.child.send("\r")
        self.until(lambda: EDITOR_ENDS in self.written[before:])
        if whole:
            taken = self.written.index(EDITOR_ENDS, before)
            # Pastes are marked during an answer as well; only the editor writes its prompt after that.
            self.until(lambda: self._asks_since(taken))
            self.wait_prompt()

    def _asks_since(self, place: int) -> bool:
        _, begun, after = self.written[place:].rpartition(EDITOR_BEGINS)
        return bool(begun) and PROMPT in after

    def say(self, line: str, answer: str) -> None:
        """Send a line, and wait for the answer and the next prompt."""
        self.type(line)
        self.until(lambda: line.split("\n")[-1][-10:] in self.shown)
        self.child.send("\r")
        self.wait(answer)
        self.wait_prompt()

    def resize(self, columns: int, rows: int) -> None:
        self.child.setwinsize(rows, columns)
        self._screen.resize(rows, columns)

    def leave(self, keys: str = "\x04") -> int | None:
        """Exit status after these keys."""
        self.child.send(keys)
        return self.end()
