"""The parent's side of the confined process: starts it, sends requests, and ends it at a limit."""

from __future__ import annotations

import atexit
import marshal
import os
import select
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from moechat.confined.child import LENGTH, REQUEST
from moechat.confined.limits import Limits
from moechat.errors import MoechatError, one_line

_PACKAGES = ("jinja2", "markupsafe", "tokenizers")
# Variables that change what templates show: the local time. Everything else, tokens for example, stays here.
_VARIABLES = ("TZ", "TZDIR", "LD_LIBRARY_PATH")
_MORE_REPLY = 1 << 16  # bytes of a reply beyond four for each character of the result
_START_S = 60.0  # for its imports, on a very busy machine
_END_S = 5.0


class RefusedError(Exception):
    """The request failed by itself, for example because the template raised an exception."""


class LimitError(Exception):
    """A limit ended the request.

    Args:
        name: ``output``, ``steps``, ``memory``, ``time``, ``depth``; or why the process ended.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


class ConfinedProcess:
    """A child that answers one request at a time and is started when it is needed; for any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._ready = False
        self._owner = 0
        self._sent: set[str] = set()
        # Write end of a pipe to the child, to which nothing is written: the child ends when it closes.
        self._lifeline: int | None = None

    @property
    def pid(self) -> int | None:
        """Of the child; ``None`` while there is none."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the child without waiting for it, so that the first request finds it ready.

        Does nothing if it runs already, or if it cannot be started: then the first request reports it.
        """
        if self._lock.acquire(blocking=False):
            try:
                self._start()
            except MoechatError:
                pass
            finally:
                self._lock.release()

    def request(self, limits: Limits, name: str, *arguments: Any) -> str:
        """Let the child work.

        Args:
            limits: Of this request.
            name: A method of :class:`moechat.confined.child.Worker`.
            arguments: Of plain types, for ``marshal``.

        Raises:
            RefusedError: The method raised an exception.
            LimitError: A limit was reached; the child has ended.
            MoechatError: The child cannot be started.
        """
        with self._lock:
            return self._request(limits, name, arguments)

    def request_described(self, limits: Limits, name: str, key: str, description: str, text: str) -> str:
        """As :meth:`request`, with a description that is sent once for each child.

        Args:
            limits: Of this request.
            name: A method that takes key, description and text.
            key: Of the description.
            description: Sent if this child does not have it.
            text: Its last argument.

        Raises:
            RefusedError: As :meth:`request`.
            LimitError: As :meth:`request`.
        """
        with self._lock:
            self._start()
            known = key in self._sent
            result = self._request(limits, name, (key, "" if known else description, text))
            self._sent = {key}
            return result

    def close(self) -> None:
        """End the child; the next request starts another."""
        with self._lock:
            self._end()

    def _request(self, limits: Limits, name: str, arguments: tuple[Any, ...]) -> str:
        self._start()
        try:
            if not self._ready:
                self._exchange(b"", 0, time.monotonic() + _START_S)
                self._ready = True
            data = marshal.dumps((limits.memory, limits.cpu_s, name, *arguments))
            most = 4 * limits.output + _MORE_REPLY
            letter, text = self._exchange(
                REQUEST.pack(len(data)) + data, most, time.monotonic() + limits.wall_s
            )
        except BaseException:
            # Ctrl-C among others: a reply that comes later would be taken for that of the next request.
            self._end()
            raise
        if letter == b"O":
            return text
        if letter == b"E":
            raise RefusedError(text)
        self._end()
        raise LimitError(text)

    def _start(self) -> None:
        if self._process is not None and self._owner != os.getpid():  # a fork has copied this object
            self._forget()
        if self._process is not None and self._process.poll() is None:
            return
        self._end()
        environment = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
        environment |= {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
        program = Path(__file__).with_name("child.py")
        try:
            childs, self._lifeline = os.pipe()
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-I", "-S", str(program), str(childs), *_directories()],
                    pass_fds=(childs,),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    env=environment,
                    cwd="/",
                    start_new_session=True,  # the terminal's signals are for the parent
                    bufsize=0,
                )
            finally:
                os.close(childs)
        except OSError as error:
            self._cut_lifeline()
            raise MoechatError(
                f"the process that renders chat templates cannot be started: {one_line(error)}",
                hint="end other programs, or raise the limits of processes and open files (ulimit)",
            ) from error
        self._owner = os.getpid()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            os.set_blocking(stream.fileno(), False)

    def _exchange(self, data: bytes, most: int, deadline: float) -> tuple[bytes, str]:
        """Send a request and receive a reply."""
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        source, sink = process.stdout.fileno(), process.stdin.fileno()
        rest = memoryview(data)
        poll = select.poll()
        poll.register(source, select.POLLIN)
        if rest:
            poll.register(sink, select.POLLOUT)
        reply = bytearray()
        wanted = LENGTH.size
        while len(reply) < wanted:
            left = deadline - time.monotonic()
            if left <= 0:
                raise LimitError("time")
            for descriptor, _ in poll.poll(left * 1000):
                if descriptor == sink:
                    try:
                        rest = rest[os.write(sink, rest) :]
                    except BrokenPipeError:
                        rest = rest[len(rest) :]
                    if not rest:
                        poll.unregister(sink)
                    continue
                part = os.read(source, min(wanted - len(reply), 1 << 20))
                if not part:
                    raise LimitError(self._reason())
                reply += part
                if len(reply) == wanted == LENGTH.size:
                    size = LENGTH.unpack(reply)[1]
                    if size > most + _MORE_REPLY:
                        raise LimitError("output")
                    wanted += size
        return bytes(reply[:1]), reply[LENGTH.size :].decode("utf-8", "surrogatepass")

    def _reason(self) -> str:
        """Why the child has ended."""
        assert self._process is not None
        try:
            status = self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            return "time"
        if status == -signal.SIGPROF:
            return "time"
        if status in (-signal.SIGABRT, -signal.SIGKILL):  # libraries abort if they get no memory
            return "memory"
        return f"ended with status {status}" if status >= 0 else f"ended by {signal.Signals(-status).name}"

    def _end(self) -> None:
        process = self._process
        if process is None:
            return
        if self._owner == os.getpid():
            process.kill()
            with suppress(subprocess.TimeoutExpired):
                process.wait(_END_S)
        self._forget()

    def _forget(self) -> None:
        process, self._process = self._process, None
        self._ready = False
        self._sent = set()
        self._cut_lifeline()
        if process is None:
            return
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with suppress(OSError):
                    stream.close()
        if process.returncode is None:
            process.returncode = 0  # of another process: nothing to wait for

    def _cut_lifeline(self) -> None:
        lifeline, self._lifeline = self._lifeline, None
        if lifeline is not None:
            os.close(lifeline)


def _directories() -> list[str]:
    """Where the packages that the child needs are installed."""
    found = (find_spec(name) for name in _PACKAGES)
    places = (Path(spec.origin).parent.parent for spec in found if spec is not None and spec.origin)
    return list(dict.fromkeys(map(str, places)))


SHARED = ConfinedProcess()
atexit.register(SHARED.close)
