"""Detects the Windows Subsystem for Linux, where a GPU's driver is that of Windows."""

from __future__ import annotations

from pathlib import Path

_RELEASE = Path("/proc/sys/kernel/osrelease")
# Windows lends its GPU about half of the memory.
PINNED_SHARE = 0.5
MORE_PINNED = (
    "give WSL2 more memory with memory= under [wsl2] in %UserProfile%\\.wslconfig on Windows, then run "
    "`wsl --shutdown` there"
)


def in_wsl2(release: Path = _RELEASE) -> bool:
    """Whether this system is Linux under WSL2, by its kernel: ``5.15.90.1-microsoft-standard-WSL2``.

    WSL1 (``4.4.0-19041-Microsoft``) has no GPUs.

    Args:
        release: File with the release of the kernel.
    """
    try:
        name = release.read_text(encoding="ascii", errors="replace").lower()
    except OSError:
        return False
    return "microsoft-standard" in name or "wsl2" in name
