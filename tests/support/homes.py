"""Homes for library and state that several tests share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def shared_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An empty home, named by ``MOECHAT_HOME`` until the end."""
    directory = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOECHAT_HOME", str(directory))
        yield directory
