"""Starts the program from a process that has imported torch already.

Importing torch and transformers takes seconds of processor time, the work of a test often a tenth of one.
The server imports them once and forks a process for every start. That process has the arguments, variables,
descriptors, working directory and terminal of the start and then runs what ``python -m moechat`` runs, down
to the exit of the interpreter. It is a child of the test process, so signals, ``waitpid`` and ``Popen`` work
as with any other. In a shell, :attr:`ForkServer.command` takes the place of the program: it waits for the
forked process and ends with its status, but passes no signals on.

The server uses no thread before a fork. Variables that Python or a library may read at import are those of
the server: :func:`fork_server` starts one for each set of them. Tests of start-up itself start Python anew.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import forked_start
import pexpect
import ptyprocess

PR_SET_CHILD_SUBREAPER = 36
# Read when they are used, not when a library is imported.
LATE_VARIABLES = {"TERM", "COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "PWD", "EDITOR", "PAGER"}
LIBC = ctypes.CDLL(None, use_errno=True)


def early_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that a server has to be started with."""
    return {
        name: value
        for name, value in environment.items()
        if name == "MOECHAT_ISA" or not (name.startswith(("MOECHAT_", "PYTEST_")) or name in LATE_VARIABLES)
    }


# --- the server ---------------------------------------------------------------------------------------------


def serve(path: str) -> None:
    """Accept starts until the process that started this one is gone."""
    import moechat.cli.app
    import moechat.cli.main
    import moechat.engine  # noqa: F401 - torch and transformers

    parent = os.getppid()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(path)
    listener.listen()
    listener.settimeout(1)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the intermediate processes are not waited for
    # Keep the garbage collector from copying the pages of all modules in every process.
    gc.collect()
    gc.freeze()
    print("ready", flush=True)
    while os.getppid() == parent:
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            continue
        connection.setblocking(True)
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            listener.close()
            _start_program(connection)
            return  # in the program only, which runs when the server has left the stack
        connection.close()
    sys.exit(0)


def _start_program(connection: socket.socket) -> None:
    """Fork once more and become the program in the new process.

    The process between ends at once, which makes the program a child of the test process; or it waits for the
    program and sends its status.
    """
    request, descriptors = _receive(connection)
    between = os.getpid()
    program = os.fork()
    if program != 0:
        if request["wait"]:
            for one in descriptors:
                os.close(one)
            _, status = os.waitpid(program, 0)
            connection.sendall(json.dumps(os.waitstatus_to_exitcode(status)).encode())
        os._exit(0)
    if not request["wait"]:
        while os.getppid() == between:
            time.sleep(0.0005)
        connection.sendall(json.dumps(os.getpid()).encode())
    connection.close()
    _become(request, descriptors)


def _receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    size = int.from_bytes(connection.recv(4, socket.MSG_WAITALL), "little")
    data, descriptors, _, _ = socket.recv_fds(connection, size, 3)
    while len(data) < size:
        data += connection.recv(size - len(data))
    return json.loads(data), list(descriptors)


def _become(request: dict[str, Any], descriptors: list[int]) -> None:
    """Take over descriptors, directory, variables, session and arguments."""
    for target, opened in enumerate(request["open"]):
        if opened:
            one = descriptors.pop(0)  # above 2: the server has those itself
            os.dup2(one, target)
            os.close(one)
        else:
            os.close(target)
    if request["new_session"]:
        os.setsid()
    if request["terminal"]:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    # The server's streams have these descriptors too, and nothing in their buffers.
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if not request["open"][number]:
            setattr(sys, name, None)
            setattr(sys, f"__{name}__", None)
    if sys.stdout is not None:
        sys.stdout.reconfigure(line_buffering=sys.stdout.isatty())  # type: ignore[union-attr]
    import moechat.__main__ as program

    sys.argv = [str(program.__file__), *request["arguments"]]


# --- the client ---------------------------------------------------------------------------------------------


