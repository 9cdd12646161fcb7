"""Tokenizer, templates and settings are copied into a store as they are on the disk, or not at all."""

from __future__ import annotations

import builtins
import io
from pathlib import Path
from typing import Any

import pytest
from tiny import tiny_config, write_tiny_checkpoint

from moechat.errors import CheckpointError
from moechat.models.checkpoint_mapping import plan_checkpoint
from moechat.store import conversion
from moechat.store.checkpoint import Checkpoint
from moechat.store.convert import convert


def test_a_byte_that_is_read_wrongly_once_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "source"
    write_tiny_checkpoint(source, tiny_config("olmoe", 0))
    (source / "tokenizer_config.json").write_text('{"model_max_length": 64}')
    checkpoint = Checkpoint.open(source)
    wrong = [True]

    def opened(path: Any, *arguments: Any) -> Any:
        file = builtins.open(path, *arguments)  # noqa: SIM115 - the caller closes it
        if Path(path).name != "tokenizer_config.json" or not wrong:
            return file
        wrong.clear()
        with file:
            content = bytearray(file.read())
        content[5] ^= 1
        return io.BytesIO(content)

    monkeypatch.setattr(conversion, "open", opened, raising=False)
    plan, destination = plan_checkpoint(checkpoint), tmp_path / "store"
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json was read twice with different bytes"):
        convert(checkpoint, plan, destination, bits=8, source_name="tiny")
    assert not destination.exists()
    convert(checkpoint, plan, destination, bits=8, source_name="tiny")
    assert (destination / "tokenizer_config.json").read_bytes() == (
        source / "tokenizer_config.json"
    ).read_bytes()
