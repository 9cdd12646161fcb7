"""Every system on traces, machines and shares, with ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from made_routing import MadeRouting
from places import SCRIPTS

PRINTED = ["on-demand", "moe-infinity", "static"]


def systems(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPTS / "bench" / "systems"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)


def test_every_system_has_a_rank_at_every_share(tmp_path: Path) -> None:
    path = tmp_path / "made.npz"
    MadeRouting(4, 8, 2, 0.9, 0.4).trace(90).write(path)
    arguments = [str(path), "--profiles", "rtx3060-12g", "--fractions", "1/4,1/2", "--tokens", "60"]
    arguments += ["--warmup", "30", "--systems", "auto," + ",".join(PRINTED)]
    done = systems(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    table = json.loads(done.stdout)[0]
    assert list(table["cases"]) == ["auto", *PRINTED]
    times = {name: cases["0.25"]["tpot_ms"] for name, cases in table["cases"].items()}
    lines = systems(*arguments).stdout.splitlines()
    assert "1/4" in lines[1]
    assert "1/2" in lines[1]
    rows = {line.split()[0]: line.split() for line in lines[2 : 2 + len(times)]}
    ranked = sorted(times, key=times.__getitem__)
    for name, time in times.items():
        assert rows[name][1] == f"{time:.2f}"
        assert rows[name][2] == f"#{1 + ranked.index(name)}" or list(times.values()).count(time) > 1
    assert lines[-len(times)].startswith("auto")
    assert lines[-len(times)].split()[-1] == "1.000"


def test_a_trace_that_does_not_exist_is_named(tmp_path: Path) -> None:
    done = systems(str(tmp_path / "none.npz"))
    assert done.returncode == 2
    assert "none.npz" in done.stderr
