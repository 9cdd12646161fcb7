"""The comparison of native linear attention with torch's."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from families import tiny_family
from places import SCRIPTS
from tiny import tiny_config, write_tiny_checkpoint

SCRIPT = SCRIPTS / "bench" / "linear_attention"


def run(model: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), str(model), "--tokens", "8", "--rounds", "1"]
    home = {**os.environ, "MOECHAT_HOME": str(model.parent / "home")}
    return subprocess.run(command, env=home, capture_output=True, text=True, timeout=120, check=False)


def test_both_ways_are_timed(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path / "tiny", tiny_family("qwen3_next"))
    done = run(tmp_path / "tiny")
    assert done.returncode == 0, done.stderr
    assert "3 layers with linear attention" in done.stdout
    medians = dict(re.findall(r"^(torch|native) +([\d.]+) ms", done.stdout, flags=re.MULTILINE))
    assert all(float(medians[way]) > 0 for way in ("torch", "native"))
    assert "native is" in done.stdout


def test_a_model_without_linear_attention_is_an_error(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path / "tiny", tiny_config("mixtral"))
    done = run(tmp_path / "tiny")
    assert done.returncode == 1
    assert "no linear attention" in done.stderr
