"""Fixtures of the engine tests: one tiny chat model, converted once."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny

import moechat
from moechat.engine import Engine


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random checkpoint with tokenizer and chat template."""
    directory = tmp_path_factory.mktemp("chat-model")
    tiny.write_tiny_chat_model(directory)
    return directory


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A home for library and state that all engine tests share."""
    directory = tmp_path_factory.mktemp("home")
    before = os.environ.get("MOECHAT_HOME")
    os.environ["MOECHAT_HOME"] = str(directory)
    yield directory
    if before is None:
        del os.environ["MOECHAT_HOME"]
    else:
        os.environ["MOECHAT_HOME"] = before


@pytest.fixture(scope="session")
def engine(chat_model: Path, home: Path) -> Engine:
    """The tiny model, loaded."""
    return moechat.load(chat_model)
