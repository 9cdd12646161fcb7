"""Signals at random moments of a run, from the first instruction to the last."""

from __future__ import annotations

import random
import re
import shutil
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fault_injection.phase import Outcome, Phase, ended_badly, first_line
from fault_injection.programs import Ran
from fault_injection.scene import DEMO, Scene, replace_tree

_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP")
PARTS = ("start", "load", "convert", "answer", "pipe", "list")
_MAIN = re.compile(r'moechat/cli/main\.py", line \d+, in (main|end_on_signals)')
_AFTER_THE_END = 1.1  # moments are drawn up to so many durations of the undisturbed run


@dataclass(frozen=True)
class Moment:
    """A run that a signal ends.

    Attributes:
        arguments: Of the command.
        home: State of ``MOECHAT_HOME`` before; ``None``: not there.
        stdin: Standard input.
        cold: Python is started anew, so that the signal may come while it starts.
        changes: It writes files, so a plain run follows.
    """

    arguments: Sequence[str]
    home: Path | None
    stdin: bytes = b""
    cold: bool = False
    changes: bool = False


class Signals(Phase):
    """Signals in one kind of run.

    Args:
        scene: See there.
        part: Which: start, load, convert, answer, pipe or list.
    """

    kind = "signals"

    def __init__(self, scene: Scene, part: str) -> None:
        self.name = f"signals-{part}"
        self.short = {"load": 3, "list": 3}.get(part, 0)
        self._scene = scene
        self._part = part
        self._home = scene.work / f"home-{self.name}"

    def _prepare(self) -> Moment:
        scene = self._scene
        answer = scene.answer(scene.source)
        if self._part == "start":
            return Moment(answer, scene.converted, cold=True)
        if self._part == "list":
            return Moment(["list"], scene.converted, cold=True)
        if self._part == "load":
            return Moment(answer, scene.converted)
        if self._part == "convert":
            return Moment(answer, None, changes=True)
        if self._part == "answer":
            return Moment(scene.answer(DEMO, "Tell me a story about a fox.", 120), scene.converted)
        if self._part == "pipe":
            text = b"A long text. " * 4
            return Moment(scene.answer(scene.source, "What is this?", 40), scene.converted, text)
        raise ValueError(f"no part {self._part!r}")

    def open(self) -> None:
        self._moment = self._prepare()
        replace_tree(self._moment.home, self._home)
        self._run_plainly()  # fills caches of files
        if self._moment.changes:
            replace_tree(self._moment.home, self._home)
        self._reference = self._run_plainly()
        if self._reference.status != 0:
            raise RuntimeError(f"{self.name}: the undisturbed run failed: {self._reference.summary}")

    def close(self) -> None:
        shutil.rmtree(self._home, ignore_errors=True)

    def cases(self, seed: int) -> Iterator[str]:
        generator = random.Random(f"{seed}:{self.name}")
        while True:
            yield f"{generator.choice(_SIGNALS)}:{generator.random():.4f}"

    def run(self, case: str) -> Outcome:
        name, part = case.split(":")
        number = signal.Signals[name]
        moment = self._moment
        if moment.changes:
            replace_tree(moment.home, self._home)
        delay = float(part) * _AFTER_THE_END * self._reference.seconds
        self._scene.control.disarm()
        ran = self._scene.programs.run(
            moment.arguments, self._home, stdin=moment.stdin, kill_after=(number, delay), cold=moment.cold
        )
        detail = f"after {delay:.3f} s: {ran.err[-1500:]}"
        if "Traceback (most recent call last)" in ran.err:
            # While Python starts and the package is imported, Python ends on Ctrl-C in its own way: with a
            # traceback, and with status 1 where it could not even begin.
            if not ran.out and not _MAIN.search(ran.err) and "KeyboardInterrupt" in ran.err:
                return Outcome(detail="before the command began")
            return Outcome(f"traceback: {ran.err.strip().splitlines()[-1][:100]}", detail)
        # The signal's own effect, where Python has not taken it over yet, or not any more.
        if ran.status not in (-number, 128 + number):
            late = ended_badly(ran, self._answer())
            if late.fell or ran.status != 0:
                return Outcome(late.fell or f"exit {ran.status}: {first_line(ran.err)}", detail)
        if moment.changes:
            again = self._run_plainly()
            bad = ended_badly(again, self._answer())
            if bad.fell or again.status != 0:
                return Outcome(f"next run: {bad.fell or first_line(again.err)}", detail)
        return Outcome()

    def _answer(self) -> bytes | None:
        return None if self._part == "list" else self._reference.out  # it says how long ago a model was used

    def _run_plainly(self) -> Ran:
        self._scene.control.disarm()
        return self._scene.programs.run(
            self._moment.arguments, self._home, stdin=self._moment.stdin, cold=self._moment.cold
        )
