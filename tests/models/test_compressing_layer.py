"""Layers of DeepSeek-V4's cache: the memory of waiting tokens."""

from __future__ import annotations

import torch
from families import tiny_family
from transformers.cache_utils import DynamicCache
from transformers.models.deepseek_v4 import modeling_deepseek_v4  # noqa: F401 - it registers the layers

from moechat.models.compressing_layer import compact, compresses, other_tensors, waiting_bytes


def test_waiting_tokens_keep_no_more_memory_than_is_counted() -> None:
    cache = DynamicCache(config=tiny_family("deepseek_v4"))
    tokens = torch.randn(1, 1001, 32)
    for layer in cache.layers:
        assert compresses(type(layer))
        compact(layer)
        for name in layer.buffer_kv:
            layer.store_compression_weights(name, tokens, tokens)
        held = sum(rows.untyped_storage().nbytes() for rows in other_tensors(layer))
        assert 0 < held <= waiting_bytes(layer)
