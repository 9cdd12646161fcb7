"""Known shapes: they fit transformers, can be cut down, and their stores load and run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import moechat
from moechat.bench.synthetic_models import (
    describe_shape,
    load_shape,
    shape_names,
    store_name,
    synthetic_store,
)
from moechat.errors import UsageError
from moechat.offload.settings import OffloadOptions

# Experts, top-k, hidden and intermediate size, expert layers, as the models' papers and cards state them.
FACTS = {
    "qwen3-30b-a3b": (128, 8, 2048, 768, 48),
    "mixtral-8x7b": (8, 2, 4096, 14336, 32),
    "olmoe-1b-7b": (64, 8, 2048, 1024, 16),
    "gpt-oss-20b": (32, 4, 2880, 2880, 24),
    "gpt-oss-120b": (128, 4, 2880, 2880, 36),
    "phi-3.5-moe": (16, 2, 4096, 6400, 32),
    "qwen1.5-moe-a2.7b": (60, 4, 2048, 1408, 24),
    "deepseek-v2-lite": (64, 6, 2048, 1408, 26),
    "qwen3.6-35b-a3b": (256, 8, 2048, 512, 40),
    "qwen3-coder-next": (512, 10, 2048, 512, 48),
    "glm-4.7-flash": (64, 4, 2048, 1536, 46),
    "glm-4.5-air": (128, 8, 4096, 1408, 45),
    "gemma-4-26b-a4b": (128, 8, 2816, 704, 30),
    "laguna-xs-2.1": (256, 8, 2048, 512, 39),
    "minimax-m2.5": (256, 8, 3072, 1536, 62),
    "deepseek-v4-flash": (256, 6, 4096, 2048, 43),
    "nemotron-3.5-lightning": (128, 6, 2688, 1856, 23),
}
# Billions of parameters, embeddings and all.
PARAMETERS = {
    "qwen3-30b-a3b": 30.5,
    "mixtral-8x7b": 46.7,
    "olmoe-1b-7b": 6.92,
    "gpt-oss-20b": 20.9,
    "gpt-oss-120b": 116.8,
    "phi-3.5-moe": 41.9,
    "qwen1.5-moe-a2.7b": 14.3,
    "deepseek-v2-lite": 15.7,
    "qwen3.6-35b-a3b": 34.7,
    "qwen3-coder-next": 79.7,
    "glm-4.7-flash": 29.9,
    "glm-4.5-air": 106.9,
    "gemma-4-26b-a4b": 25.2,
    "laguna-xs-2.1": 33.4,
    "minimax-m2.5": 228.7,
    "deepseek-v4-flash": 284.3,
    "nemotron-3.5-lightning": 31.6,
}

# The first layer has no experts.
FIRST_DENSE = {
    "deepseek-v2-lite",
    "glm-4.7-flash",
    "glm-4.5-air",
    "laguna-xs-2.1",
    "nemotron-3.5-lightning",
}
# Layers up to the first with attention that keeps keys and values, where that is not among the first three.
LEAST_LAYERS = {"qwen3.6-35b-a3b": 4, "qwen3-coder-next": 4, "nemotron-3.5-lightning": 6}


def test_all_shapes_are_known() -> None:
    assert shape_names() == sorted(FACTS)


@pytest.mark.parametrize("name", sorted(FACTS))
def test_shapes_are_those_of_the_models(name: str) -> None:
    experts, top_k, hidden, inner, layers = FACTS[name]
    shape = load_shape(name)
    assert shape.cuts == []
    model = describe_shape(shape)
    geometry = model.geometry
    assert (geometry.num_experts, geometry.hidden_size, geometry.intermediate_size) == (
        experts,
        hidden,
        inner,
    )
    assert len(model.layers) == layers
    text = shape.config.get_text_config()
    assert (getattr(text, "num_experts_per_tok", None) or text.top_k_experts) == top_k
    matrices = 3 if geometry.gate.gated else 2
    weights = layers * experts * (matrices * hidden * inner + (2 * inner + hidden) * geometry.has_bias)
    total = (weights + model.dense_bytes // 2) / 1e9
    assert total == pytest.approx(PARAMETERS[name], rel=0.01)


@pytest.mark.parametrize("name", sorted(FACTS))
def test_names_of_cut_shapes_show_the_cut(name: str) -> None:
    shape = load_shape(name, layers=2, vocabulary=500)
    assert "2 of" in shape.cuts[0]
    assert "500 instead of" in shape.cuts[1]
    model = describe_shape(shape)
    assert len(model.layers) == 2 - (name in FIRST_DENSE)
    assert store_name(shape, 4) == f"{name}-2l-500v-4bit-r1"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"name": "gpt-5"}, "there is no shape 'gpt-5'"),
        ({"name": "olmoe-1b-7b", "layers": 17}, "17 of them cannot be kept"),
        ({"name": "olmoe-1b-7b", "layers": 0}, "0 of them cannot be kept"),
        ({"name": "deepseek-v2-lite", "layers": 1}, "1 of them cannot be kept"),
        ({"name": "olmoe-1b-7b", "vocabulary": 1}, "1 of them cannot be kept"),
        ({"name": "olmoe-1b-7b", "vocabulary": 10**6}, "cannot be kept"),
    ],
)
def test_impossible_cuts_are_refused(arguments: dict[str, Any], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        load_shape(**arguments)


# Tiny stand-ins for the big ones: the same families with all their parts, in sizes that a test can write.
SMALL: dict[str, dict[str, Any]] = {
    "qwen3-30b-a3b": {"moe_intermediate_size": 64, "num_experts": 8, "hidden_size": 64},
    "mixtral-8x7b": {"intermediate_size": 128, "hidden_size": 64, "head_dim": 16},
    "olmoe-1b-7b": {"intermediate_size": 64, "num_experts": 8, "hidden_size": 64},
    "gpt-oss-20b": {"intermediate_size": 96, "num_local_experts": 8, "hidden_size": 64, "head_dim": 16},
    "gpt-oss-120b": {"intermediate_size": 96, "num_local_experts": 8, "hidden_size": 64, "head_dim": 16},
    "phi-3.5-moe": {"intermediate_size": 128, "num_local_experts": 8, "hidden_size": 64, "head_dim": 128},
    "qwen1.5-moe-a2.7b": {
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 96,
        "num_experts": 8,
        "hidden_size": 64,
    },
    "minimax-m2.5": {"intermediate_size": 64, "num_local_experts": 8, "hidden_size": 64},
    "glm-4.5-air": {
        "moe_intermediate_size": 64,
        "n_routed_experts": 8,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 8,
    },
    "glm-4.7-flash": {
        "moe_intermediate_size": 64,
        "n_routed_experts": 8,
        "hidden_size": 64,
        "intermediate_size": 96,
        "q_lora_rank": 64,
        "kv_lora_rank": 64,
    },
    "qwen3-coder-next": {"moe_intermediate_size": 64, "num_experts": 16, "hidden_size": 64},
    "qwen3.6-35b-a3b": {"moe_intermediate_size": 64, "num_experts": 16, "hidden_size": 64},
    "laguna-xs-2.1": {
        "moe_intermediate_size": 64,
        "num_experts": 8,
        "hidden_size": 64,
        "intermediate_size": 96,
    },
    "nemotron-3.5-lightning": {
        "moe_intermediate_size": 64,
        "moe_shared_expert_intermediate_size": 96,
        "n_routed_experts": 8,
        "hidden_size": 64,
        "mamba_num_heads": 16,
        "mamba_head_dim": 8,
    },
    "deepseek-v4-flash": {"moe_intermediate_size": 64, "n_routed_experts": 8, "hidden_size": 64},
    "gemma-4-26b-a4b": {
        "moe_intermediate_size": 64,
        "num_experts": 8,
        "hidden_size": 64,
        "intermediate_size": 96,
    },
    "deepseek-v2-lite": {
        "moe_intermediate_size": 80,
        "n_routed_experts": 8,
        "hidden_size": 64,
        "intermediate_size": 96,
    },
}


@pytest.mark.parametrize("name", sorted(FACTS))
def test_stores_of_every_family_load_and_stay_finite(name: str, tmp_path: Path) -> None:
    shape = load_shape(name, layers=LEAST_LAYERS.get(name, 3), vocabulary=300)
    for key, value in SMALL[name].items():
        setattr(shape.config, key, value)
    store = synthetic_store(shape, tmp_path)
    engine = moechat.load(store.path, offload=OffloadOptions(pages=0))
    logits = engine.logits([1, 2, 3, 4, 5, 299])
    assert torch.isfinite(logits).all()
    assert 0.3 < float(logits.std()) < 3
    assert len(list(engine.generate([1, 2, 3], max_new_tokens=3))) == 3