class ForkServer:
    """A server and starts through it.

    Args:
        environment: Variables that it is started with.

    Attributes:
        command: Starts the program in a shell.
        pid: Process id of the server, whose limits programs inherit.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="moechat-fork-")
        self._path = os.path.join(self._folder.name, "socket")
        self.command = [sys.executable, "-S", "-E", forked_start.__file__, self._path]
        self._process = subprocess.Popen(
            [sys.executable, __file__, self._path],
            env=dict(environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._process.stdout is not None
        self.pid = self._process.pid
        if self._process.stdout.readline() != b"ready\n":
            raise RuntimeError("the fork server did not start")

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()
        self._folder.cleanup()

    def spawn(
        self,
        arguments: Sequence[str],
        *,
        cwd: Path | str,
        environment: Mapping[str, str],
        descriptors: Sequence[int],
        new_session: bool = False,
        terminal: bool = False,
    ) -> int:
        """Start the program as a child of this process.

        Args:
            descriptors: Its standard input, output and error.
            new_session: It gets a session of its own.
            terminal: Its standard input becomes the controlling terminal of its session.

        Returns:
            The process id.
        """
        request = {
            "arguments": list(arguments),
            "cwd": str(cwd),
            "environment": dict(environment),
            "new_session": new_session or terminal,
            "terminal": terminal,
            "wait": False,
        }
        with _adopting():
            return forked_start.request_start(self._path, request, descriptors)

    def popen(
        self, arguments: Sequence[str], *, cwd: Path | str, env: Mapping[str, str], **options: Any
    ) -> subprocess.Popen[bytes]:
        """Start the program as ``Popen`` does."""
        return _ForkedPopen(self, list(arguments), cwd=cwd, env=env, **options)

    def terminal(
        self, arguments: Sequence[str], *, cwd: Path | str, env: Mapping[str, str], **options: Any
    ) -> pexpect.spawn[str]:
        """Start the program on a pseudo-terminal as ``pexpect.spawn`` does."""
        return _ForkedSpawn(self, list(arguments), cwd=cwd, env=env, **options)


@cache
def _server(early: frozenset[tuple[str, str]]) -> ForkServer:
    server = ForkServer(dict(early))
    atexit.register(server.close)
    return server


def fork_server(environment: Mapping[str, str]) -> ForkServer:
    """The server for programs with these variables, started when it is first needed."""
    return _server(frozenset(early_variables(environment).items()))


@contextmanager
def _adopting() -> Iterator[None]:
    """Make this process the parent of descendants whose own parent ends meanwhile."""
    LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        LIBC.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


class _ForkedPopen(subprocess.Popen):  # type: ignore[type-arg]
    def __init__(self, server: ForkServer, arguments: list[str], **options: Any) -> None:
        self._server = server
        super().__init__(arguments, **options)

    def _execute_child(self, args: list[str], *more: Any) -> None:
        # In the order of subprocess.Popen's own method, which is the same in Python 3.11 to 3.13.
        _, _, _, pass_fds, cwd, env, _, _, _, *pipes, _, _, _, _, _, new_session, _ = more
        read_in, write_in, read_out, write_out, read_error, write_error = pipes
        if pass_fds:
            raise ValueError("a forked program gets no other descriptors")
        wanted = [
            given if given != -1 else own for given, own in ((read_in, 0), (write_out, 1), (write_error, 2))
        ]
        try:
            self.pid = self._server.spawn(
                args, cwd=cwd, environment=env, descriptors=wanted, new_session=new_session
            )
            self._child_created = True
        finally:
            self._close_pipe_fds(read_in, write_in, read_out, write_out, read_error, write_error)


class _ForkedSpawn(pexpect.spawn):  # type: ignore[type-arg]
    def __init__(self, server: ForkServer, arguments: list[str], **options: Any) -> None:
        self._server = server
        super().__init__(sys.executable, arguments, **options)

    def _spawnpty(self, args: list[str], **options: Any) -> ptyprocess.PtyProcess:
        own, others = os.openpty()
        rows, columns = options.get("dimensions") or (24, 80)
        termios.tcsetwinsize(others, (rows, columns))
        try:
            pid = self._server.spawn(
                [os.fsdecode(one) for one in args[1:]],
                cwd=options["cwd"],
                environment=options["env"],
                descriptors=[others] * 3,
                terminal=True,
            )
        finally:
            os.close(others)
        os.set_inheritable(own, False)
        return ptyprocess.PtyProcess(pid, own)


if __name__ == "__main__":
    serve(sys.argv[1])
    from moechat.__main__ import _start

    sys.exit(_start())
