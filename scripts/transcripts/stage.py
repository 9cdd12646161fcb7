"""Where transcripts are made: a home of their own, the real program there, and a record of what it wrote.

Everything that is shown is masked (home, working directory and clone have names instead of paths) and
checked: what does not hold is said where it happened, and counted.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from rich.cells import cell_len, set_cell_size
from terminal_support import Terminal, hanging_up_ends_it

ROOT = Path(__file__).resolve().parents[2]
# Enough for a cold start under load; nothing waits for it to pass.
PATIENCE_S = 120
# What would make one user's transcript another than the next one's.
_DROPPED = re.compile(
    r"(MOECHAT|HF|XDG|TRANSFORMERS|_MOECHAT|_TYPER|PYTHON|LC)_.*|LANG|LANGUAGE|NO_COLOR|FORCE_COLOR|COLUMNS"
    r"|LINES|PYTHONPATH|(?i:(http|https|all|no)_proxy)"
)


class Skipped(Exception):  # noqa: N818 - not an error
    """The machine does not allow what the part needs."""


class Transcript:
    """What was shown so far, on stdout and perhaps in a file, and what did not hold.

    Attributes:
        failures: A line for each thing that did not hold.
        masks: Names that are shown in place of paths.
    """

    def __init__(self, file: IO[str] | None = None) -> None:
        self._file = file
        self._part = ""
        self.failures: list[str] = []
        self.masks: dict[str, str] = {}

    def masked(self, text: str) -> str:
        """The text with names for paths, also for those that a narrow window has broken in two."""
        for path in sorted(self.masks, key=len, reverse=True):
            broken = r"\n?".join(map(re.escape, path))
            text = re.sub(broken, lambda _found, path=path: self.masks[path], text)
        return text

    def show(self, text: str) -> None:
        for file in (sys.stdout, self._file):
            if file is not None:
                print(_printable(self.masked(text)), file=file, flush=True)

    def begin(self, part: str, about: str) -> None:
        self._part = part
        self.show(f"\n{'=' * 100}\n{part}: {about}\n{'=' * 100}")

    def say(self, text: str) -> None:
        self.show(f"\n# {text}")

    def check(self, holds: object, what: str) -> None:
        """Say and count what does not hold."""
        if not holds:
            self.failures.append(f"{self._part}: {self.masked(what)}")
            self.show(f"!! DOES NOT HOLD: {what}")

    def frame(self, terminal: Terminal, keys: str) -> None:
        """The screen as it is, under what was typed."""
        lines = self.masked(terminal.shown).split("\n")
        lines += [""] * (terminal.rows - len(lines))
        wide = max(terminal.columns, *map(cell_len, lines))
        edge = "+" + "-" * (wide + 2) + "+"
        self.show(
            "\n".join(["", f"[{keys}]", edge, *(f"| {set_cell_size(line, wide)} |" for line in lines), edge])
        )


def _printable(text: str) -> str:
    """Whatever a random model writes can be pasted."""
    return "".join(
        one if one.isprintable() or one == "\n" else "    " if one == "\t" else f"\\x{ord(one):02x}"
        for one in text
    )


@dataclass(frozen=True)
class Done:
    """What a command left behind."""

    status: int
    out: str
    err: str

    @property
    def text(self) -> str:
        return self.out + self.err


@dataclass
class Stage:
    """The program with a home and a working directory of its own.

    Attributes:
        record: Where everything is shown.
        program: The directory of the ``moechat`` command.
        work: Where it runs; the home is below.
        extra: More variables.
        columns: Width of terminals.
        rows: Their height.
        runs: How often a command is timed.
        within: What runs every command, such as ``nsenter``.
    """

    record: Transcript
    program: Path
    work: Path
    columns: int = 80
    rows: int = 24
    runs: int = 5
    extra: dict[str, str] = field(default_factory=dict)
    within: list[str] = field(default_factory=list)
    _begun: dict[int, float] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if not self.within:
            self.home.mkdir(parents=True, exist_ok=True)
        self.record.masks |= {str(self.home): "~", str(self.work): "$WORK", str(ROOT): "$CLONE"}

    @property
    def home(self) -> Path:
        return self.work / "home"

    @property
    def environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not _DROPPED.fullmatch(name)}
        return {
            **kept,
            "PATH": f"{self.program}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
            "HOME": str(self.home),
            "WORK": str(self.work),
            "TERM": "xterm-256color",
            "LC_ALL": "C.UTF-8",
            "HF_HUB_OFFLINE": "1",
            **self.extra,
        }

    def start(self, script: str) -> subprocess.Popen[bytes]:
        """Begin a bash script; :meth:`ended` shows what it wrote."""
        begun = time.monotonic()
        with hanging_up_ends_it():
            process = subprocess.Popen(
                [*self.within, "env", "-C", str(self.work), "bash", "-c", script],
                cwd=self.work,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        self._begun[process.pid] = begun
        return process

    def command(self, script: str, *says: str, status: int = 0, note: str = "") -> Done:
        """Run a bash script, show it with what it wrote, and check its exit status.

        Args:
            script: As it is shown.
            says: What its output must contain.
            status: What it must end with.
            note: Shown beside the command.
        """
        return self.ended(script, self.start(script), *says, status=status, note=note)

    def signalled(self, script: str, number: signal.Signals, *says: str, status: int, note: str) -> Done:
        """The same for a command that gets a signal once it has written something to stdout."""
        process = self.start(f"exec {script}")
        assert process.stdout is not None
        first = os.read(process.stdout.fileno(), 4096)
        process.send_signal(number)
        return self.ended(script, process, *says, status=status, note=note, first=first)

    def ended(
        self,
        script: str,
        process: subprocess.Popen[bytes],
        *says: str,
        status: int | None = 0,
        note: str = "",
        first: bytes = b"",
    ) -> Done:
        """Wait for a command, show it and check it; see :meth:`command`."""
        try:
            out, err = process.communicate(timeout=PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
        done = Done(process.returncode, (first + out).decode(errors="replace"), err.decode(errors="replace"))
        self.record.show(f"\n$ {script}" + (f"      # {note}" if note else ""))
        if done.out:
            self.record.show(done.out.removesuffix("\n"))
        if done.err:
            self.record.show("\n".join(f"2> {line}" for line in _final(done.err).split("\n")))
        self.record.show(f"[status {done.status}, {time.monotonic() - self._begun[process.pid]:.1f} s]")
        self.record.check(
            status in (None, done.status), f"{script}: status {done.status} in place of {status}"
        )
        for text in says:
            self.record.check(text in done.text, f"{script}: does not say {text!r}")
        return done

    @contextmanager
    def terminal(self, *command: str) -> Iterator[Terminal]:
        """Start a command on a pseudo-terminal."""
        self.record.show(f"\n$ {' '.join(command)}")
        terminal = Terminal(
            [*self.within, "env", "-C", str(self.work), str(self.program / command[0]), *command[1:]],
            cwd=self.work,
            environment=self.environment,
            columns=self.columns,
            rows=self.rows,
            patience_s=PATIENCE_S,
        )
        try:
            yield terminal
        finally:
            terminal.close()

    def seen(self, terminal: Terminal, keys: str, *says: str) -> None:
        """Show the screen, and check that these texts are on it."""
        self.record.frame(terminal, keys)
        for text in says:
            found = " ".join(text.split()) in " ".join(self.record.masked(terminal.shown).split())
            self.record.check(found, f"after {keys}: {text!r} is not on the screen")

    def left(self, terminal: Terminal, keys: str, named: str, status: int = 0) -> None:
        """Leave with these keys, and check the exit status."""
        found = terminal.leave(keys)
        self.record.show(f"\n[{named}: status {found}]")
        self.record.check(found == status, f"left by {named}: status {found} in place of {status}")


def _final(err: str) -> str:
    """Lines as a terminal would show them at the end: what was drawn over is gone."""
    lines = (line.rsplit("\r", 1)[-1] for line in err.replace("\r\n", "\n").split("\n"))
    return "\n".join(lines).removesuffix("\n")


Part = Callable[[Stage], None]


def parts_named(text: str, known: Sequence[str]) -> list[str]:
    """Names out of ``a,b``, in their own order.

    Raises:
        ValueError: One is unknown.
    """
    wanted = [name for name in text.split(",") if name]
    for name in wanted:
        if name not in known:
            raise ValueError(f"{name!r} is none of {', '.join(known)}")
    return [name for name in known if name in wanted]
