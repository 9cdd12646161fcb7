"""Names, values and metadata that several families have in GGUF files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from gguf_family import Array

NORMS = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
LATE_NORMS = {"input_layernorm": "attn_norm", "post_attention_layernorm": "post_attention_norm"}
ATTENTION = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
}
JOINED = {"attn_qkv.weight": ("attn_q.weight", "attn_k.weight", "attn_v.weight")}
QK_NORMS = {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}
MLP = {f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")}
ROUTER = {"mlp.gate": "ffn_gate_inp"}


def shared(name: str) -> dict[str, str]:
    """Names of shared experts."""
    return {f"mlp.{name}.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")}


def swap(values: Array, axis: int, outer: int, inner: int, start: int = 0) -> Array:
    """Exchange the slow and the fast index of positions of an axis, from ``start`` on."""
    values = np.moveaxis(values, axis, 0)
    rest = values[start:].reshape(outer, inner, -1, *values.shape[1:])
    moved = np.concatenate([values[:start], rest.swapaxes(0, 1).reshape(values[start:].shape)])
    return np.moveaxis(moved, 0, axis)


def heads_metadata(config: Any) -> dict[str, Any]:
    """Sizes of heads."""
    return {"attention.key_length": config.head_dim, "attention.value_length": config.head_dim}


def sigmoid(config: Any) -> dict[str, Any]:
    """Routing by sigmoid."""
    return {
        "expert_count": config.n_routed_experts,
        "expert_shared_count": config.n_shared_experts,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "leading_dense_block_count": config.first_k_dense_replace,
        "expert_gating_func": 2,
        "expert_weights_scale": float(config.routed_scaling_factor),
        "expert_weights_norm": config.norm_topk_prob,
        "expert_group_count": config.n_group,
        "expert_group_used_count": config.topk_group,
    }


def correction(name: str, values: Array, config: Any) -> Mapping[str, Array] | None:
    """The correction bias of a router."""
    return {"exp_probs_b.bias": values} if name.endswith("e_score_correction_bias") else None


SIGMOID_VALUES = {
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "routed_scaling_factor": 1.5,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
}


def latent_change(name: str, values: Array, config: Any) -> Mapping[str, Array] | None:
    """Keys and values of latent vectors in a tensor each, and correction biases."""
    if name == "self_attn.kv_b_proj.weight":
        heads = values.reshape(config.num_attention_heads, -1, values.shape[1])
        keys, values = np.split(heads, [config.qk_nope_head_dim], axis=1)
        return {"attn_k_b.weight": keys.swapaxes(1, 2), "attn_v_b.weight": values}
    return correction(name, values, config)


LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 64,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "head_dim": 32,
}
LATENT_NAMES = {
    **NORMS,
    "self_attn.q_proj": "attn_q",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.o_proj": "attn_output",
    **MLP,
    **ROUTER,
    **shared("shared_experts"),
}


def latent_metadata(config: Any) -> dict[str, Any]:
    """Sizes of latent vectors, and YaRN."""
    found = {
        "attention.head_count_kv": 1,
        "attention.q_lora_rank": config.q_lora_rank,
        "attention.kv_lora_rank": config.kv_lora_rank,
        "attention.key_length": config.kv_lora_rank + config.qk_rope_head_dim,
        "attention.value_length": config.kv_lora_rank,
        "attention.key_length_mla": config.qk_nope_head_dim + config.qk_rope_head_dim,
        "attention.value_length_mla": config.v_head_dim,
        "rope.dimension_count": config.qk_rope_head_dim,
        "vocab_size": config.vocab_size,
    }
    rope = config.rope_parameters
    if rope["rope_type"] == "yarn":
        found |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": float(rope["factor"]),
            "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
            "rope.scaling.yarn_log_multiplier": 0.1 * rope["mscale_all_dim"],
        }
    return found


def mamba_change(name: str, values: Array, groups: int) -> Mapping[str, Array] | None:
    """Tensors of a layer of Mamba 2 that the file has in another form, by their names in its module."""
    if name == "A_log":
        return {"ssm_a": -np.exp(values).reshape(-1, 1)}
    if name == "D":
        return {"ssm_d": values.reshape(-1, 1)}
    if name == "norm.weight":
        return {"ssm_norm.weight": values.reshape(groups, -1)}
    if name == "conv1d.weight":
        return {"ssm_conv1d.weight": values[:, 0]}
    if name == "dt_bias":
        return {"ssm_dt.bias": values}
    return None
