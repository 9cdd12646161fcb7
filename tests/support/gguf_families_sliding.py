"""MiMo-V2, K-EXAONE and North (Cohere 2 MoE) as GGUF files."""

from __future__ import annotations

from typing import Any

from gguf_family import Family
from gguf_names import (
    ATTENTION,
    JOINED,
    MLP,
    NORMS,
    QK_NORMS,
    ROUTER,
    correction,
    heads_metadata,
    shared,
)

_KINDS = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
_MLP_KINDS = ["dense"] + ["sparse"] * 3


def _sliding(config: Any) -> list[bool]:
    return [kind == "sliding_attention" for kind in config.layer_types]


def _mimo2_metadata(config: Any) -> dict[str, Any]:
    full, sliding = (config.rope_parameters[kind] for kind in ("full_attention", "sliding_attention"))
    return {
        "attention.key_length": config.head_dim,
        "attention.value_length": config.v_head_dim,
        "attention.value_scale": config.attention_value_scale,
        "attention.head_count_kv": [config.num_key_value_heads * (1 + each) for each in _sliding(config)],
        "attention.sliding_window": config.sliding_window,
        "attention.sliding_window_pattern": [int(each) for each in _sliding(config)],
        "rope.freq_base": float(full["rope_theta"]),
        "rope.freq_base_swa": float(sliding["rope_theta"]),
        "rope.dimension_count": int(config.head_dim * full["partial_rotary_factor"]),
        "expert_count": config.n_routed_experts,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_gating_func": 2,
    }


MIMO2 = Family(
    "mimo2",
    "mimo_v2_flash",
    {
        "num_key_value_heads": 1,
        "head_dim": 96,
        "v_head_dim": 64,
        "sliding_window": 8,
        "n_routed_experts": 8,
        "layer_types": _KINDS,
        "mlp_layer_types": _MLP_KINDS,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 1 / 3},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1 / 3},
        },
    },
    {**NORMS, **ATTENTION, "self_attn.sinks": "attn_sinks.weight", **MLP, **ROUTER},
    _mimo2_metadata,
    correction,
)
MIMO25 = Family(
    "mimo2",
    "mimo_v2_flash",
    {**MIMO2.values, "num_key_value_heads": 2},
    MIMO2.names,
    _mimo2_metadata,
    correction,
    joined=JOINED,
)
EXAONE = Family(
    "exaone-moe",
    "exaone_moe",
    {
        "num_experts": 8,
        "num_shared_experts": 1,
        "sliding_window": 8,
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        "mlp_layer_types": _MLP_KINDS,
        "routed_scaling_factor": 2.5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    },
    {**NORMS, **ATTENTION, **QK_NORMS, **MLP, **ROUTER, **shared("shared_experts")},
    lambda config: {
        **heads_metadata(config),
        "attention.sliding_window": config.sliding_window,
        "attention.sliding_window_pattern": _sliding(config),
        "rope.scaling.type": "none",
        "expert_count": config.num_experts,
        "expert_shared_count": config.num_shared_experts,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_shared_feed_forward_length": config.moe_intermediate_size * config.num_shared_experts,
        "expert_weights_scale": config.routed_scaling_factor,
        "expert_weights_norm": config.norm_topk_prob,
        "expert_gating_func": 2,
        "leading_dense_block_count": config.mlp_layer_types.count("dense"),
        "nextn_predict_layers": 0,
        "vocab_size": config.vocab_size,
    },
    correction,
)
COHERE2 = Family(
    "cohere2moe",
    "cohere2_moe",
    {
        "num_experts": 8,
        "num_shared_experts": 1,
        "intermediate_size": 256,
        "moe_intermediate_size": None,
        "prefix_dense_intermediate_size": 512,
        "rms_norm_eps": None,
        "layer_norm_eps": 1e-6,
        "expert_selection_fn": "sigmoid",
        "logit_scale": 0.5,
        "rope_theta": 5e4,
        "sliding_window": 8,
        "layer_types": _KINDS,
        "mlp_layer_types": _MLP_KINDS,
        "tie_word_embeddings": True,
    },
    {"input_layernorm": "attn_norm", **ATTENTION, **MLP, **ROUTER, **shared("shared_experts")},
    lambda config: {
        **heads_metadata(config),
        "feed_forward_length": config.prefix_dense_intermediate_size,
        "attention.layer_norm_epsilon": config.layer_norm_eps,
        "attention.sliding_window": config.sliding_window,
        "attention.sliding_window_pattern": _sliding(config),
        "rope.dimension_count": config.head_dim,
        "rope.scaling.type": "none",
        "expert_count": config.num_experts,
        "expert_shared_count": config.num_shared_experts,
        "expert_feed_forward_length": config.intermediate_size,
        "expert_shared_feed_forward_length": config.intermediate_size * config.num_shared_experts,
        "expert_weights_norm": config.norm_topk_prob,
        "expert_gating_func": 2,
        "leading_dense_block_count": config.mlp_layer_types.count("dense"),
        "logit_scale": config.logit_scale,
        "vocab_size": config.vocab_size,
    },
)
