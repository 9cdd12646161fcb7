"""What the system says about memory: the least of all limits counts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from moechat.hardware.memory import available_bytes

MEBI = 1 << 20


def write_group(directory: Path, files: dict[str, str]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (directory / name).write_text(text)


def version_1(limit: int, usage: int, inactive: int = 0, active: int = 0) -> dict[str, str]:
    return {
        "memory.limit_in_bytes": f"{limit}\n",
        "memory.usage_in_bytes": f"{usage}\n",
        "memory.stat": f"cache 1\ntotal_inactive_file {inactive}\ntotal_active_file {active}\n",
    }


def version_2(limit: int | str, usage: int, inactive: int = 0, active: int = 0) -> dict[str, str]:
    return {
        "memory.max": f"{limit}\n",
        "memory.current": f"{usage}\n",
        "memory.stat": f"anon 5\ninactive_file {inactive}\nactive_file {active}\n",
    }


def test_without_control_groups_the_machine_limits_memory(tmp_path: Path) -> None:
    here = psutil.virtual_memory().available
    assert available_bytes(tmp_path, tmp_path / "none") == pytest.approx(here, rel=0.2)


def test_the_page_cache_of_a_group_counts_as_available(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("4:memory:/a/b\n1:cpu:/\n")
    write_group(tmp_path / "memory" / "a" / "b", version_1(100 * MEBI, 70 * MEBI, 10 * MEBI, 5 * MEBI))
    assert available_bytes(tmp_path, own) == 45 * MEBI


def test_the_minimum_over_a_group_and_its_parents_counts(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("0::/a/b\n")
    write_group(tmp_path / "a" / "b", version_2("max", 70 * MEBI))
    write_group(tmp_path / "a", version_2(80 * MEBI, 75 * MEBI, 15 * MEBI))
    assert available_bytes(tmp_path, own) == 20 * MEBI
    write_group(tmp_path / "a" / "b", version_2(71 * MEBI, 70 * MEBI))
    assert available_bytes(tmp_path, own) == 1 * MEBI


def test_a_container_shows_its_own_group_at_the_root(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("0::/../../elsewhere/pod\n")
    write_group(tmp_path, version_2(64 * MEBI, 16 * MEBI))
    assert available_bytes(tmp_path, own) == 48 * MEBI


def test_a_full_group_has_no_memory_and_an_unlimited_one_does_not_count(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("4:memory:/\n")
    write_group(tmp_path / "memory", version_1(10 * MEBI, 12 * MEBI))
    assert available_bytes(tmp_path, own) == 0
    write_group(tmp_path / "memory", version_1(9223372036854771712, 12 * MEBI))
    assert available_bytes(tmp_path, own) > MEBI


# In a process of its own: threads of earlier tests also take and free memory.
_MEASURE = """
import numpy as np
from moechat.hardware.memory import give_back_unused, peak_resident_bytes, resident_bytes

give_back_unused()
before = resident_bytes()
block = np.ones(64 << 20, dtype=np.uint8)
used = resident_bytes()
del block
give_back_unused()
print(used - before, resident_bytes() - before, peak_resident_bytes() - before)
"""


def test_resident_and_peak_follow_what_is_used() -> None:
    done = subprocess.run([sys.executable, "-c", _MEASURE], capture_output=True, text=True, check=True)
    used, freed, peak = (int(word) for word in done.stdout.split())
    assert used > 56 * MEBI
    assert freed < 32 * MEBI
    assert peak > 56 * MEBI
