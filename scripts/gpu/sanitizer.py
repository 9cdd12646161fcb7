"""The third stage: the kernels under NVIDIA's compute-sanitizer, where that is installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from typing import Any

from gpu.parity import ROOT
from gpu.record import Cell

_TESTS = (
    "tests/offload/kernels/test_triton_blocks.py::test_every_encoding_matches_the_cpu",
    "tests/offload/kernels/test_packed_linear.py::test_outputs_match_the_cpu",
    "tests/offload/kernels/test_packed_linear.py::test_outputs_of_kept_weights_match_the_cpu",
)
_LIMIT_S = 240


def cells() -> list[Cell]:
    """Accesses outside of memory, and races in shared memory."""
    return [Cell(tool, lambda tool=tool: _under(tool), _LIMIT_S / 2) for tool in ("memcheck", "racecheck")]


def _under(tool: str) -> dict[str, Any]:
    places = [shutil.which("compute-sanitizer"), "/usr/local/cuda/bin/compute-sanitizer"]
    found = next((place for place in places if place and os.access(place, os.X_OK)), None)
    if found is None:
        return {"skipped": "compute-sanitizer is not installed"}
    command = [found, "--tool", tool, "--error-exitcode", "9", sys.executable, "-m", "pytest", "-q", *_TESTS]
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=_LIMIT_S
        )
    except subprocess.TimeoutExpired:
        return {"skipped": f"it took more than {_LIMIT_S} s"}
    if "Device not supported" in done.stdout:
        return {"skipped": "compute-sanitizer does not support this device here"}
    summary = [line for line in done.stdout.splitlines() if "ERROR SUMMARY" in line]
    return {"ok": done.returncode == 0, "summary": summary[-1] if summary else done.stdout[-1500:]}
