"""Laguna and Gemma 4: layers with a sliding window have a rotary embedding of their own, or other heads."""

from __future__ import annotations

from moechat.errors import CheckpointError
from moechat.models.gguf_families.architecture import (
    ATTENTION,
    DENSE_MLP,
    NORMS,
    QK_NORMS,
    ROUTER,
    SIGMOID,
    Architecture,
    Config,
    Places,
    require,
    shared_experts,
)
from moechat.models.gguf_families.positions import rotary, rotated_share
from moechat.models.gguf_metadata import Metadata

_SLIDING, _FULL = "sliding_attention", "full_attention"


def _sliding_rotary(metadata: Metadata) -> Config:
    """Rotary parameters of layers with a sliding window, which scaling does not concern."""
    return {
        "rope_type": "default",
        "rope_theta": float(
            metadata.number("rope.freq_base_swa", float(metadata.number("rope.freq_base", 10000.0)))
        ),
    }


def _laguna(metadata: Metadata) -> Config:
    require(
        metadata,
        {
            "expert_weights_norm": (None, True),
            "expert_gating_func": (None, 0, SIGMOID),
            "expert_group_count": (None, 0, 1),
            "expert_shared_count": (None, 1),
        },
    )
    layers = metadata.size("block_count")
    window = metadata.count("attention.sliding_window", 0)
    period = metadata.size("attention.sliding_window_pattern", 4)
    kinds = [_SLIDING if window and layer % period else _FULL for layer in range(layers)]
    heads = metadata.counts("attention.head_count", layers)
    head_dim = metadata.size("attention.key_length")
    dense = metadata.count("leading_dense_block_count", 0)
    gate = metadata.header.tensors.get("blk.0.attn_gate.weight")
    if gate is None:
        raise CheckpointError(f"{metadata.where} lacks blk.0.attn_gate.weight")
    full = rotary(metadata) | {"partial_rotary_factor": rotated_share(metadata, head_dim)}
    sliding = _sliding_rotary(metadata) | {
        "partial_rotary_factor": rotated_share(metadata, head_dim, "rope.dimension_count_swa")
    }
    return {
        "model_type": "laguna",
        "architectures": ["LagunaForCausalLM"],
        "num_attention_heads": heads[0],
        "num_attention_heads_per_layer": list(heads),
        "num_key_value_heads": max(metadata.counts("attention.head_count_kv", layers)),
        "head_dim": head_dim,
        "gating": "per-head" if gate.shape[0] == heads[0] else "per-element",
        "sliding_window": window or None,
        "layer_types": kinds,
        "rope_parameters": {_FULL: full, _SLIDING: sliding},
        "mlp_layer_types": ["dense" if layer < dense else "sparse" for layer in range(layers)],
        "intermediate_size": metadata.size("feed_forward_length"),
        "moe_intermediate_size": metadata.size("expert_feed_forward_length"),
        "shared_expert_intermediate_size": metadata.size("expert_shared_feed_forward_length"),
        "num_experts": metadata.size("expert_count"),
        "moe_routed_scaling_factor": float(metadata.number("expert_weights_scale", 1.0)),
        "moe_router_logit_softcapping": 0.0,
        "attention_bias": False,
    }


def _laguna_layer(config: Config) -> Places:
    return {
        **NORMS,
        **ATTENTION,
        **QK_NORMS,
        **DENSE_MLP,
        **ROUTER,
        "attn_gate.weight": "self_attn.g_proj.weight",
        "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
        **shared_experts("shared_experts"),
    }


# The factors of the file's rope_freqs, which turn the other frequencies off: the same in every Gemma 4.
_GEMMA_4_ROTATED = 0.25


def _gemma4(metadata: Metadata) -> Config:
    require(
        metadata,
        {
            "expert_weights_norm": (None, True),
            "expert_weights_scale": (None, 0, 1),
            "expert_gating_func": (None, 0, 1),
            "attention.shared_kv_layers": (None, 0),
            "embedding_length_per_layer_input": (None, 0),
            "attention.scale": (None, 0, 1),
        },
    )
    layers = metadata.size("block_count")
    sliding = metadata.flags("attention.sliding_window_pattern", layers)
    if sliding is None or all(sliding):
        raise CheckpointError(f"{metadata.where} does not say which layers have a sliding window")
    keys = metadata.counts("attention.head_count_kv", layers)
    by_kind = {
        kind: {each for each, own in zip(keys, sliding, strict=True) if own is kind} for kind in (True, False)
    }
    if any(len(found) > 1 for found in by_kind.values()):
        raise metadata.refused("attention.head_count_kv")
    full = sliding.index(False)
    dense = metadata.counts("feed_forward_length", layers)
    if len(set(dense)) != 1:
        raise metadata.refused("feed_forward_length")
    return {
        "model_type": "gemma4_text",
        "architectures": ["Gemma4ForCausalLM"],
        "num_attention_heads": metadata.size("attention.head_count"),
        "num_key_value_heads": max(by_kind[True], default=keys[full]),
        "num_global_key_value_heads": keys[full],
        "head_dim": metadata.size("attention.key_length_swa"),
        "global_head_dim": metadata.size("attention.key_length"),
        # As in files of which full layers have no matrix of their own for values.
        "attention_k_eq_v": f"blk.{full}.attn_v.weight" not in metadata.header.tensors,
        "sliding_window": metadata.size("attention.sliding_window"),
        "layer_types": [_SLIDING if each else _FULL for each in sliding],
        "rope_parameters": {
            _FULL: {
                "rope_type": "proportional",
                "rope_theta": rotary(metadata)["rope_theta"],
                "partial_rotary_factor": _GEMMA_4_ROTATED,
            },
            _SLIDING: _sliding_rotary(metadata),
        },
        "intermediate_size": dense[0],
        "moe_intermediate_size": metadata.size("expert_feed_forward_length"),
        "enable_moe_block": True,
        "num_experts": metadata.size("expert_count"),
        "top_k_experts": metadata.size("expert_used_count"),
        "final_logit_softcapping": metadata.get("final_logit_softcapping") or None,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "attention_bias": False,
    }


def _gemma4_layer(config: Config) -> Places:
    return {
        "attn_norm.weight": "input_layernorm.weight",
        "post_attention_norm.weight": "post_attention_layernorm.weight",
        "ffn_norm.weight": "pre_feedforward_layernorm.weight",
        "post_ffw_norm.weight": "post_feedforward_layernorm.weight",
        "pre_ffw_norm_2.weight": "pre_feedforward_layernorm_2.weight",
        "post_ffw_norm_1.weight": "post_feedforward_layernorm_1.weight",
        "post_ffw_norm_2.weight": "post_feedforward_layernorm_2.weight",
        **ATTENTION,
        **QK_NORMS,
        **DENSE_MLP,
        "layer_output_scale.weight": "layer_scalar",
        "ffn_gate_inp.weight": "router.proj.weight",
        "ffn_gate_inp.scale": "router.scale",
        "ffn_down_exps.scale": "router.per_expert_scale",
    }


ARCHITECTURES = {
    "laguna": Architecture(_laguna, _laguna_layer),
    "gemma4": Architecture(_gemma4, _gemma4_layer, ignored=frozenset({"rope_freqs.weight"})),
}
