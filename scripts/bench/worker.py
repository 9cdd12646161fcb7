"""A process that measures what it is told to: requests and answers are lines of JSON.

A request is an object with the name of a function under ``do`` and its arguments; the answer is what the
function returns, or ``{"error": TEXT}``. The end of the input ends the process. Needs the standard library
only: one end may run under an interpreter without moechat.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any


def serve(functions: Mapping[str, Callable[..., Any]]) -> None:
    """Answer requests until there are no more. What libraries print goes to stderr."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = functions[request.pop("do")](**request)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


class WorkerError(Exception):
    """A worker could not do what it was asked for."""


class Worker:
    """The other end; a context manager, at whose end the process is gone.

    Attributes:
        name: For messages.
    """

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str | None]) -> None:
        """Start the process.

        Args:
            name: For messages.
            command: Program and arguments.
            environment: Variables, beside those of this process; those that are ``None`` are left out.

        Raises:
            WorkerError: There is no such program.
        """
        self.name = name
        self._doing = ""
        variables = {**os.environ, **environment}
        self._stderr = tempfile.TemporaryFile(mode="w+b")  # noqa: SIM115 - closed with the process
        try:
            self._process = subprocess.Popen(
                list(command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                env={name: value for name, value in variables.items() if value is not None},
                text=True,
            )
        except OSError as error:
            self._stderr.close()
            raise WorkerError(f"{name} cannot be started: {error}") from error

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Closing its input ends a process that waits; one that computes is of no use to anyone.
        if error is not None:
            self._process.kill()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(OSError):
            self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()
        self._stderr.close()

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Let it call a function; returns the answer.

        Raises:
            WorkerError: It failed, or the process has ended.
        """
        self.post(do, **arguments)
        return self.answer()

    def post(self, do: str, **arguments: Any) -> None:
        """Let it begin to call a function; :meth:`answer` must follow."""
        assert self._process.stdin is not None
        self._doing = do
        with suppress(OSError):  # what became of the process is told when it should answer
            self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """What the function of the last :meth:`post` returned.

        Raises:
            WorkerError: It failed, or the process has ended.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            status = self._process.wait()
            raise WorkerError(
                f"{self.name} ended with status {status} at {self._doing!r}; it said: {self._said()}"
            )
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise WorkerError(
                f"{self.name} failed at {self._doing!r}: {answer['error']}; it said: {self._said()}"
            )
        return answer

    def _said(self) -> str:
        self._stderr.seek(0)
        text = self._stderr.read().decode("utf-8", "replace").strip()
        return text[-2000:] or "nothing"
