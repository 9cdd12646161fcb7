"""Fixtures of the command line tests: one tiny chat model, converted once, and the real program."""

from __future__ import annotations

import pytest
from cli_support import Cli


@pytest.fixture(scope="session")
def cli(tmp_path_factory: pytest.TempPathFactory) -> Cli:
    """The program in an empty directory, with a library of its own."""
    return Cli(directory=tmp_path_factory.mktemp("cwd"), home=tmp_path_factory.mktemp("home"))


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory, cli: Cli) -> str:
    """A tiny random chat model whose greedy answers never end; converted into the library of ``cli``."""
    import tiny
    from safetensors.torch import load_file, save_file

    directory = tmp_path_factory.mktemp("models") / "tiny-chat"
    tiny.write_tiny_chat_model(directory, max_position_embeddings=8192)
    weights = load_file(directory / "model.safetensors")
    # With a row of zeros the token that ends an answer has the logit 0, which is never the largest of all.
    weights["lm_head.weight"][256:] = 0
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    first = cli.run("run", str(directory), "hello", "--max-tokens", "2", forked=True)
    assert first.status == 0, first.err
    assert "converted in" in first.err
    return str(directory)
