"""Models with a sliding window in some layers as GGUF files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from gguf_family import Array, Family, Tensors
from gguf_names import ATTENTION, MLP, NORMS, QK_NORMS, ROUTER, correction, heads_metadata, shared


def _laguna_metadata(config: Any) -> dict[str, Any]:
    full, sliding = (config.rope_parameters[kind] for kind in ("full_attention", "sliding_attention"))
    return {
        **heads_metadata(config),
        "attention.head_count": config.num_attention_heads_per_layer,
        "attention.sliding_window": config.sliding_window,
        "rope.freq_base": float(full["rope_theta"]),
        "rope.freq_base_swa": float(sliding["rope_theta"]),
        "rope.dimension_count": int(config.head_dim * full["partial_rotary_factor"]),
        "rope.dimension_count_swa": int(config.head_dim * sliding["partial_rotary_factor"]),
        "leading_dense_block_count": config.mlp_layer_types.count("dense"),
        "expert_count": config.num_experts,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_shared_feed_forward_length": config.shared_expert_intermediate_size,
        "expert_weights_norm": True,
        "expert_weights_scale": float(config.moe_routed_scaling_factor),
        "expert_gating_func": 2,
        "vocab_size": config.vocab_size,
    }


LAGUNA = Family(
    "laguna",
    "laguna",
    {
        "num_experts": 4,
        "shared_expert_intermediate_size": 256,
        "num_attention_heads_per_layer": [4, 6, 6, 6],
        "layer_types": ["full_attention"] + ["sliding_attention"] * 3,
        "mlp_layer_types": ["dense"] + ["sparse"] * 3,
        "sliding_window": 8,
        "moe_routed_scaling_factor": 1.5,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "default",
                "rope_theta": 500000.0,
                "partial_rotary_factor": 0.5,
            },
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 1.0,
            },
        },
    },
    {
        **NORMS,
        **ATTENTION,
        **QK_NORMS,
        **MLP,
        **ROUTER,
        "self_attn.g_proj": "attn_gate",
        **shared("shared_experts"),
    },
    _laguna_metadata,
    correction,
)


def _gemma4_change(name: str, values: Array, config: Any) -> Mapping[str, Array] | None:
    single = {
        "layer_scalar": "layer_output_scale.weight",
        "router.scale": "ffn_gate_inp.scale",
        "router.per_expert_scale": "ffn_down_exps.scale",
        "experts.gate_up_proj": "ffn_gate_up_exps.weight",
    }
    return {single[name]: values} if name in single else None


def _gemma4_extra(config: Any) -> Tensors:
    """Factors of the frequencies of full layers: those that do not rotate are divided by infinity."""
    half = config.per_layer_config[3].head_dim // 2
    factors = np.full(half, 1e30, np.float32)
    factors[: half // 4] = 1
    return {"rope_freqs.weight": factors}


def _gemma4_metadata(config: Any) -> dict[str, Any]:
    sliding = [kind == "sliding_attention" for kind in config.layer_types]
    own, full = config.per_layer_config[0], config.per_layer_config[3]
    return {
        "attention.head_count_kv": [
            own.num_key_value_heads if each else full.num_key_value_heads for each in sliding
        ],
        "attention.key_length": full.head_dim,
        "attention.value_length": full.head_dim,
        "attention.key_length_swa": own.head_dim,
        "attention.value_length_swa": own.head_dim,
        "attention.sliding_window": config.sliding_window,
        "attention.sliding_window_pattern": sliding,
        "attention.shared_kv_layers": 0,
        "embedding_length_per_layer_input": 0,
        "rope.freq_base": float(config.rope_parameters["full_attention"]["rope_theta"]),
        "rope.freq_base_swa": float(config.rope_parameters["sliding_attention"]["rope_theta"]),
        "rope.dimension_count": full.head_dim,
        "rope.dimension_count_swa": own.head_dim,
        "expert_count": config.num_experts,
        "expert_used_count": config.top_k_experts,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "final_logit_softcapping": config.final_logit_softcapping,
    }


GEMMA4 = Family(
    "gemma4",
    "gemma4_text",
    {
        "num_experts_per_tok": None,
        "top_k_experts": 2,
        "num_experts": 4,
        "enable_moe_block": True,
        "hidden_size_per_layer_input": 0,
        "global_head_dim": 128,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "sliding_window": 8,
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        "final_logit_softcapping": 30.0,
        "tie_word_embeddings": True,
    },
    {
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "post_attention_norm",
        "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
        "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
        "post_feedforward_layernorm_1": "post_ffw_norm_1",
        "post_feedforward_layernorm_2": "post_ffw_norm_2",
        **ATTENTION,
        **QK_NORMS,
        **MLP,
        "router.proj": "ffn_gate_inp",
    },
    _gemma4_metadata,
    _gemma4_change,
    extra=_gemma4_extra,
)
