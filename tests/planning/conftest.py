"""The real program, as other rooms' tests have it, and shorter simulations than plans make."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cli_support import Cli

from moechat.simulate import strategy


@pytest.fixture(scope="session")
def cli(tmp_path_factory: pytest.TempPathFactory) -> Cli:
    """The program in an empty directory, with a library of its own."""
    return Cli(directory=tmp_path_factory.mktemp("cwd"), home=tmp_path_factory.mktemp("home"))


@pytest.fixture(scope="module")
def short_simulations() -> Iterator[None]:
    """A quarter of the tokens: a plan for a large model, which simulates ten strategies and more, takes two
    seconds and not ten."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("_FILLING", "_TIMED_BLOCKS", "_LEAST_TIMED", "_MOST_TIMED"):
            patch.setattr(strategy, name, getattr(strategy, name) // 4)
        yield
