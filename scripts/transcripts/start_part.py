"""How long commands take from start to end, and the first token of an answer."""

from __future__ import annotations

import os
import statistics
import subprocess
import time
from collections.abc import Sequence
from typing import NamedTuple

from stage import Stage

_ASK = {"_MOECHAT_COMPLETE": "complete_bash", "COMP_WORDS": "moechat run de", "COMP_CWORD": "2"}
_ROWS: tuple[tuple[str, list[str], dict[str, str], str], ...] = (
    ("moechat --help", ["--help"], {}, "run"),
    ("moechat --version", ["--version"], {}, "moechat 0"),
    ("moechat list", ["list"], {}, ""),
    ("moechat show demo", ["show", "demo"], {}, "qwen3_moe"),
    ("moechat sessions", ["sessions"], {}, ""),
    ("moechat doctor", ["doctor"], {}, "moechat"),
    ("completion of moechat run de", [], _ASK, "demo"),
    ('moechat run demo "hi"', ["run", "demo", "hi", "--seed", "1"], {}, ""),
)


class Timed(NamedTuple):
    """Seconds of one run: to the first byte on stdout, to the end, and of CPU."""

    first: float
    wall: float
    cpu: float


def timed(stage: Stage, title: str, arguments: Sequence[str], more: dict[str, str], says: str) -> Timed:
    """Run the program once."""
    begun = time.perf_counter()
    process = subprocess.Popen(
        [str(stage.program / "moechat"), *arguments],
        cwd=stage.work,
        env={**stage.environment, **more},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert process.stdout is not None
    out = os.read(process.stdout.fileno(), 1 << 16)
    first = time.perf_counter() - begun
    out += process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    wall = time.perf_counter() - begun
    process.returncode = os.waitstatus_to_exitcode(status)
    process.stdout.close()
    stage.record.check(process.returncode == 0, f"{title}: status {process.returncode}")
    stage.record.check(says in out.decode(), f"{title} does not say {says!r}")
    return Timed(first, wall, usage.ru_utime + usage.ru_stime)


def start(stage: Stage) -> None:
    """Times of starting, after one run that is not counted; in turns."""
    times: dict[str, list[Timed]] = {title: [] for title, *_ in _ROWS}
    load = os.getloadavg()[0]
    for turn in range(stage.runs + 1):
        for title, arguments, more, says in _ROWS:
            found = timed(stage, title, arguments, more, says)
            if turn:
                times[title].append(found)
    lines = [
        f"median of {stage.runs} runs, least and most; {os.cpu_count()} cores, load {load:.1f} before",
        "",
        f"{'':38}{'wall s':>26}{'CPU s':>26}",
    ]
    for title, found in times.items():
        name = title if not title.endswith('"hi"') else f"{title} to exit"
        if name != title:
            lines.append(f"{title + ' to first token':38}{_spread([one.first for one in found]):>26}")
        wall, cpu = _spread([one.wall for one in found]), _spread([one.cpu for one in found])
        lines.append(f"{name:38}{wall:>26}{cpu:>26}")
    stage.record.show("\n" + "\n".join(lines))


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f}..{max(values):.2f})"
