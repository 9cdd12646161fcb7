"""Timing the expert kernels alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from places import SCRIPTS

from moechat import _native

SCRIPT = SCRIPTS / "bench" / "kernels"
SMALL = ["--hidden", "128", "--intermediate", "64", "--mib", "1", "--rounds", "2"]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *SMALL, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_every_instruction_set_and_case_is_timed_in_every_round(tmp_path: Path) -> None:
    isas = _native.available_isas()[:2]
    done = run("--isas", ",".join(isas), "--bits", "4,16", "--tokens", "1,9", "--json", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "out").read_text())["rows"]
    cases = [(row["isa"], row["weights"], row["activation_bits"], row["tokens"]) for row in rows]
    each = [(4, 16, 1), (4, 16, 9), (4, 8, 1), (4, 8, 9), (16, 32, 1), (16, 32, 9)]
    assert cases == [(isa, *case) for isa in isas for case in each]
    assert all(len(row["runs"]) == 2 for row in rows)
    assert all(run["macs_per_s"] > 0 < run["share_of_streaming"] for row in rows for run in row["runs"])
    assert len(done.stdout.splitlines()) == 2 + len(rows)


def test_a_missing_instruction_set_is_an_error() -> None:
    done = run("--isas", "avx9000")
    assert done.returncode != 0
    assert "avx9000" in done.stderr
