"""The real program for the tests of the command line."""

from __future__ import annotations

import io
import os
import shlex
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pexpect
import pytest
from fork_server import fork_server
from terminal_support import hanging_up_ends_it

PROGRAM = [sys.executable, "-m", "moechat"]
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Enough for a cold start under load; no test waits for it to pass.
PATIENCE_S = 120
TERMINAL: dict[str, Any] = {"encoding": "utf-8", "timeout": PATIENCE_S, "dimensions": (40, 200)}


@dataclass
class Cli:
    """Runs the program with a library of its own, away from the source tree.

    With ``forked`` the program comes from a process that has imported torch already: for tests that are not
    about start-up, and of commands that load a model.

    Attributes:
        directory: Working directory.
        home: ``MOECHAT_HOME``.
    """

    directory: Path
    home: Path
    extra: dict[str, str] = field(default_factory=dict)

    @property
    def environment(self) -> dict[str, str]:
        kept = {
            name: value
            for name, value in os.environ.items()
            if name not in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES", "PYTHONIOENCODING", "PYTHONPATH")
        }
        return {
            **kept,
            "MOECHAT_HOME": str(self.home),
            "TERM": "xterm",
            "LC_ALL": "C.UTF-8",
            "HF_HUB_OFFLINE": "1",
            **self.extra,
        }

    def start(self, *arguments: str, forked: bool = False, **options: object) -> subprocess.Popen[bytes]:
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        if forked:
            return fork_server(self.environment).popen(
                arguments, cwd=self.directory, env=self.environment, **{**pipes, **options}
            )
        with hanging_up_ends_it():
            return subprocess.Popen(  # type: ignore[call-overload,no-any-return]
                [*PROGRAM, *arguments], cwd=self.directory, env=self.environment, **{**pipes, **options}
            )

    def run(self, *arguments: str, stdin: bytes | None = None, forked: bool = False) -> Result:
        source = {} if stdin is None else {"stdin": subprocess.PIPE}
        process = self.start(*arguments, forked=forked, **source)
        out, err = process.communicate(stdin, timeout=PATIENCE_S)
        return Result(process.returncode, out, err.decode())

    def call(self, *arguments: str, stdin: bytes = b"") -> Result:
        """Like :meth:`run`, inside this process: avoids the seconds of importing torch."""
        from moechat.cli.main import main

        streams = [io.TextIOWrapper(io.BytesIO(data), encoding="utf-8") for data in (stdin, b"", b"")]
        handlers = {number: signal.getsignal(number) for number in SIGNALS}
        with pytest.MonkeyPatch.context() as patch:
            for name, stream in zip(("stdin", "stdout", "stderr"), streams, strict=True):
                patch.setattr(sys, name, stream)
            for name, value in self.environment.items():
                patch.setenv(name, value)
            patch.chdir(self.directory)
            try:
                status = main(arguments)
            finally:
                for number, handler in handlers.items():
                    signal.signal(number, handler)
            _, out, err = (stream.buffer.getvalue() for stream in streams if not stream.flush())  # type: ignore[attr-defined]
        return Result(status, out, err.decode())

    def shell(self, script: str, *, forked: bool = False) -> Result:
        """Run a bash script in which ``$M`` is the program; its exit status is that of the first failing
        part."""
        program = fork_server(self.environment).command if forked else PROGRAM
        done = subprocess.run(
            ["bash", "-c", "set -o pipefail; " + script.replace("$M", shlex.join(program))],
            cwd=self.directory,
            env=self.environment,
            capture_output=True,
            timeout=PATIENCE_S,
        )
        return Result(done.returncode, done.stdout, done.stderr.decode())

    def terminal(self, *arguments: str, forked: bool = False) -> pexpect.spawn[str]:
        """Start the program on a pseudo-terminal."""
        if forked:
            return fork_server(self.environment).terminal(
                arguments, cwd=str(self.directory), env=self.environment, **TERMINAL
            )
        return self._spawn([*PROGRAM, *arguments])

    def terminal_shell(self, script: str) -> pexpect.spawn[str]:
        """Start a bash script on a pseudo-terminal in which ``$M`` is the program."""
        return self._spawn(["bash", "-c", script.replace("$M", shlex.join(PROGRAM))])

    def _spawn(self, command: list[str]) -> pexpect.spawn[str]:
        return pexpect.spawn(
            command[0],
            command[1:],
            cwd=str(self.directory),
            env=self.environment,  # type: ignore[arg-type]
            **TERMINAL,
        )


@dataclass(frozen=True)
class Result:
    """Exit status and output of a finished program."""

    status: int
    out: bytes
    err: str
