"""The model that the hub on this machine serves."""

from __future__ import annotations

from pathlib import Path

LAYERS = 5


def write_hub_checkpoint(directory: Path) -> None:
    """Write a random chat model of five layers in several shards, with a model card and files that must
    not be loaded."""
    import tiny

    config = tiny.tiny_config(
        "qwen3_moe", 0, vocab_size=tiny.BYTE_VOCABULARY, num_hidden_layers=LAYERS, max_position_embeddings=512
    )
    tiny.write_tiny_checkpoint(directory, config, max_shard_size="500KB")
    tiny.write_byte_tokenizer(directory, longest=600)
    (directory / "README.md").write_text("---\nlicense: apache-2.0\n---\n# A tiny model\n")
    (directory / "pytorch_model.bin").write_bytes(b"a pickle")
    (directory / "modeling_evil.py").write_text("raise SystemExit")
