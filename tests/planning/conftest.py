"""The tiny models and the real program, as other rooms' tests have them."""

from __future__ import annotations

import pytest
from cli_support import Cli


@pytest.fixture(scope="session")
def cli(tmp_path_factory: pytest.TempPathFactory) -> Cli:
    """The program in an empty directory, with a library of its own."""
    return Cli(directory=tmp_path_factory.mktemp("cwd"), home=tmp_path_factory.mktemp("home"))
