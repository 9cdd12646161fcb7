"""Fixtures of the tests of the near tier."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def moechat_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A home for library and state that the tests of a module share."""
    directory = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOECHAT_HOME", str(directory))
        yield directory
