"""Kimi-Linear: layers of gated linear attention, and others with latent vectors and without positions."""

from __future__ import annotations

from moechat.models.gguf_families.architecture import (
    DENSE_MLP,
    NORMS,
    ROUTER,
    SIGMOID,
    Architecture,
    Config,
    Place,
    Places,
    require,
    shared_experts,
)
from moechat.models.gguf_families.deepseek import latent_attention, latent_places
from moechat.models.gguf_metadata import Metadata
from moechat.store.gguf_changes import LogOfNegative, Reshape


def _config(metadata: Metadata) -> Config:
    require(metadata, {"expert_weights_norm": (None, True), "expert_gating_func": (SIGMOID,)})
    layers = metadata.size("block_count")
    keys = metadata.counts("attention.head_count_kv", layers)
    dense = metadata.count("leading_dense_block_count", 0)
    groups = metadata.count("expert_group_count", 0) or 1
    return {
        "model_type": "kimi_linear",
        "architectures": ["KimiLinearForCausalLM"],
        **latent_attention(metadata),
        "layer_types": ["full_attention" if each else "linear_attention" for each in keys],
        "mlp_layer_types": ["dense" if layer < dense else "sparse" for layer in range(layers)],
        "linear_head_dim": metadata.size("kda.head_dim"),
        "linear_num_heads": metadata.size("attention.head_count"),
        "linear_conv_kernel_dim": metadata.size("ssm.conv_kernel"),
        "intermediate_size": metadata.size("feed_forward_length"),
        "moe_intermediate_size": metadata.size("expert_feed_forward_length"),
        "num_local_experts": metadata.size("expert_count"),
        "n_shared_experts": metadata.size("expert_shared_count"),
        "n_group": groups,
        "topk_group": metadata.count("expert_group_used_count", 0) or groups,
        "norm_topk_prob": True,
        "routed_scaling_factor": float(metadata.number("expert_weights_scale", 1.0)),
    }


def _layer(config: Config) -> Places:
    heads, size = config["linear_num_heads"], config["linear_head_dim"]
    kernel = Reshape((heads * size, 1, config["linear_conv_kernel_dim"]))
    gate = "self_attn.forget_gate"
    return {
        **NORMS,
        **latent_places(),
        "attn_k.weight": "self_attn.k_proj.weight",
        "attn_v.weight": "self_attn.v_proj.weight",
        **{
            f"ssm_conv1d_{part}.weight": Place(f"self_attn.{part}_conv1d.weight", (kernel,)) for part in "qkv"
        },
        "ssm_a": Place(f"{gate}.A_log", (LogOfNegative(), Reshape((1, 1, heads, 1)))),
        "ssm_dt.bias": f"{gate}.dt_bias",
        "ssm_f_a.weight": f"{gate}.f_a_proj.weight",
        "ssm_f_b.weight": f"{gate}.f_b_proj.weight",
        "ssm_beta.weight": "self_attn.b_proj.weight",
        "ssm_g_a.weight": "self_attn.g_a_proj.weight",
        "ssm_g_b.weight": "self_attn.g_b_proj.weight",
        "ssm_norm.weight": "self_attn.o_norm.weight",
        **DENSE_MLP,
        **ROUTER,
        "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
        **shared_experts("shared_experts"),
    }


ARCHITECTURES = {"kimi-linear": Architecture(_config, _layer)}
