"""The real server for tests: a process of its own, and small clients."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

PATIENCE_S = 120


@dataclass
class ServerProcess:
    """A running server.

    Attributes:
        process: The program.
        url: Its address, without a path.
        log: File with its stderr.
        may_end: It was told to end.
    """

    process: subprocess.Popen[bytes]
    url: str
    log: Path
    may_end: bool = False

    def client(self, **options: Any) -> httpx.Client:
        """A client for it."""
        return httpx.Client(base_url=self.url, timeout=PATIENCE_S, **options)

    def wait_ready(self) -> None:
        """Wait until the model is loaded."""
        with self.client() as client:
            for _ in range(PATIENCE_S * 20):
                if client.get("/health").status_code == 200:
                    return
                time.sleep(0.05)
        raise AssertionError(self.log.read_text())

    def metric(self, name: str) -> float:
        """A value of /metrics, without the prefix."""
        with self.client() as client:
            text = client.get("/metrics").text
        found = re.search(rf"^moechat_{re.escape(name)} (\S+)$", text, re.MULTILINE)
        assert found, text
        return float(found[1])

    def wait_idle(self) -> None:
        """Wait until nothing is answered or waits."""
        for _ in range(PATIENCE_S * 20):
            if self.metric("answers_running") == self.metric("requests_waiting") == 0:
                return
            time.sleep(0.05)
        raise AssertionError("answers go on")


@contextmanager
def serving(directory: Path, *arguments: str, ready: bool = True) -> Iterator[ServerProcess]:
    """Run ``moechat serve`` with a free port.

    Args:
        directory: For its log, which is checked for tracebacks at the end.
        arguments: After the port.
        ready: Wait until the model is loaded.
    """
    log = directory / f"serve-{time.monotonic_ns()}.log"
    with open(log, "wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "moechat", "serve", "--port", "0", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=file,
            cwd=directory,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "LC_ALL": "C.UTF-8"},
        )
    server: ServerProcess | None = None
    try:
        server = ServerProcess(process, _url(process, log), log)
        if ready:
            server.wait_ready()
        yield server
        assert server.may_end or process.poll() is None, log.read_text()
    finally:
        # A second signal would cut short what the first one has begun.
        if server is None or not server.may_end:
            process.terminate()
        try:
            process.wait(PATIENCE_S)
        finally:
            process.kill()
    assert process.returncode == 143
    assert "Traceback" not in log.read_text()
    assert "unexpected" not in log.read_text()


def run(*arguments: str, stdin: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    """``moechat run`` with these arguments."""
    return subprocess.run(
        [sys.executable, "-m", "moechat", "run", *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
        env={**os.environ, "HF_HUB_OFFLINE": "1", **variables},
    )


def _url(process: subprocess.Popen[bytes], log: Path) -> str:
    for _ in range(PATIENCE_S * 20):
        found = re.search(r"listening on (http://\S+?)/v1", log.read_text())
        if found:
            return found[1]
        assert process.poll() is None, log.read_text()
        time.sleep(0.05)
    raise AssertionError(log.read_text())


def sse_events(lines: Iterator[str]) -> Iterator[tuple[str, Any]]:
    """Parse a stream of server-sent events: name and JSON value, or the text of ``[DONE]``."""
    name, data = "", []
    for line in lines:
        if not line:
            if data:
                text = "\n".join(data)
                yield name, text if text == "[DONE]" else json.loads(text)
            name, data = "", []
            continue
        key, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if key == "event":
            name = value
        elif key == "data":
            data.append(value)
        else:
            assert key == "", line
