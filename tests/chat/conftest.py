"""Fixtures of the chat's tests."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home of its own: no test may touch the user's conversations."""
    monkeypatch.setenv("MOECHAT_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("MOECHAT_NO_SAVE", raising=False)
    return tmp_path / "home"
