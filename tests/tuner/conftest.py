"""Every test has a home of its own: choices and statistics are kept there."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MOECHAT_HOME", str(tmp_path / "home"))
    return tmp_path / "home"
