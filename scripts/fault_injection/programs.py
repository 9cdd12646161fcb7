"""Starts the program, watches its time and memory, and says how it ended."""

from __future__ import annotations

import os
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fork_server import ForkServer, early_variables

from fault_injection.shim import Control

HANG_S = 20.0  # without an end; if the machine is busy, only one that waits or has computed for long hangs
_HANG_CPU_S = 10.0
_IDLE_S = 5.0
_HANG_AT_MOST_S = 120.0
SPARE_BYTES = 1 << 30  # beyond the peak of the undisturbed run
_MOST_BYTES = 3 << 30  # of a run whose undisturbed peak is not known
_DATA_LIMIT_BYTES = 6 << 30  # the kernel's own limit, in case the peak comes between two looks
_LOOK_S = 0.02
_PAGE = resource.getpagesize()


@dataclass(frozen=True)
class Ran:
    """A finished run of the program.

    Attributes:
        status: Exit status; minus the signal that ended it.
        out: Standard output.
        err: Standard error.
        seconds: From the start to the end.
        peak_bytes: Most resident memory.
        stopped: ``hang`` or ``memory`` if it was ended for that; else empty.
    """

    status: int
    out: bytes
    err: str
    seconds: float
    peak_bytes: int
    stopped: str = ""

    @property
    def summary(self) -> str:
        """How it ended, for people."""
        how = f"stopped for {self.stopped}" if self.stopped else f"status {self.status}"
        return f"{how} after {self.seconds:.1f} s; {self.err[-500:]}"


class Programs:
    """Starts the program, from a process that has imported torch, or anew.

    Args:
        work: Directory for files of the server.
        control: The page of the preloaded library.
        shim: That library.
        variables: Variables that the program has beside those of every start.
    """

    def __init__(
        self, work: Path, control: Control, shim: Path, variables: Mapping[str, str] | None = None
    ) -> None:
        self.control = control
        self._work = work
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("MOECHAT_", "HF_", "PYTHON"))
            and name not in ("NO_COLOR", "FORCE_COLOR", "TQDM_DISABLE")
        }
        self._environment = {
            **kept,
            "LD_PRELOAD": str(shim),
            "FAULTS_CONTROL": str(control.path),
            "HF_HUB_OFFLINE": "1",
            "LC_ALL": "C.UTF-8",
            "TERM": "xterm",
            "MOECHAT_NO_DAEMON": "1",
            **(variables or {}),
        }
        self._server: ForkServer | None = None

    def close(self) -> None:
        """End the process that programs are forked from."""
        if self._server is not None:
            self._server.close()
            self._server = None

    def environment(self, home: Path) -> dict[str, str]:
        """The variables of a start."""
        return {**self._environment, "MOECHAT_HOME": str(home)}

    def start(
        self, arguments: Sequence[str], home: Path, descriptors: Sequence[int], *, cold: bool = False
    ) -> int:
        """Start the program; returns its process id, a child of this process.

        Args:
            arguments: Of the command.
            home: Its ``MOECHAT_HOME``.
            descriptors: Standard input, output and error.
            cold: Start Python anew, else fork a process with torch.
        """
        environment = self.environment(home)
        if cold:
            actions = [(os.POSIX_SPAWN_DUP2, one, number) for number, one in enumerate(descriptors)]
            command = [sys.executable, "-m", "moechat", *arguments]
            return os.posix_spawn(
                sys.executable,
                command,
                environment,
                file_actions=actions,
                setsigdef=[signal.SIGINT, signal.SIGHUP, signal.SIGPIPE],
            )
        if self._server is None:
            self._server = ForkServer(early_variables(environment))
            limit = (_DATA_LIMIT_BYTES, _DATA_LIMIT_BYTES)
            resource.prlimit(self._server.pid, resource.RLIMIT_DATA, limit)
        return self._server.spawn(arguments, cwd=self._work, environment=environment, descriptors=descriptors)

    def run(
        self,
        arguments: Sequence[str],
        home: Path,
        *,
        stdin: bytes = b"",
        most_bytes: int = _MOST_BYTES,
        kill_after: tuple[int, float] | None = None,
        cold: bool = False,
    ) -> Ran:
        """Run the program to its end; see :meth:`start`.

        Args:
            arguments: Of the command.
            home: Its ``MOECHAT_HOME``.
            stdin: Its standard input.
            most_bytes: It is ended when it has more memory.
            kill_after: A signal, and the seconds after which it is sent.
            cold: Start Python anew.
        """
        with (
            tempfile.TemporaryFile() as given,
            tempfile.TemporaryFile() as out,
            tempfile.TemporaryFile() as err,
        ):
            given.write(stdin)
            given.seek(0)
            begin = time.monotonic()
            pid = self.start(arguments, home, [one.fileno() for one in (given, out, err)], cold=cold)
            status, peak, stopped = _wait(pid, begin, most_bytes, kill_after)
            seconds = time.monotonic() - begin
            out.seek(0)
            err.seek(0)
            return Ran(status, out.read(), err.read().decode(errors="replace"), seconds, peak, stopped)


def _wait(
    pid: int, begin: float, most_bytes: int, kill_after: tuple[int, float] | None
) -> tuple[int, int, str]:
    """Status, peak of memory in bytes, and why it was stopped."""
    stopped = ""
    hang = _Hang(pid, begin)
    while True:
        done, status, usage = os.wait4(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status), usage.ru_maxrss << 10, stopped
        now = time.monotonic() - begin
        if kill_after is not None and now >= kill_after[1]:
            os.kill(pid, kill_after[0])
            kill_after = None
        if not stopped and now > HANG_S and hang.is_one():
            stopped = "hang"
        if not stopped and resident(pid) > most_bytes:
            stopped = "memory"
        if stopped:
            os.kill(pid, signal.SIGKILL)
        pause = _LOOK_S if now > 0.2 else _LOOK_S / 4
        time.sleep(pause if kill_after is None else max(0.0, min(pause, kill_after[1] - now)))


class _Hang:
    """Tells a process that hangs from one that has waited for a processor."""

    def __init__(self, pid: int, begin: float) -> None:
        self._pid = pid
        self._begin = begin
        self._seen = (0.0, begin)  # its processor time, and when that was last more

    def is_one(self) -> bool:
        """Whether it hangs; asked after ``HANG_S``."""
        now = time.monotonic()
        used = _processor_seconds(self._pid)
        if used > self._seen[0] + 0.05:
            self._seen = (used, now)
        idle = now - max(self._seen[1], self._begin + HANG_S) > _IDLE_S
        return used > _HANG_CPU_S or idle or now - self._begin > _HANG_AT_MOST_S


def _processor_seconds(pid: int) -> float:
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident(pid: int) -> int:
    """Resident bytes of a process; 0 if it is gone."""
    try:
        with open(f"/proc/{pid}/statm") as file:
            return int(file.read().split()[1]) * _PAGE
    except (OSError, IndexError):
        return 0
