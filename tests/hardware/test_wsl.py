"""Detection of WSL2 by the name of the kernel."""

from __future__ import annotations

from pathlib import Path

import pytest

from moechat.hardware.wsl import in_wsl2


@pytest.mark.parametrize(
    ("release", "found"),
    [
        ("5.15.90.1-microsoft-standard-WSL2", True),
        ("6.6.36.3-microsoft-standard-WSL2+", True),
        ("6.1.0-custom-wsl2", True),
        ("4.4.0-19041-Microsoft", False),  # WSL1
        ("6.8.0-45-generic", False),
    ],
)
def test_wsl2_is_recognised_by_its_kernel(release: str, found: bool, tmp_path: Path) -> None:
    file = tmp_path / "osrelease"
    file.write_text(release + "\n")
    assert in_wsl2(file) is found
    assert not in_wsl2(tmp_path / "none")
