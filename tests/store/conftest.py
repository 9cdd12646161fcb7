from __future__ import annotations

from pathlib import Path

import pytest
from store_support import write_mixtral


@pytest.fixture(scope="session")
def real_mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny bf16 Mixtral with odd sizes in several shards, written by transformers itself."""
    import torch
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    directory = tmp_path_factory.mktemp("checkpoint") / "mixtral"
    config = MixtralConfig(
        vocab_size=96,
        hidden_size=80,
        intermediate_size=100,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
    )
    model = MixtralForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(directory, max_shard_size="300KB")
    (directory / "tokenizer.json").write_text('{"version": "1.0"}')
    (directory / "chat_template.jinja").write_text("{{ messages }}")
    (directory / "LICENSE").write_text("Apache License")
    (directory / "README.md").write_text("# Tiny")
    return directory


@pytest.fixture
def mixtral(tmp_path: Path) -> Path:
    """A tiny float32 checkpoint under Mixtral's names in three shards."""
    return write_mixtral(
        tmp_path / "source", shards=3, layers=3, experts=3, hidden=64, intermediate=128, dtype="F32"
    )
