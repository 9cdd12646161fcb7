"""Fixtures of the chat's tests."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home of its own: no test may touch the user's conversations."""
    monkeypatch.setenv("MOECHAT_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("MOECHAT_NO_SAVE", raising=False)
    return tmp_path / "home"


@pytest.fixture(autouse=True)
def ctrl_c() -> Iterator[None]:
    """A chat that is left by Ctrl-C lets no other one interrupt what follows; here more tests do."""
    handler = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, handler)
