"""The table of what attention reads on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from places import SCRIPTS

pytest.importorskip("triton")


def test_the_table_has_the_bytes_of_keys_and_values() -> None:
    command = [sys.executable, str(SCRIPTS / "bench" / "attention_bytes"), "--contexts", "1024"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False, env=os.environ)
    assert done.returncode == 0, done.stderr
    (row,) = [line for line in done.stdout.splitlines() if line.startswith("| mixtral")]
    _, _, context, before, after, *times, _ = (cell.strip() for cell in row.split("|"))
    assert context == "1,024"
    # 1,024 keys and values of 8 heads of 128 in bfloat16, in 32 layers; copies for 4 query heads of each.
    plain = 1024 * 8 * 128 * 2 * 2 * 32 / 1e6
    assert float(before.replace(",", "")) == pytest.approx(9 * plain, rel=0.01)
    assert plain < float(after) < 1.2 * plain
    assert float(times[0].split()[0]) == pytest.approx(float(after) / 360, abs=0.01)
