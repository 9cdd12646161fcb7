"""Fixtures of the tuner tests: each test has its own home directory for choices and statistics."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MOECHAT_HOME", str(tmp_path / "home"))
    return tmp_path / "home"
