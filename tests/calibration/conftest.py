from __future__ import annotations

from pathlib import Path

import pytest
import tiny
import torch
from transformers import AutoModelForCausalLM


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a tokenizer, in which few columns of the experts' inputs are large, as in trained ones."""
    directory = tmp_path_factory.mktemp("calibration") / "model"
    config = tiny.tiny_config("mixtral", 0, vocab_size=tiny.BYTE_VOCABULARY, num_hidden_layers=3)
    tiny.write_tiny_checkpoint(directory, config)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.post_attention_layernorm.weight[::8] *= 8
    model.to(torch.bfloat16).save_pretrained(directory, max_shard_size="100KB")
    tiny.write_byte_tokenizer(directory)
    return directory
