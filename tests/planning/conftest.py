"""The real program, as other rooms' tests have it, and shorter simulations than plans make."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cli_support import Cli

from moechat.simulate import choice


@pytest.fixture(scope="session")
def cli(tmp_path_factory: pytest.TempPathFactory) -> Cli:
    """The program in an empty directory, with a library of its own."""
    return Cli(directory=tmp_path_factory.mktemp("cwd"), home=tmp_path_factory.mktemp("home"))


@pytest.fixture(scope="module")
def short_simulations() -> Iterator[None]:
    """A quarter of the tokens: a plan for a large model simulates ten strategies and more."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("_FILLING", "_MOVING", "_TIMED_BLOCKS", "_LEAST_TIMED", "_MOST_TIMED"):
            patch.setattr(choice, name, getattr(choice, name) // 4)
        patch.setattr(choice, "_ALONE", tuple(tokens // 4 for tokens in choice._ALONE))
        yield
