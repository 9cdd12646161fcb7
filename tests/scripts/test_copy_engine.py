"""``scripts/bench/link/copy_engine.py``: how busy the link keeps the copy engine."""

from __future__ import annotations

import json
import subprocess
import sys

from places import ROOT


def test_every_block_size_is_measured_without_moving_bytes() -> None:
    script = ROOT / "scripts" / "bench" / "link" / "copy_engine.py"
    command = [sys.executable, str(script), "--json", "--rounds", "1", "--blocks", "100", "--bandwidth", "50"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    rows = json.loads(done.stdout)
    assert [row["block"] for row in rows] == ["221 KB", "442 KB", "3 MB"]
    for row in rows:
        assert 0 < row["busy"] <= 1
        assert row["largest"] <= 3 << 20  # a quarter of the window, or one block
        assert row["under_way"] >= 2
        assert row["submit"] > 0
