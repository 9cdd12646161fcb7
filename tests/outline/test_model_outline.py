"""Outlines against the real thing: weights, routers and caches of models that transformers makes."""

from __future__ import annotations

import pytest
import torch
from tiny import SHAPES, tiny_config
from transformers import AutoModelForCausalLM

from moechat.models.cache_argument import cache_of
from moechat.models.outlining import headers_of, known_config, outline_model, outline_skeleton
from moechat.models.skeleton import build_skeleton

CASES = [(family, len(shapes) - 1) for family, shapes in SHAPES.items()]


@pytest.mark.parametrize(("family", "number"), CASES)
def test_an_outline_counts_what_the_model_has(family: str, number: int) -> None:
    config = tiny_config(family, number)
    skeleton = build_skeleton(config, torch.float32)
    outline, form = outline_skeleton(
        skeleton, torch.float32, dense_bits=16, source=headers_of(skeleton, "BF16")
    )
    real = AutoModelForCausalLM.from_config(tiny_config(family, number), dtype=torch.float32)
    experts = {name: tensor.numel() for name, tensor in real.named_parameters() if ".experts." in f".{name}."}
    shared = sum(size for name, size in experts.items() if "shared" in name)
    routed = sum(experts.values()) - shared
    layers, entry = len(outline.expert_layers), outline.experts
    assert layers * entry.num_experts * outline.expert_weights == routed
    dense = sum(tensor.numel() for tensor in real.parameters()) - routed
    assert outline.dense.total == dense
    assert outline.parameters == dense + routed
    assert 0 < outline.active_parameters <= outline.parameters
    sizes = sum(tensor.nbytes for tensor in real.parameters()) + sum(t.nbytes for t in real.buffers())
    # Two bytes of four where the stored type is kept.
    kept = sum(tensor.numel() for name, tensor in real.named_parameters() if name in form.kept)
    assert kept > 0
    assert outline.dense_bytes == sizes - 4 * routed - 2 * kept
    assert outline.dense.routers >= layers * entry.num_experts * entry.hidden_size
    assert outline.dense.head >= config.get_text_config().vocab_size * entry.hidden_size


def test_parts_of_a_model_with_all_of_them() -> None:
    config = known_config("deepseek-v2-lite")
    dense = outline_model(config, torch.bfloat16, dense_bits=16).dense
    hidden, vocabulary = 2048, 102400
    assert dense.embedding == vocabulary * hidden
    assert dense.head == vocabulary * hidden + hidden
    assert dense.routers == 26 * 64 * hidden
    assert dense.shared == 26 * 3 * hidden * 2 * 1408
    assert dense.feed_forward == 3 * hidden * 10944  # the first layer has no experts
    # Queries, the compressed keys and values with their norm, their expansion, the output; two norms.
    attention = hidden * 16 * 192 + hidden * 576 + 512 + 512 * 16 * 256 + 16 * 128 * hidden + 2 * hidden
    assert dense.attention == 27 * attention


def test_tied_weights_count_once() -> None:
    outline = outline_model(tiny_config("mixtral", 1), torch.float32, dense_bits=16)
    assert outline.dense.embedding == 0
    assert outline.dense.head == 101 * 72 + 72


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v2", "gpt_oss"])
def test_the_cache_is_as_large_as_a_real_one(family: str) -> None:
    config = tiny_config(family, 0)
    outline = outline_model(config, torch.float32, dense_bits=16)
    real = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.inference_mode():
        cache = cache_of(real(input_ids=torch.arange(1, 31)[None], use_cache=True))
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    least = outline.cache.nbytes(30)
    assert held <= least
    if family != "gpt_oss":  # whose windows may grow by a part of a prompt before they are cut
        assert least <= 2.1 * held  # a layer's copy as it grows is counted too
