"""Mixtral, Qwen2-MoE, Qwen3-MoE and OLMoE."""

from __future__ import annotations

from moechat.models.gguf_families.architecture import (
    ATTENTION,
    ATTENTION_BIASES,
    NORMS,
    QK_NORMS,
    ROUTER,
    Architecture,
    Config,
    Place,
    Places,
    attention_heads,
    require,
    shared_experts,
)
from moechat.models.gguf_families.positions import whole_rotary
from moechat.models.gguf_metadata import Metadata
from moechat.store.gguf_changes import JoinHalves, Reshape


def interleaved_attention(config: Config) -> Places:
    """Attention whose queries and keys the file interleaves for llama.cpp's older rotary embedding."""
    queries, keys = config["num_attention_heads"], config["num_key_value_heads"]
    return {
        **ATTENTION,
        "attn_q.weight": Place("self_attn.q_proj.weight", (JoinHalves(queries),)),
        "attn_k.weight": Place("self_attn.k_proj.weight", (JoinHalves(keys),)),
    }


def softmax_routing(metadata: Metadata, norm: bool) -> None:
    """Reject routing that is not the largest softmax probabilities, with one group and no shared expert."""
    require(
        metadata,
        {
            "expert_weights_norm": (None, norm),
            "expert_weights_scale": (None, 0, 1),
            "expert_gating_func": (None, 0, 1),
            "expert_shared_count": (None, 0),
            "expert_group_count": (None, 0, 1),
        },
    )


def _heads(metadata: Metadata) -> Config:
    heads = attention_heads(metadata)
    return heads | {"rope_parameters": whole_rotary(metadata, heads["head_dim"])}


def _mixtral(metadata: Metadata) -> Config:
    softmax_routing(metadata, norm=True)
    return {
        "model_type": "mixtral",
        "architectures": ["MixtralForCausalLM"],
        **_heads(metadata),
        "intermediate_size": metadata.size("feed_forward_length"),
        "num_local_experts": metadata.size("expert_count"),
        "sliding_window": metadata.get("attention.sliding_window") or None,
    }


def _qwen2_moe(metadata: Metadata) -> Config:
    softmax_routing(metadata, norm=False)
    dense = metadata.size("feed_forward_length")
    return {
        "model_type": "qwen2_moe",
        "architectures": ["Qwen2MoeForCausalLM"],
        **_heads(metadata),
        "intermediate_size": dense,
        "moe_intermediate_size": metadata.size("expert_feed_forward_length", dense),
        "shared_expert_intermediate_size": metadata.size("expert_shared_feed_forward_length"),
        "num_experts": metadata.size("expert_count"),
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "qkv_bias": True,
        "use_sliding_window": False,
    }


def _qwen3_moe(metadata: Metadata) -> Config:
    softmax_routing(metadata, norm=True)
    # Positions of text are the same in all sections of a rotary embedding for pictures.
    metadata.get("rope.dimension_sections")
    return {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        **_heads(metadata),
        "intermediate_size": metadata.size("feed_forward_length"),
        "moe_intermediate_size": metadata.size("expert_feed_forward_length"),
        "num_experts": metadata.size("expert_count"),
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "attention_bias": False,
    }


def _olmoe(metadata: Metadata) -> Config:
    softmax_routing(metadata, norm=False)
    return {
        "model_type": "olmoe",
        "architectures": ["OlmoeForCausalLM"],
        **_heads(metadata),
        "intermediate_size": metadata.size("feed_forward_length"),
        "num_experts": metadata.size("expert_count"),
        "norm_topk_prob": False,
        "clip_qkv": metadata.get("attention.clamp_kqv") or None,
        "attention_bias": False,
    }


def shared_expert_gate(config: Config) -> Place:
    """The gate of a shared expert: one row, which most files store without a dimension for it."""
    return Place("mlp.shared_expert_gate.weight", (Reshape((1, config["hidden_size"])),))


def _qwen2_layer(config: Config) -> Places:
    return {
        **NORMS,
        **ATTENTION,
        **ATTENTION_BIASES,
        **ROUTER,
        **shared_experts("shared_expert"),
        "ffn_gate_inp_shexp.weight": shared_expert_gate(config),
    }


def _mixtral_layer(config: Config) -> Places:
    return {
        **NORMS,
        **interleaved_attention(config),
        "ffn_gate_inp.weight": "block_sparse_moe.gate.weight",
    }


def _layer_with_norms(config: Config) -> Places:
    return {**NORMS, **ATTENTION, **QK_NORMS, **ROUTER}


ARCHITECTURES = {
    "llama": Architecture(_mixtral, _mixtral_layer),  # with experts; Mixtral's attention is Llama's
    "qwen2moe": Architecture(_qwen2_moe, _qwen2_layer),
    "qwen3moe": Architecture(_qwen3_moe, _layer_with_norms),
    "qwen3vlmoe": Architecture(_qwen3_moe, _layer_with_norms),  # its part for text
    "olmoe": Architecture(_olmoe, _layer_with_norms),
}
