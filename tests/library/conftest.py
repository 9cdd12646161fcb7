"""Fixtures of the library tests: a hub on this machine with a tiny real model, and the real program."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

for room in ("models", "cli"):
    sys.path.insert(0, str(Path(__file__).parents[1] / room))

from cli_support import Cli  # noqa: E402
from hub_server import REPOSITORY, Hub  # noqa: E402

LAYERS = 5


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random chat model of five layers in several shards, with a card and files that nobody should load."""
    import tiny

    directory = tmp_path_factory.mktemp("hub") / "moe-chat"
    config = tiny.tiny_config(
        "qwen3_moe", 0, vocab_size=tiny.BYTE_VOCABULARY, num_hidden_layers=LAYERS, max_position_embeddings=512
    )
    tiny.write_tiny_checkpoint(directory, config, max_shard_size="500KB")
    tiny.write_byte_tokenizer(directory)
    (directory / "README.md").write_text("---\nlicense: apache-2.0\n---\n# A tiny model\n")
    (directory / "pytorch_model.bin").write_bytes(b"a pickle")
    (directory / "modeling_evil.py").write_text("raise SystemExit")
    return directory


@pytest.fixture(scope="session")
def _served(checkpoint: Path) -> Iterator[Hub]:
    with Hub().running() as hub:
        hub.add(REPOSITORY, checkpoint)
        yield hub


@pytest.fixture
def hub(_served: Hub) -> Iterator[Hub]:
    """The hub, without faults and with no request yet."""
    _served.reset()
    yield _served
    _served.reset()


@pytest.fixture
def program(tmp_path: Path, hub: Hub) -> Cli:
    """The program with an empty library, connected to the hub."""
    work = tmp_path / "work"
    work.mkdir()
    return Cli(
        directory=work,
        home=tmp_path / "home",
        extra={
            "HF_ENDPOINT": hub.endpoint,
            "HF_HUB_OFFLINE": "0",
            "HF_HOME": str(tmp_path / "hf"),
            "HF_TOKEN": "",
            "HF_HUB_DOWNLOAD_TIMEOUT": "1",
            "NO_PROXY": "127.0.0.1",
        },
    )


@pytest.fixture
def inside(program: Cli, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """The same for :meth:`Cli.call`: huggingface_hub has read the variables of this process long ago."""
    from huggingface_hub import close_session, constants

    from moechat.hub import transfer

    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, hub.endpoint)
    monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.4)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", program.extra["HF_HOME"] + "/hub")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", program.extra["HF_HOME"] + "/token")
    monkeypatch.setattr(transfer, "_FIRST_WAIT_S", 0.01)
    close_session()
    return program
