"""Timing layers that link and CPU share."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from places import SCRIPTS

from moechat import _native

SCRIPT = SCRIPTS / "bench" / "hybrid"
SMALL = ["--hidden", "128", "--intermediate", "640", "--experts", "6", "--tokens", "4", "--rounds", "2"]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *SMALL, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_every_link_and_treatment_of_misses_is_timed(tmp_path: Path) -> None:
    done = run("--links", "0.01,1", "--json", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "out").read_text())["rows"]
    layout = _native.BlockLayout(128, 640, 4)
    missing = 2 * layout.blocks * layout.record_bytes
    assert [row["link_bytes_a_second"] for row in rows] == [1e7, 1e9]
    for row in rows:
        assert set(row["layer_ms"]) == {"fetch", "compute", "both"}
        # Nothing was resident: all bytes come over the link where all are fetched.
        assert row["layer_ms"]["fetch"] >= 1e3 * missing / row["link_bytes_a_second"]
        assert 0 <= row["cpu_share"] <= 1
    assert rows[0]["cpu_share"] > 0.8, "a link that slow is left nearly alone"


def test_too_few_experts_are_refused() -> None:
    done = run("--experts", "3")
    assert done.returncode == 2
    assert "twice" in done.stderr
