"""A home of its own, and the program as the tests of the command line run it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "cli"))

from cli_support import Cli


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cli:
    home = tmp_path / "home"
    monkeypatch.setenv("MOECHAT_HOME", str(home))
    return Cli(tmp_path, home)
