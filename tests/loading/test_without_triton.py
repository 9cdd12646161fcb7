"""A machine without a GPU and without Triton."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys
sys.modules["triton"] = None  # as on a machine without it: importing it fails
from moechat.cli.main import main
sys.exit(main(["run", "demo", "hello", "--vram", "1G"]))
"""


def test_a_missing_gpu_is_reported_before_a_missing_triton() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2, done.stderr
    assert "no CUDA GPU can be used" in done.stderr
    assert "triton" not in done.stderr
