"""GLM-4.5 and models with attention over latent vectors as GGUF files."""

from __future__ import annotations

from typing import Any

from gguf_family import Family
from gguf_names import (
    ATTENTION,
    JOINED,
    LATE_NORMS,
    LATENT,
    LATENT_NAMES,
    MLP,
    NORMS,
    QK_NORMS,
    ROUTER,
    SIGMOID_VALUES,
    correction,
    latent_change,
    latent_metadata,
    shared,
    sigmoid,
)

GLM4_MOE = Family(
    "glm4moe",
    "glm4_moe",
    {
        **SIGMOID_VALUES,
        "use_qk_norm": True,
        "attention_bias": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
    },
    {**LATE_NORMS, **ATTENTION, **QK_NORMS, **MLP, **ROUTER, **shared("shared_experts")},
    lambda config: {
        **sigmoid(config),
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "rope.dimension_count": config.head_dim // 2,
    },
    correction,
)
BAILING = Family(
    "bailingmoe2",
    "glm4_moe",
    {
        **SIGMOID_VALUES,
        "use_qk_norm": True,
        "n_group": 4,
        "topk_group": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 6e5, "partial_rotary_factor": 0.5},
    },
    {**NORMS, **ATTENTION, **QK_NORMS, **MLP, **ROUTER, **shared("shared_experts")},
    lambda config: {
        **sigmoid(config),
        "expert_shared_feed_forward_length": config.moe_intermediate_size,
        "rope.dimension_count": config.head_dim // 2,
        "vocab_size": config.vocab_size,
    },
    correction,
    joined=JOINED,
)


_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
}


def _deepseek_v2_metadata(config: Any) -> dict[str, Any]:
    return {
        **latent_metadata(config),
        **sigmoid(config),
        "expert_gating_func": None,
        "expert_weights_norm": None,
        "expert_group_count": None,
        "expert_group_used_count": None,
    }


DEEPSEEK_V2 = Family(
    "deepseek2",
    "deepseek_v2",
    {
        **LATENT,
        **SIGMOID_VALUES,
        "norm_topk_prob": False,
        "topk_method": "greedy",
        "n_group": None,
        "topk_group": None,
        "rope_parameters": _YARN,
    },
    LATENT_NAMES,
    _deepseek_v2_metadata,
    latent_change,
)
DEEPSEEK_V3 = Family(
    "deepseek2",
    "deepseek_v3",
    {
        **LATENT,
        **SIGMOID_VALUES,
        "n_group": 4,
        "topk_group": 2,
        "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    },
    LATENT_NAMES,
    lambda config: {**latent_metadata(config), **sigmoid(config)},
    latent_change,
)
GLM_FLASH = Family(
    "deepseek2",
    "glm4_moe_lite",
    {
        **LATENT,
        **SIGMOID_VALUES,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "n_group": 1,
        "topk_group": 1,
    },
    LATENT_NAMES,
    lambda config: {**latent_metadata(config), **sigmoid(config)},
    latent_change,
)


def _mistral4_metadata(config: Any) -> dict[str, Any]:
    rope = config.rope_parameters
    return {
        **latent_metadata(config),
        **sigmoid(config),
        "expert_gating_func": 1,
        "attention.temperature_scale": rope["llama_4_scaling_beta"],
        "attention.temperature_length": rope["original_max_position_embeddings"],
    }


MISTRAL4 = Family(
    "mistral4",
    "mistral4",
    {
        **LATENT,
        **SIGMOID_VALUES,
        "head_dim": None,
        "first_k_dense_replace": 0,
        "n_group": 1,
        "topk_group": 1,
        # Queries of tokens from the eighth on are scaled.
        "rope_parameters": {
            **_YARN,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 8,
            "llama_4_scaling_beta": 0.1,
        },
    },
    LATENT_NAMES,
    _mistral4_metadata,
    latent_change,
)
