"""Fixtures of the tests of the near tier."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from homes import shared_home


@pytest.fixture(scope="module")
def moechat_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A home for library and state that the tests of a module share."""
    with shared_home(tmp_path_factory) as home:
        yield home
