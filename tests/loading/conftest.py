"""Fixtures of the tests with GGUF files."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def moechat_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fresh home for library and state."""
    home = tmp_path / "home"
    monkeypatch.setenv("MOECHAT_HOME", str(home))
    return home
