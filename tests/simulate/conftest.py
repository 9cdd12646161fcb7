"""A separate home, the program as in the tests of the command line, and a fake CUDA driver."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_support import Cli
from fake_cuda import VARIABLE, FakeCuda

from moechat import _native


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cli:
    home = tmp_path / "home"
    monkeypatch.setenv("MOECHAT_HOME", str(home))
    return Cli(tmp_path, home)


@pytest.fixture(scope="module")
def cuda() -> Iterator[Any]:
    """The fake CUDA driver, opened by this process."""
    with pytest.MonkeyPatch.context() as patch:
        driver = FakeCuda()
        patch.setenv(VARIABLE, str(driver.path))
        _native.cuda_driver_version()
        yield driver
        driver.reset()
