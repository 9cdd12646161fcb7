"""DeepSeek-V3.2, DeepSeek-V4 and GLM-5 as GGUF files: attention to tokens that an indexer chooses."""

from __future__ import annotations

from typing import Any

from gguf_family import Family
from gguf_names import (
    LATENT,
    LATENT_NAMES,
    NORMS,
    ROUTER,
    SIGMOID_VALUES,
    correction,
    heads_metadata,
    latent_change,
    latent_metadata,
    shared,
    sigmoid,
)

_INDEXER_VALUES = {"index_n_heads": 4, "index_head_dim": 64, "index_topk": 4}


def _indexer(config: Any) -> dict[str, Any]:
    return {
        "attention.indexer.head_count": config.index_n_heads,
        "attention.indexer.key_length": config.index_head_dim,
        "attention.indexer.top_k": config.index_topk,
    }


_INDEXER_NAMES = {
    "self_attn.indexer.k_norm": "indexer.k_norm",
    "self_attn.indexer.weights_proj": "indexer.proj",
    "self_attn.indexer.wk": "indexer.attn_k",
    "self_attn.indexer.wq_b": "indexer.attn_q_b",
}
DEEPSEEK_V32 = Family(
    "deepseek32",
    "deepseek_v32",
    {
        **LATENT,
        **SIGMOID_VALUES,
        **_INDEXER_VALUES,
        "n_group": 4,
        "topk_group": 2,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    },
    {**LATENT_NAMES, **_INDEXER_NAMES},
    lambda config: {**latent_metadata(config), **sigmoid(config), **_indexer(config)},
    latent_change,
)
GLM_DSA = Family(
    "glm-dsa",
    "glm_moe_dsa",
    {
        **LATENT,
        **SIGMOID_VALUES,
        **_INDEXER_VALUES,
        "n_group": 1,
        "topk_group": 1,
        "indexer_types": ["full", "full", "shared", "full"],
    },
    {**LATENT_NAMES, **_INDEXER_NAMES},
    lambda config: {
        **latent_metadata(config),
        **sigmoid(config),
        **_indexer(config),
        "attention.indexer.types": [kind == "full" for kind in config.indexer_types],
    },
    latent_change,
)


def _deepseek_v4_metadata(config: Any) -> dict[str, Any]:
    ratios = {"sliding_attention": 0, "compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
    scaled = config.rope_parameters["compress"]
    return {
        **heads_metadata(config),
        **_indexer(config),
        "feed_forward_length": None,
        "rope.freq_base": config.rope_theta,
        "rope.dimension_count": config.qk_rope_head_dim,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": scaled["factor"],
        "rope.scaling.original_context_length": scaled["original_max_position_embeddings"],
        "attention.q_lora_rank": config.q_lora_rank,
        "attention.output_lora_rank": config.o_lora_rank,
        "attention.output_group_count": config.o_groups,
        "attention.sliding_window": config.sliding_window,
        "attention.compress_ratios": [ratios[kind] for kind in config.layer_types],
        "attention.compress_rope_freq_base": float(config.compress_rope_theta),
        "expert_count": config.n_routed_experts,
        "expert_shared_count": config.n_shared_experts,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_weights_scale": config.routed_scaling_factor,
        "expert_weights_norm": config.norm_topk_prob,
        "expert_gating_func": 4,
        "swiglu_clamp_exp": [config.swiglu_limit] * config.num_hidden_layers,
        "swiglu_clamp_shexp": [config.swiglu_limit] * config.num_hidden_layers,
        "hyper_connection.count": config.hc_mult,
        "hyper_connection.sinkhorn_iterations": config.hc_sinkhorn_iters,
        "hyper_connection.epsilon": config.hc_eps,
        "hash_layer_count": config.mlp_layer_types.count("hash_moe"),
        "vocab_size": config.vocab_size,
    }


def _compressor(module: str, name: str) -> dict[str, str]:
    return {
        f"{module}.kv_proj": f"{name}_kv",
        f"{module}.gate_proj": f"{name}_gate",
        f"{module}.position_bias": f"{name}_ape.weight",
        f"{module}.kv_norm": f"{name}_norm",
    }


DEEPSEEK_V4 = Family(
    "deepseek4",
    "deepseek_v4",
    {
        **_INDEXER_VALUES,
        "index_topk": 2,
        "num_key_value_heads": 1,
        "intermediate_size": None,
        "q_lora_rank": 64,
        "o_lora_rank": 64,
        "o_groups": 2,
        "qk_rope_head_dim": 32,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "swiglu_limit": 1.0,
        "sliding_window": 8,
        "layer_types": [
            "sliding_attention",
            "compressed_sparse_attention",
            "heavily_compressed_attention",
            "compressed_sparse_attention",
        ],
        "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"],
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    {
        **NORMS,
        **ROUTER,
        **shared("shared_experts"),
        "self_attn.sinks": "attn_sinks.weight",
        "self_attn.q_a_proj": "attn_q_a",
        "self_attn.q_a_norm": "attn_q_a_norm",
        "self_attn.q_b_proj": "attn_q_b",
        "self_attn.kv_proj": "attn_kv",
        "self_attn.kv_norm": "attn_kv_a_norm",
        "self_attn.o_a_proj": "attn_output_a",
        "self_attn.o_b_proj": "attn_output_b",
        **_compressor("self_attn.compressor", "attn_compressor"),
        **_compressor("self_attn.compressor.indexer", "indexer_compressor"),
        "self_attn.compressor.indexer.q_b_proj": "indexer.attn_q_b",
        "self_attn.compressor.indexer.scorer.weights_proj": "indexer.proj",
        **{f"attn_hc.{part}": f"hc_attn_{part}.weight" for part in ("fn", "base", "scale")},
        **{f"ffn_hc.{part}": f"hc_ffn_{part}.weight" for part in ("fn", "base", "scale")},
        "mlp.gate.tid2eid": "ffn_gate_tid2eid.weight",
    },
    _deepseek_v4_metadata,
    correction,
    {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
        **{f"model.hc_head.hc_{part}": f"output_hc_{part}.weight" for part in ("fn", "base", "scale")},
    },
)
