"""Ling 2 and Ring 2, in the terms of GLM-4.5, which computes the same."""

from __future__ import annotations

from moechat.models.gguf_families.architecture import (
    DENSE_MLP,
    NORMS,
    QK_NORMS,
    ROUTER,
    SIGMOID,
    Architecture,
    Config,
    Places,
    attention_heads,
    joined_attention,
    require,
    shared_experts,
)
from moechat.models.gguf_families.glm import sigmoid_routing
from moechat.models.gguf_families.positions import partial_rotary
from moechat.models.gguf_metadata import Metadata


def _config(metadata: Metadata) -> Config:
    neurons = metadata.size("expert_feed_forward_length")
    require(
        metadata,
        {
            "expert_gating_func": (SIGMOID,),
            "expert_shared_count": (1,),
            "expert_shared_feed_forward_length": (None, 0, neurons),
        },
    )
    heads = attention_heads(metadata, rotated=False)
    return {
        "model_type": "glm4_moe",
        "architectures": ["Glm4MoeForCausalLM"],
        **heads,
        **sigmoid_routing(metadata),
        "rope_parameters": partial_rotary(metadata, heads["head_dim"]),
        "first_k_dense_replace": metadata.count("leading_dense_block_count", 0),
        "attention_bias": False,
        "use_qk_norm": True,
        "num_nextn_predict_layers": 0,
    }


def _layer(config: Config) -> Places:
    size = config["head_dim"]
    queries, keys = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    return {
        **NORMS,
        **joined_attention(queries, keys, keys),
        "attn_output.weight": "self_attn.o_proj.weight",
        **QK_NORMS,
        **DENSE_MLP,
        **ROUTER,
        "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
        **shared_experts("shared_experts"),
    }


ARCHITECTURES = {"bailingmoe2": Architecture(_config, _layer)}
