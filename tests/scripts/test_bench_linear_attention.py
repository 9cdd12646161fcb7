"""The comparison of native linear attention and Mamba-2 with torch's."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from families import tiny_family
from places import SCRIPTS
from tiny import tiny_config, write_tiny_checkpoint

SCRIPT = SCRIPTS / "bench" / "linear_attention"


def run(model: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), str(model), "--tokens", "8", "--prompt", "20", "--rounds", "2"]
    home = {**os.environ, "MOECHAT_HOME": str(model.parent / "home")}
    return subprocess.run(command, env=home, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize(("family", "layers"), [("qwen3_next", 3), ("nemotron_h", 1)])
def test_both_ways_are_timed(family: str, layers: int, tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path / "tiny", tiny_family(family))
    done = run(tmp_path / "tiny")
    assert done.returncode == 0, done.stderr
    assert f"{layers} layers with linear attention" in done.stdout
    for what in ("a prompt of 20 tokens", "a token"):
        medians = dict(re.findall(rf"^(torch|native) +([\d.]+) ms {what}", done.stdout, flags=re.MULTILINE))
        assert all(float(medians[way]) > 0 for way in ("torch", "native"))
    assert done.stdout.count("native is") == 2


def test_a_model_without_linear_attention_is_an_error(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path / "tiny", tiny_config("mixtral"))
    done = run(tmp_path / "tiny")
    assert done.returncode == 1
    assert "no linear attention" in done.stderr
