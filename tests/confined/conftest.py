"""A model whose template and tokenizer are hostile to some messages, and the program that runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_support import Cli
from tiny import CHAT_TEMPLATE, write_tiny_chat_model

HOSTILE_TEMPLATE = (
    "{% if 'memory' in messages[-1].content %}{{ 'a' * 10 ** 10 }}{% endif %}"
    "{% if 'escapes' in messages[-1].content %}{{ raise_exception('\x1b]0;title\x07\x1b[2J') }}{% endif %}"
) + CHAT_TEMPLATE


@pytest.fixture(scope="session")
def cli(tmp_path_factory: pytest.TempPathFactory) -> Cli:
    """The program in an empty directory, with a library of its own."""
    return Cli(directory=tmp_path_factory.mktemp("cwd"), home=tmp_path_factory.mktemp("home"))


@pytest.fixture(scope="session")
def hostile(tmp_path_factory: pytest.TempPathFactory, cli: Cli) -> str:
    """A checkpoint: "memory" and "escapes" upset its template, many "a" before "!" its tokenizer."""
    directory = tmp_path_factory.mktemp("models") / "hostile"
    write_tiny_chat_model(directory, max_position_embeddings=2048)
    set_rule(directory, "pre_tokenizer", ("pretokenizers", {"type": "Split", "pattern": {"Regex": "(a+)+$"}}))
    (directory / "chat_template.jinja").write_text(HOSTILE_TEMPLATE)
    first = cli.run("run", str(directory), "hello", "--bits", "16", "--max-tokens", "2", forked=True)
    assert first.status == 0, first.err
    return str(directory)


def set_rule(directory: Path, part: str, rule: tuple[str, dict[str, object]]) -> None:
    """Put a splitting rule before those of a tokenizer."""
    path = directory / "tokenizer.json"
    content = json.loads(path.read_text())
    key, step = rule
    step = {**step, "behavior": "Isolated", "invert": False}
    content[part] = {"type": "Sequence", key: [step, content[part]]}
    path.write_text(json.dumps(content))
