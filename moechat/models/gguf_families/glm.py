"""GLM-4.5, 4.6 and 4.7."""

from __future__ import annotations

from moechat.models.gguf_families.architecture import (
    ATTENTION,
    ATTENTION_BIASES,
    DENSE_MLP,
    QK_NORMS,
    ROUTER,
    SIGMOID,
    Architecture,
    Config,
    Places,
    attention_heads,
    require,
    shared_experts,
)
from moechat.models.gguf_families.positions import partial_rotary
from moechat.models.gguf_metadata import Metadata


def sigmoid_routing(metadata: Metadata) -> Config:
    """Routing by sigmoid with a correction bias, in groups, as of DeepSeek-V3.

    Raises:
        CheckpointError: A value is malformed.
    """
    groups = metadata.count("expert_group_count", 0) or 1
    return {
        "n_routed_experts": metadata.size("expert_count"),
        "n_shared_experts": metadata.size("expert_shared_count"),
        "n_group": groups,
        "topk_group": metadata.count("expert_group_used_count", 0) or groups,
        "norm_topk_prob": metadata.flag("expert_weights_norm"),
        "routed_scaling_factor": float(metadata.number("expert_weights_scale", 1.0)),
        "moe_intermediate_size": metadata.size("expert_feed_forward_length"),
        "intermediate_size": metadata.size("feed_forward_length"),
    }


def _config(metadata: Metadata) -> Config:
    require(metadata, {"expert_gating_func": (None, 0, SIGMOID)})
    if any(metadata.get("rope.dimension_sections") or ()):
        raise metadata.refused("rope.dimension_sections")
    heads = attention_heads(metadata)
    tensors = metadata.header.tensors
    return {
        "model_type": "glm4_moe",
        "architectures": ["Glm4MoeForCausalLM"],
        **heads,
        **sigmoid_routing(metadata),
        "rope_parameters": partial_rotary(metadata, heads["head_dim"]),
        "first_k_dense_replace": metadata.count("leading_dense_block_count", 0),
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "use_qk_norm": "blk.0.attn_q_norm.weight" in tensors,
        "num_nextn_predict_layers": 0,
    }


def _layer(config: Config) -> Places:
    return {
        "attn_norm.weight": "input_layernorm.weight",
        "post_attention_norm.weight": "post_attention_layernorm.weight",
        **ATTENTION,
        **ATTENTION_BIASES,
        **QK_NORMS,
        **DENSE_MLP,
        **ROUTER,
        "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
        **shared_experts("shared_experts"),
    }


ARCHITECTURES = {"glm4moe": Architecture(_config, _layer)}
