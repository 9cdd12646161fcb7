"""Caches are passed to transformers, and read from its outputs, under the names of the installed version."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path

import pytest
from families import tiny_family
from tiny import write_tiny_checkpoint

import moechat

OLD = "past_key_values|cache_params"


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_next", "granitemoehybrid", "lfm2_moe", "minimax"])
def test_loading_and_answering_use_no_deprecated_name(
    family: str, tmp_path: Path, moechat_home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = tiny_family(family)
    config.eos_token_id = None
    write_tiny_checkpoint(tmp_path, config)
    with warnings.catch_warnings(), caplog.at_level(logging.WARNING):
        warnings.filterwarnings("error", message=f".*({OLD}).*")
        with moechat.load(tmp_path, bits=16, dtype="float32", ram="4G") as engine:
            engine.logits(list(range(3, 12)))
            steps = list(engine.generate(list(range(3, 12)), max_new_tokens=4, temperature=0.0))
    assert len(steps) == 4
    assert not [record for record in caplog.records if any(name in record.message for name in OLD.split("|"))]
