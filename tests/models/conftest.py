"""Fixtures of the model tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from first_token import FirstToken, compute_first_token


@pytest.fixture
def moechat_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fresh home for library and state."""
    home = tmp_path / "home"
    monkeypatch.setenv("MOECHAT_HOME", str(home))
    return home


@pytest.fixture(scope="session")
def first_token() -> FirstToken:
    return compute_first_token()
