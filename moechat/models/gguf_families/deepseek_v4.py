"""DeepSeek-V4: attention to compressed parts, several residual streams, first layers routed by tables."""

from __future__ import annotations

from typing import Any

from moechat.errors import CheckpointError, UnsupportedModelError
from moechat.models.gguf_families.architecture import (
    ROUTER,
    SQRT_SOFTPLUS,
    Architecture,
    Config,
    Place,
    Places,
    require,
    shared_experts,
)
from moechat.models.gguf_families.positions import rotary, rotated_share
from moechat.models.gguf_metadata import Metadata, quoted, without_float32_rounding

_KINDS = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}


def _config(metadata: Metadata) -> Config:
    require(
        metadata,
        {
            "expert_weights_norm": (True,),
            "expert_gating_func": (SQRT_SOFTPLUS,),
            "expert_shared_count": (1,),
            "expert_group_count": (None, 0, 1),
            "attention.head_count_kv": (1,),
            "hyper_connection.magnitude": (None, 2),
            "hyper_connection.low_rank": (None, 0),
        },
    )
    layers = metadata.size("block_count") - metadata.count("nextn_predict_layers", 0)
    head_dim = metadata.size("attention.key_length")
    require(metadata, {"attention.value_length": (None, head_dim)})
    tables = metadata.count("hash_layer_count", 0)
    return {
        "model_type": "deepseek_v4",
        "architectures": ["DeepseekV4ForCausalLM"],
        "num_attention_heads": metadata.size("attention.head_count"),
        "num_key_value_heads": 1,
        "head_dim": head_dim,
        "q_lora_rank": metadata.size("attention.q_lora_rank"),
        "o_lora_rank": metadata.size("attention.output_lora_rank"),
        "o_groups": metadata.size("attention.output_group_count"),
        "layer_types": [_kind(metadata, ratio) for ratio in metadata.counts(_RATIOS, layers)],
        "sliding_window": metadata.size("attention.sliding_window"),
        "index_n_heads": metadata.size("attention.indexer.head_count"),
        "index_head_dim": metadata.size("attention.indexer.key_length"),
        "index_topk": metadata.size("attention.indexer.top_k"),
        **_rotary(metadata, head_dim),
        "mlp_layer_types": ["hash_moe" if layer < tables else "moe" for layer in range(layers)],
        "moe_intermediate_size": metadata.size("expert_feed_forward_length"),
        "n_routed_experts": metadata.size("expert_count"),
        "n_shared_experts": 1,
        "scoring_func": "sqrtsoftplus",
        "norm_topk_prob": True,
        "routed_scaling_factor": float(metadata.number("expert_weights_scale")),
        "swiglu_limit": _limit(metadata, layers),
        "hc_mult": metadata.size("hyper_connection.count"),
        "hc_sinkhorn_iters": metadata.size("hyper_connection.sinkhorn_iterations"),
        "hc_eps": metadata.number("hyper_connection.epsilon"),
        "num_nextn_predict_layers": 0,
        "attention_bias": False,
    }


_RATIOS = "attention.compress_ratios"


def _kind(metadata: Metadata, ratio: int) -> str:
    if ratio not in _KINDS:
        raise UnsupportedModelError(
            f"{metadata.where}: a layer compresses {ratio} tokens into one; "
            "layers of DeepSeek-V4 compress 4, 128 or none"
        )
    return _KINDS[ratio]


def _rotary(metadata: Metadata, head_dim: int) -> Config:
    """Layers with a sliding window alone have a base of their own, and no scaling."""
    share = rotated_share(metadata, head_dim)
    compressed = rotary(metadata, base="attention.compress_rope_freq_base")
    if compressed["rope_type"] == "yarn":
        compressed["attention_factor"] = 1.0  # as llama.cpp and the model have it
    main = float(metadata.number("rope.freq_base", 10000.0))
    return {
        "partial_rotary_factor": share,
        "rope_theta": main,
        "compress_rope_theta": compressed["rope_theta"],
        "rope_parameters": {
            "main": {"rope_type": "default", "rope_theta": main, "partial_rotary_factor": share},
            "compress": compressed | {"partial_rotary_factor": share},
        },
    }


def _limit(metadata: Metadata, layers: int) -> float:
    """The bound of gate and up, one for all layers and experts."""
    routed, shared = metadata.get("swiglu_clamp_exp"), metadata.get("swiglu_clamp_shexp")
    values = {_bound(metadata, value) for value in (*_each(routed, layers), *_each(shared, layers))}
    if len(values) != 1:
        raise CheckpointError(
            f"{metadata.where}: swiglu_clamp_exp and swiglu_clamp_shexp are {quoted(routed)} and "
            f"{quoted(shared)}; one bound for all layers is expected"
        )
    return values.pop()


def _each(value: Any, layers: int) -> tuple[Any, ...]:
    return () if value is None else value[:layers] if isinstance(value, tuple) else (value,)


def _bound(metadata: Metadata, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise metadata.refused("swiglu_clamp_exp")
    return float(without_float32_rounding(value))


def _compressor(file: str, name: str) -> dict[str, str]:
    return {
        f"{file}_kv.weight": f"{name}.kv_proj.weight",
        f"{file}_gate.weight": f"{name}.gate_proj.weight",
        f"{file}_ape.weight": f"{name}.position_bias",
        f"{file}_norm.weight": f"{name}.kv_norm.weight",
    }


def _streams(file: str, name: str) -> dict[str, str]:
    return {f"{file}_{part}.weight": f"{name}.{part}" for part in ("fn", "base", "scale")}


def _layer(config: Config) -> Places:
    attention = "self_attn"
    return {
        "attn_norm.weight": "input_layernorm.weight",
        "ffn_norm.weight": "post_attention_layernorm.weight",
        "attn_sinks.weight": f"{attention}.sinks",
        "attn_q_a.weight": f"{attention}.q_a_proj.weight",
        "attn_q_a_norm.weight": f"{attention}.q_a_norm.weight",
        "attn_q_b.weight": f"{attention}.q_b_proj.weight",
        "attn_kv.weight": f"{attention}.kv_proj.weight",
        "attn_kv_a_norm.weight": f"{attention}.kv_norm.weight",
        "attn_output_a.weight": f"{attention}.o_a_proj.weight",
        "attn_output_b.weight": f"{attention}.o_b_proj.weight",
        **_compressor("attn_compressor", f"{attention}.compressor"),
        **_compressor("indexer_compressor", f"{attention}.compressor.indexer"),
        "indexer.attn_q_b.weight": f"{attention}.compressor.indexer.q_b_proj.weight",
        "indexer.proj.weight": f"{attention}.compressor.indexer.scorer.weights_proj.weight",
        **_streams("hc_attn", "attn_hc"),
        **_streams("hc_ffn", "ffn_hc"),
        **ROUTER,
        "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
        "ffn_gate_tid2eid.weight": Place("mlp.gate.tid2eid", integers=True),
        **shared_experts("shared_experts"),
    }


_MODEL: Places = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "norm.weight",  # transformers would take model.norm for a norm of attention
    "output.weight": "lm_head.weight",
    **{f"output_hc_{part}.weight": f"model.hc_head.hc_{part}" for part in ("fn", "base", "scale")},
}
# A router's bias for tokens of pictures.
_IGNORED = frozenset({"exp_probs_b_vl.bias"})
ARCHITECTURES = {"deepseek4": Architecture(_config, _layer, _MODEL, ignored=_IGNORED)}
