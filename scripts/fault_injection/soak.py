"""Many answers of one process within a small budget: nothing grows, and equal prompts have equal answers."""

from __future__ import annotations

import http.client
import json
import os
import random
import re
import shutil
import signal
import tempfile
import time
from abc import abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import IO
from urllib.parse import urlsplit

from fault_injection.phase import Outcome, Phase
from fault_injection.programs import resident
from fault_injection.scene import Scene

_PROMPTS = (
    "Hi",
    "What can you do?",
    "Tell me a story about a fox named Mia.",
    "Tell me a story about a bear and a lamp.",
)
_TOKENS = 16
_SPARE_BYTES = 16 << 20  # of growth between the second and the last quarter
_PATIENCE_S = 60.0
# The threads of a new process begin one after the other: in less time they would seem to grow.
_SHORT_S = 6.0
_SAMPLE_S = 0.05


class Usage:
    """Resident memory, open files and threads of a process, over time."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._samples: list[tuple[int, int, int]] = []

    def sample(self) -> None:
        """Look once; nothing if the process is gone."""
        try:
            files = len(os.listdir(f"/proc/{self._pid}/fd"))
            threads = len(os.listdir(f"/proc/{self._pid}/task"))
        except OSError:
            return
        self.add(resident(self._pid), files, threads)

    def add(self, memory: int, files: int, threads: int) -> None:
        """Note one look."""
        self._samples.append((memory, files, threads))

    def growth(self) -> str:
        """What has grown from the second quarter of the time to the last; empty if nothing has."""
        quarter = len(self._samples) // 4
        if quarter < 2:
            return ""
        early, late = self._samples[quarter : 2 * quarter], self._samples[-quarter:]
        grown = []
        for place, (name, spare) in enumerate((("memory", _SPARE_BYTES), ("files", 0), ("threads", 0))):
            # Both look at a moment: only what stays above all that was before has grown.
            before, after = max(one[place] for one in early), min(one[place] for one in late)
            if after > before + spare:
                grown.append(f"{name} from {before} to {after}")
        return ", ".join(grown)


class Soak(Phase):
    """A process that answers for a while.

    Args:
        scene: See there.
        seconds: Of each case; the short form takes less.
    """

    kind = "soak"
    short = 1

    def __init__(self, scene: Scene, seconds: float) -> None:
        self._scene = scene
        self._seconds = seconds
        self._home = scene.work / f"home-{self.name}"

    def open(self) -> None:
        self._scene.control.disarm()

    def close(self) -> None:
        shutil.rmtree(self._home, ignore_errors=True)

    def cases(self, seed: int) -> Iterator[str]:
        """Seconds and the seed of the order of prompts; the first is short."""
        yield f"{_SHORT_S}:{seed}"
        number = seed
        while True:
            number += 1
            yield f"{self._seconds}:{number}"

    def run(self, case: str) -> Outcome:
        seconds, seed = case.split(":")
        with tempfile.TemporaryFile("w+") as log:
            try:
                return self.answer(float(seconds), random.Random(seed), log)
            except (OSError, RuntimeError, http.client.HTTPException) as error:
                log.seek(0)
                return Outcome(f"{type(error).__name__}: {error}"[:120], log.read()[-2000:])

    @abstractmethod
    def answer(self, seconds: float, generator: random.Random, log: IO[str]) -> Outcome:
        """Let it answer; ``log`` is its standard error."""


class Prompts(Soak):
    """One process that answers a file of prompts, with several turns each."""

    name = "soak-prompts"

    def answer(self, seconds: float, generator: random.Random, log: IO[str]) -> Outcome:
        command = ["run", "demo", "--jsonl", "-", "--temperature", "0", "--max-tokens", str(_TOKENS)]
        lines: list[list[str]] = []
        with tempfile.TemporaryDirectory(dir=self._scene.work) as folder:
            path = Path(folder) / "prompts.jsonl"
            command[3] = str(path)
            count = max(4, int(seconds * 12))
            for _ in range(count):
                lines.append([generator.choice(_PROMPTS) for _ in range(generator.choice((1, 1, 2)))])
            path.write_text("".join(json.dumps({"turns": turns}) + "\n" for turns in lines))
            command += ["--ram", self._scene.budget_of(command)]
            with tempfile.TemporaryFile() as out, open(os.devnull) as empty:
                pid = self._scene.programs.start(
                    command, self._home, [empty.fileno(), out.fileno(), log.fileno()]
                )
                usage = Usage(pid)
                status = _watch(pid, usage, _PATIENCE_S + 10 * seconds)
                out.seek(0)
                answers = [json.loads(line) for line in out.read().splitlines()]
        log.seek(0)
        said = log.read()
        if status != 0:
            return Outcome(f"exit {status}", said[-2000:], count)
        if len(answers) != count:
            return Outcome("answers are missing", f"{len(answers)} of {count}", count)
        first: dict[str, str] = {}
        for turns, answer in zip(lines, answers, strict=True):
            text = json.dumps([answer.get(key) for key in ("answer", "answers", "text", "turns", "error")])
            if first.setdefault(json.dumps(turns), text) != text:
                return Outcome("an answer differs from the first", f"{turns}: {text}", count)
        grown = usage.growth()
        return Outcome(f"{grown.split()[0]} grows" if grown else "", grown or f"{len(first)} kinds", count)


class Server(Soak):
    """``moechat serve`` answers one request after the other."""

    short = 0
    name = "soak-server"

    def answer(self, seconds: float, generator: random.Random, log: IO[str]) -> Outcome:
        command = ["serve", "demo", "--ram", self._scene.small_budget, "--port", "0"]
        with open(os.devnull, "r+") as null:
            pid = self._scene.programs.start(
                command, self._home, [null.fileno(), null.fileno(), log.fileno()]
            )
        usage = Usage(pid)
        count = 0
        try:
            client = http.client.HTTPConnection(_address(pid, log), timeout=_PATIENCE_S)
            first: dict[str, str] = {}
            end = time.monotonic() + seconds
            while time.monotonic() < end or count < len(_PROMPTS):
                prompt = generator.choice(_PROMPTS)
                text = _ask(client, prompt, stream=generator.random() < 0.3)
                count += 1
                usage.sample()
                if first.setdefault(prompt, text) != text:
                    return Outcome("an answer differs from the first", f"{prompt}: {text!r}", count)
            client.close()
        finally:
            os.kill(pid, signal.SIGTERM)
            status = _watch(pid, usage, _PATIENCE_S)
        log.seek(0)
        said = log.read()
        if status != 128 + signal.SIGTERM or "Traceback" in said:
            return Outcome(f"the server ended with {status}", said[-2000:], count)
        grown = usage.growth()
        return Outcome(f"{grown.split()[0]} grows" if grown else "", grown, count)


def _watch(pid: int, usage: Usage, patience: float) -> int:
    """Wait for a process, which is killed when the patience is at its end; its exit status."""
    end = time.monotonic() + patience
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        usage.sample()
        if time.monotonic() > end:
            os.kill(pid, signal.SIGKILL)
        time.sleep(_SAMPLE_S)


def _address(pid: int, log: IO[str]) -> str:
    """Host and port of the server, once it has its model."""
    end = time.monotonic() + _PATIENCE_S
    while time.monotonic() < end:
        found = re.search(r"listening on (http://\S+?)/v1", os.pread(log.fileno(), 1 << 16, 0).decode())
        if found:
            address = urlsplit(found[1]).netloc
            client = http.client.HTTPConnection(address, timeout=_PATIENCE_S)
            client.request("GET", "/health")
            ready = client.getresponse().status == 200
            client.close()
            if ready:
                return address
        if not os.path.exists(f"/proc/{pid}"):
            break
        time.sleep(_SAMPLE_S)
    raise RuntimeError("the server did not start")


def _ask(client: http.client.HTTPConnection, prompt: str, *, stream: bool) -> str:
    """The answer to a prompt, streamed or at once."""
    body = {
        "model": "demo",
        "messages": [{"role": "user", "content": prompt}],
        "temperature": 0,
        "max_tokens": _TOKENS,
        "stream": stream,
    }
    client.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = client.getresponse()
    data = response.read()
    if response.status != 200:
        raise RuntimeError(f"status {response.status}: {data[:200]!r}")
    if not stream:
        return str(json.loads(data)["choices"][0]["message"]["content"])
    parts = [line[6:] for line in data.decode().splitlines() if line.startswith("data: {")]
    deltas = (json.loads(part)["choices"] for part in parts)
    return "".join(choices[0]["delta"].get("content") or "" for choices in deltas if choices)
