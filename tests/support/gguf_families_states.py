"""Kimi-Linear, Llama 4 and Nemotron-H as GGUF files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from gguf_family import Array, Family, Tensors
from gguf_names import ATTENTION, LATENT, LATENT_NAMES, NORMS, heads_metadata, latent_change, mamba_change
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS


def _kimi_change(name: str, values: Array, config: Any) -> Mapping[str, Array] | None:
    if name == "self_attn.forget_gate.A_log":
        return {"ssm_a": -np.exp(values).reshape(1, 1, -1, 1)}
    if name == "self_attn.forget_gate.dt_bias":
        return {"ssm_dt.bias": values}
    if name == "self_attn.conv1d.weight":
        parts = np.split(values.reshape(1, -1, 1, values.shape[-1]), 3, axis=1)
        return {f"ssm_conv1d_{part}.weight": each for part, each in zip("qkv", parts, strict=True)}
    return latent_change(name, values, config)


KIMI = Family(
    "kimi-linear",
    "kimi_linear",
    {
        **LATENT,
        "q_lora_rank": None,
        "num_experts_per_tok": 2,
        "num_local_experts": 8,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "linear_head_dim": 64,
        "linear_num_heads": 4,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "mlp_layer_types": ["dense"] + ["sparse"] * 3,
    },
    {
        **LATENT_NAMES,
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.forget_gate.f_a_proj": "ssm_f_a",
        "self_attn.forget_gate.f_b_proj": "ssm_f_b",
        "self_attn.b_proj": "ssm_beta",
        "self_attn.g_a_proj": "ssm_g_a",
        "self_attn.g_b_proj": "ssm_g_b",
        "self_attn.o_norm": "ssm_norm",
    },
    lambda config: {
        "attention.head_count_kv": [int(kind == "full_attention") for kind in config.layer_types],
        "attention.kv_lora_rank": config.kv_lora_rank,
        "attention.key_length": config.kv_lora_rank + config.qk_rope_head_dim,
        "attention.key_length_mla": config.qk_nope_head_dim + config.qk_rope_head_dim,
        "attention.value_length_mla": config.v_head_dim,
        "rope.dimension_count": config.qk_rope_head_dim,
        "kda.head_dim": config.linear_head_dim,
        "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "expert_count": config.num_local_experts,
        "expert_shared_count": config.n_shared_experts,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "leading_dense_block_count": config.mlp_layer_types.count("dense"),
        "expert_weights_scale": float(config.routed_scaling_factor),
        "expert_gating_func": 2,
        "vocab_size": config.vocab_size,
    },
    _kimi_change,
)


def _llama4_change(name: str, values: Array, config: Any) -> Mapping[str, Array] | None:
    if name == "feed_forward.experts.gate_up_proj":
        gate, up = np.split(values.swapaxes(1, 2), 2, axis=1)
        return {"ffn_gate_exps.weight": gate, "ffn_up_exps.weight": up}
    if name == "feed_forward.experts.down_proj":
        return {"ffn_down_exps.weight": values.swapaxes(1, 2)}
    return None


def _llama4_extra(config: Any) -> Tensors:
    """Factors of frequencies, by which the converter states their scaling."""
    rope = config.rope_parameters
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config)
    plain = rope["rope_theta"] ** -(np.arange(0, config.head_dim, 2) / config.head_dim)
    return {"rope_freqs.weight": (plain / scaled.numpy()).astype(np.float32)}


LLAMA4 = Family(
    "llama4",
    "llama4_text",
    {
        "num_experts_per_tok": 1,
        "num_local_experts": 4,
        "intermediate_size": 256,
        "intermediate_size_mlp": 512,
        "interleave_moe_layer_step": 2,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 16.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
        },
    },
    {
        **NORMS,
        **ATTENTION,
        **{f"feed_forward.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
        **{f"feed_forward.shared_expert.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")},
        "feed_forward.router": "ffn_gate_inp",
    },
    lambda config: {
        **heads_metadata(config),
        "feed_forward_length": config.intermediate_size_mlp,
        "rope.dimension_count": config.head_dim,
        "expert_count": config.num_local_experts,
        "expert_feed_forward_length": config.intermediate_size,
        "interleave_moe_layer_step": config.interleave_moe_layer_step,
        "vocab_size": config.vocab_size,
    },
    _llama4_change,
    extra=_llama4_extra,
)


def _nemotron_change(name: str, values: Array, config: Any) -> Mapping[str, Array] | None:
    if name == "mixer.experts.up_proj":
        return {"ffn_up_exps.weight": values}
    if name == "mixer.gate.e_score_correction_bias":
        return {"exp_probs_b.bias": values}
    return mamba_change(name.removeprefix("mixer."), values, config.n_groups) if "mixer" in name else None


NEMOTRON = Family(
    "nemotron_h_moe",
    "nemotron_h",
    {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
        "num_experts_per_tok": 2,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "moe_intermediate_size": 256,
        "moe_shared_expert_intermediate_size": 256,
        "routed_scaling_factor": 2.5,
        "head_dim": 64,
        "mamba_num_heads": 8,
        "mamba_head_dim": 64,
        "ssm_state_size": 64,
        "n_groups": 2,
        "chunk_size": 64,
    },
    {
        "norm": "attn_norm",
        "mixer.in_proj": "ssm_in",
        "mixer.conv1d": "ssm_conv1d",
        "mixer.out_proj": "ssm_out",
        "mixer.q_proj": "attn_q",
        "mixer.k_proj": "attn_k",
        "mixer.v_proj": "attn_v",
        "mixer.o_proj": "attn_output",
        "mixer.gate": "ffn_gate_inp",
        "mixer.shared_experts.up_proj": "ffn_up_shexp",
        "mixer.shared_experts.down_proj": "ffn_down_shexp",
    },
    lambda config: {
        "attention.head_count_kv": [
            config.num_key_value_heads * (kind == "full_attention") for kind in config.layers_block_type
        ],
        "feed_forward_length": [
            config.moe_intermediate_size * (kind == "moe") for kind in config.layers_block_type
        ],
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_epsilon": config.layer_norm_epsilon,
        "ssm.conv_kernel": config.conv_kernel,
        "ssm.state_size": config.ssm_state_size,
        "ssm.group_count": config.n_groups,
        "ssm.inner_size": config.mamba_num_heads * config.mamba_head_dim,
        "ssm.time_step_rank": config.mamba_num_heads,
        "rope.scaling.finetuned": False,
        "expert_count": config.n_routed_experts,
        "expert_shared_count": config.n_shared_experts,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_shared_feed_forward_length": config.moe_shared_expert_intermediate_size,
        "expert_weights_norm": config.norm_topk_prob,
        "expert_weights_scale": float(config.routed_scaling_factor),
        "expert_group_count": config.n_group,
        "vocab_size": config.vocab_size,
    },
    _nemotron_change,
    {
        "model.embeddings.weight": "token_embd.weight",
        "model.norm_f.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    },
)
