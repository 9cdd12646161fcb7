"""Random operations on cache, link and schedule under sanitizers, by the programs of ``scripts/sanitize``."""

from __future__ import annotations

import random
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

from fault_injection.phase import Outcome, Phase

_PROGRAMS = ("cache_test", "link_test", "schedule_test", "runner_test", "routing_test")
_SECONDS = 20  # of each program
_ROW = re.compile(r"^(\w+_test) +\S+ +\d+ +(\d+|-) +(\d+)$", re.MULTILINE)


class Native(Phase):
    """One program with another seed in each case; what is counted are its operations.

    Args:
        root: The clone.
        sanitizer: ``tsan`` or ``asan``. ``scripts/sanitize`` builds the programs at the first case.
    """

    kind = "operations"
    short = 0  # building takes minutes

    def __init__(self, root: Path, sanitizer: str) -> None:
        self.name = f"native-{sanitizer}"
        self._root = root
        self._sanitizer = sanitizer

    def cases(self, seed: int) -> Iterator[str]:
        generator = random.Random(f"{seed}:{self.name}")
        while True:
            for program in _PROGRAMS:
                yield f"{program}:{generator.randrange(1, 1 << 31)}"

    def run(self, case: str) -> Outcome:
        program, seed = case.split(":")
        command = [
            "scripts/sanitize",
            "--only",
            self._sanitizer,
            "--seconds",
            str(_SECONDS),
            "--seed",
            seed,
            program,
        ]
        done = subprocess.run(command, cwd=self._root, capture_output=True, text=True, check=False)
        row = _ROW.search(done.stdout)
        count = int(row[2]) if row and row[2].isdigit() else 1
        if done.returncode == 0:
            return Outcome(count=count)
        return Outcome(f"{program} failed", (done.stdout + done.stderr)[-3000:])
