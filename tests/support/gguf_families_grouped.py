"""Models with grouped attention in all layers, and LFM2, as GGUF files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from gguf_family import Array, Family
from gguf_names import (
    ATTENTION,
    MLP,
    NORMS,
    QK_NORMS,
    ROUTER,
    SIGMOID_VALUES,
    correction,
    heads_metadata,
    shared,
    sigmoid,
)


def _shared_gate(name: str, values: Array, config: Any) -> Mapping[str, Array] | None:
    return {"ffn_gate_inp_shexp.weight": values[0]} if name == "mlp.shared_expert_gate.weight" else None


QWEN2_MOE = Family(
    "qwen2moe",
    "qwen2_moe",
    {"num_experts": 4, "shared_expert_intermediate_size": 256},
    {**NORMS, **ATTENTION, **ROUTER, **shared("shared_expert")},
    lambda config: {
        "expert_count": config.num_experts,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_shared_feed_forward_length": config.shared_expert_intermediate_size,
    },
    _shared_gate,
)
MINIMAX_M2 = Family(
    "minimax-m2",
    "minimax_m2",
    {
        "num_local_experts": 4,
        "intermediate_size": 256,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5},
    },
    {**NORMS, **ATTENTION, **QK_NORMS, **ROUTER},
    lambda config: {
        **heads_metadata(config),
        "rope.dimension_count": config.head_dim // 2,
        "expert_count": config.num_local_experts,
        "expert_feed_forward_length": config.intermediate_size,
        "expert_gating_func": 2,
    },
    correction,
)
DOTS1 = Family(
    "dots1",
    "dots1",
    {
        **SIGMOID_VALUES,
        "n_group": 1,
        "topk_group": 1,
        "num_key_value_heads": 4,  # llama.cpp supports no others
        "layer_types": ["full_attention"] * 4,
    },
    {**NORMS, **ATTENTION, **QK_NORMS, **MLP, **ROUTER, **shared("shared_experts")},
    lambda config: {**sigmoid(config), **heads_metadata(config)},
    correction,
)
HUNYUAN = Family(
    "hunyuan-moe",
    "hunyuan_v1_moe",
    {"num_experts": 4, "moe_topk": 2, "intermediate_size": 256},
    {
        **NORMS,
        **ATTENTION,
        "self_attn.query_layernorm": "attn_q_norm",
        "self_attn.key_layernorm": "attn_k_norm",
        "mlp.gate.wg": "ffn_gate_inp",
        **shared("shared_mlp"),
    },
    lambda config: {
        **heads_metadata(config),
        "expert_count": config.num_experts,
        "expert_feed_forward_length": config.intermediate_size,
        "expert_shared_feed_forward_length": config.intermediate_size,
        "expert_shared_count": 1,
    },
)
ERNIE = Family(
    "ernie4_5-moe",
    "ernie4_5_moe",
    {"moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 2, "moe_layer_start_index": 1},
    {**NORMS, **ATTENTION, **MLP, **ROUTER, **shared("shared_experts")},
    lambda config: {
        "expert_count": config.moe_num_experts,
        "expert_used_count": config.moe_k,
        "expert_shared_count": config.moe_num_shared_experts,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_shared_feed_forward_length": config.moe_num_shared_experts * config.moe_intermediate_size,
        "leading_dense_block_count": config.moe_layer_start_index,
        "interleave_moe_layer_step": 1,
    },
    correction,
)


def _lfm2_change(name: str, values: Array, config: Any) -> Mapping[str, Array] | None:
    if name == "conv.conv.weight":
        return {"shortconv.conv.weight": values.squeeze(1)}
    return {"exp_probs_b.bias": values} if name.endswith("expert_bias") else None


LFM2 = Family(
    "lfm2moe",
    "lfm2_moe",
    {
        "num_experts": 4,
        "num_dense_layers": 1,
        "norm_eps": 1e-6,
        "head_dim": None,
        "tie_word_embeddings": True,
        "layer_types": ["conv", "conv", "full_attention", "conv"],
    },
    {
        "operator_norm": "attn_norm",
        "ffn_norm": "ffn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.out_proj": "attn_output",
        "self_attn.q_layernorm": "attn_q_norm",
        "self_attn.k_layernorm": "attn_k_norm",
        "conv.in_proj": "shortconv.in_proj",
        "conv.out_proj": "shortconv.out_proj",
        "feed_forward.w1": "ffn_gate",
        "feed_forward.w2": "ffn_down",
        "feed_forward.w3": "ffn_up",
        "feed_forward.gate": "ffn_gate_inp",
    },
    lambda config: {
        "attention.head_count_kv": [
            config.num_key_value_heads if kind == "full_attention" else 0 for kind in config.layer_types
        ],
        "attention.layer_norm_rms_epsilon": config.norm_eps,
        "shortconv.l_cache": config.conv_L_cache,
        "vocab_size": config.vocab_size,
        "expert_count": config.num_experts,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "leading_dense_block_count": config.num_dense_layers,
        "expert_gating_func": 2,
    },
    _lfm2_change,
    {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.embedding_norm.weight": "token_embd_norm.weight",
    },
)


def _expert_bias(name: str, values: Array, config: Any) -> Mapping[str, Array] | None:
    return {"exp_probs_b.bias": values} if name == "mlp.expert_bias" else None


AFMOE = Family(
    "afmoe",
    "afmoe",
    {
        "num_experts": 4,
        "num_shared_experts": 1,
        "num_dense_layers": 1,
        "route_scale": 1.5,
        "sliding_window": 8,
        "mup_enabled": True,
        "layer_types": None,
    },
    {
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "post_attention_norm",
        "pre_mlp_layernorm": "ffn_norm",
        "post_mlp_layernorm": "post_ffw_norm",
        **ATTENTION,
        **QK_NORMS,
        **MLP,
        "self_attn.gate_proj": "attn_gate",
        "mlp.router.gate": "ffn_gate_inp",
        **shared("shared_experts"),
    },
    lambda config: {
        **heads_metadata(config),
        "expert_count": config.num_experts,
        "expert_shared_count": config.num_shared_experts,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "leading_dense_block_count": config.num_dense_layers,
        "expert_weights_scale": config.route_scale,
        "expert_weights_norm": True,
        "expert_gating_func": 2,
        "attention.sliding_window": config.sliding_window,
        "rope.dimension_count": config.head_dim,
        "vocab_size": config.vocab_size,
    },
    _expert_bias,
)


PHIMOE = Family(
    "phimoe",
    "phimoe",
    {
        "num_local_experts": 4,
        "intermediate_size": 256,
        "head_dim": None,
        "attention_bias": True,
        "lm_head_bias": True,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": [1 + number / 64 for number in range(32)],
            "long_factor": [1 + number for number in range(32)],
            "short_mscale": 1.243163121016122,
            "long_mscale": 1.243163121016122,
            "original_max_position_embeddings": 64,
        },
    },
    {**NORMS, **ATTENTION, "mlp.router": "ffn_gate_inp"},
    lambda config: {
        "rope.dimension_count": config.hidden_size // config.num_attention_heads,
        "rope.scaling.original_context_length": config.rope_parameters["original_max_position_embeddings"],
        "rope.scaling.attn_factor": 1.19,
        "attention.sliding_window": 0,
        "expert_count": config.num_local_experts,
    },
    outer={
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "model.norm.bias": "output_norm.bias",
        "lm_head.weight": "output.weight",
        "lm_head.bias": "output.bias",
    },
    extra=lambda config: {
        f"rope_factors_{kind}.weight": np.array(config.rope_parameters[f"{kind}_factor"], np.float32)
        for kind in ("long", "short")
    },
)
