"""Memory of the process and of the machine, as the system reports it."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

# Of the confined process while it waits, without what it shares with others; at work it has its own limits.
CONFINED_BYTES = 16 << 20
_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")


def resident_bytes() -> int:
    """Resident set size of this process, including mapped files."""
    return int(psutil.Process(os.getpid()).memory_info().rss)


def process_bytes() -> int:
    """What a budget counts for this process: its resident set, and that of its confined process.

    The second one renders templates and applies the rules of tokenizers (:mod:`moechat.confined`). Plans are
    made while it starts, so its usual size counts.
    """
    return resident_bytes() + CONFINED_BYTES


def peak_resident_bytes() -> int:
    """Peak resident set size of this process; the current one if the system does not record the peak."""
    try:
        with open("/proc/self/status", encoding="ascii") as status:
            for line in status:
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return resident_bytes()


def give_back_unused() -> None:
    """Return freed memory of this process to the system."""
    with suppress(OSError, AttributeError):  # only glibc has malloc_trim
        ctypes.CDLL(None).malloc_trim(0)


def total_bytes() -> int:
    """Memory of the machine."""
    return int(psutil.virtual_memory().total)


def available_bytes(cgroups: Path = _CGROUPS, own: Path = _OWN_CGROUPS) -> int:
    """Memory available to this process: the minimum over the machine and all its control groups.

    A group's page cache counts as available, because the system can drop it.

    Args:
        cgroups: Mount point of control groups.
        own: File with the control groups of this process.
    """
    rest = [int(psutil.virtual_memory().available), *_cgroup_rests(cgroups, own)]
    return max(0, min(rest))


def _cgroup_rests(cgroups: Path, own: Path) -> Iterator[int]:
    try:
        lines = own.read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, _, tail = line.partition(":")
        controllers, _, path = tail.partition(":")
        if "memory" in controllers.split(","):
            names = (
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
                "total_inactive_file",
                "total_active_file",
            )
            yield from _rests(cgroups / "memory", path, names)
        elif not controllers:
            names = ("memory.max", "memory.current", "inactive_file", "active_file")
            for root in (cgroups, cgroups / "unified"):
                yield from _rests(root, path, names)


def _rests(root: Path, path: str, names: tuple[str, str, str, str]) -> Iterator[int]:
    """Available memory in a group and its parents; inside a container the parents may be missing."""
    limit_name, usage_name, *file_names = names
    parts = [part for part in path.split("/") if part not in ("", "..")]
    for depth in range(len(parts), -1, -1):
        group = root.joinpath(*parts[:depth])
        try:
            limit = (group / limit_name).read_text(encoding="ascii").strip()
            usage = int((group / usage_name).read_text(encoding="ascii"))
            counts = dict(
                line.split() for line in (group / "memory.stat").read_text(encoding="ascii").splitlines()
            )
            files = sum(int(counts.get(name, 0)) for name in file_names)
        except (OSError, ValueError):
            continue
        if limit != "max" and int(limit) < 1 << 60:
            yield int(limit) - max(0, usage - files)
