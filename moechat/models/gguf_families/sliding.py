"""MiMo-V2, K-EXAONE and North (Cohere 2 MoE): layers with a sliding window have other heads or positions."""

from __future__ import annotations

from moechat.errors import CheckpointError, UnsupportedModelError
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
    attention_heads,
    joined_attention,
    require,
    shared_experts,
)
from moechat.models.gguf_families.positions import (
    FREQUENCY_TABLE,
    factored_rotary,
    rotary,
    rotated_share,
    whole_rotary,
)
from moechat.models.gguf_metadata import Metadata

_SLIDING, _FULL = "sliding_attention", "full_attention"
_PATTERN = "attention.sliding_window_pattern"
_PERIOD = 4


def _layers(metadata: Metadata) -> int:
    return metadata.size("block_count") - metadata.count("nextn_predict_layers", 0)


def _kinds(metadata: Metadata) -> list[str]:
    """The attention of each layer: from flags, or every so many layers a full one."""
    layers = _layers(metadata)
    pattern = metadata.get(_PATTERN)
    if isinstance(pattern, tuple):
        return [_SLIDING if each else _FULL for each in metadata.flags(_PATTERN, layers) or ()]
    period = metadata.size(_PATTERN, _PERIOD)
    return [_SLIDING if (layer + 1) % period else _FULL for layer in range(layers)]


def _mlp_kinds(metadata: Metadata) -> list[str]:
    dense = metadata.count("leading_dense_block_count", 0)
    return ["dense" if layer < dense else "sparse" for layer in range(_layers(metadata))]


def _mimo2(metadata: Metadata) -> Config:
    require(
        metadata,
        {
            "expert_weights_norm": (None, True),
            "expert_gating_func": (None, 0, SIGMOID),
            "expert_group_count": (None, 0, 1),
            "expert_shared_count": (None, 0),
        },
    )
    kinds, tensors = _kinds(metadata), metadata.header.tensors
    keys = metadata.counts("attention.head_count_kv", len(kinds))
    full = next((own for own, kind in zip(keys, kinds, strict=True) if kind == _FULL), 0)
    # The model's ratio, which transformers does not read from the configuration.
    if not full or any(
        own != (full if kind == _FULL else 2 * full) for own, kind in zip(keys, kinds, strict=True)
    ):
        raise UnsupportedModelError(
            f"{metadata.where}: layers have {sorted(set(keys))} heads of keys; moechat reads MiMo's "
            "models with twice as many in layers with a sliding window as in others"
        )
    head_dim = metadata.size("attention.key_length")
    share = rotated_share(metadata, head_dim)
    base = rotary(metadata)
    sliding = {
        "rope_type": "default",
        "rope_theta": float(metadata.number("rope.freq_base_swa", base["rope_theta"])),
    }
    value_scale = metadata.get("attention.value_scale")
    return {
        "model_type": "mimo_v2_flash",
        "architectures": ["MiMoV2FlashForCausalLM"],
        "num_attention_heads": metadata.size("attention.head_count"),
        "num_key_value_heads": full,
        "head_dim": head_dim,
        "v_head_dim": metadata.size("attention.value_length", head_dim),
        "attention_value_scale": value_scale and float(metadata.number("attention.value_scale")),
        "sliding_window": metadata.size("attention.sliding_window"),
        "layer_types": kinds,
        "rope_parameters": {
            _FULL: base | {"partial_rotary_factor": share},
            _SLIDING: sliding | {"partial_rotary_factor": share},
        },
        "mlp_layer_types": [
            "sparse" if f"blk.{layer}.ffn_gate_inp.weight" in tensors else "dense"
            for layer in range(len(kinds))
        ],
        "intermediate_size": metadata.size("feed_forward_length"),
        "moe_intermediate_size": metadata.size("expert_feed_forward_length"),
        "n_routed_experts": metadata.size("expert_count"),
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": float(metadata.number("expert_weights_scale", 1.0)),
        "attention_bias": False,
    }


def _mimo2_layer(config: Config) -> Places:
    return {
        **NORMS,
        **ATTENTION,
        "attn_sinks.weight": "self_attn.sinks",
        **DENSE_MLP,
        **ROUTER,
        "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    }


def _mimo2_own(config: Config, layer: int) -> Places:
    """Queries, keys and values in one tensor, as in MiMo-V2.5."""
    keys = config["num_key_value_heads"] * (2 if config["layer_types"][layer] == _SLIDING else 1)
    size = config["head_dim"]
    return joined_attention(config["num_attention_heads"] * size, keys * size, keys * config["v_head_dim"])


def _exaone(metadata: Metadata) -> Config:
    require(metadata, {"expert_gating_func": (None, 0, SIGMOID)})
    heads = attention_heads(metadata)
    groups = metadata.count("expert_group_count", 0) or 1
    return {
        "model_type": "exaone_moe",
        "architectures": ["ExaoneMoeForCausalLM"],
        **heads,
        "rope_parameters": factored_rotary(metadata, heads["head_dim"]),
        "sliding_window": metadata.size("attention.sliding_window"),
        "layer_types": _kinds(metadata),
        "mlp_layer_types": _mlp_kinds(metadata),
        "intermediate_size": metadata.size("feed_forward_length"),
        "moe_intermediate_size": metadata.size("expert_feed_forward_length"),
        "num_experts": metadata.size("expert_count"),
        "num_shared_experts": metadata.size("expert_shared_count"),
        "n_group": groups,
        "topk_group": metadata.count("expert_group_used_count", 0) or groups,
        "norm_topk_prob": metadata.flag("expert_weights_norm"),
        "routed_scaling_factor": float(metadata.number("expert_weights_scale", 1.0)),
    }


def _exaone_layer(config: Config) -> Places:
    return {
        **NORMS,
        **ATTENTION,
        **QK_NORMS,
        **DENSE_MLP,
        **ROUTER,
        "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
        **shared_experts("shared_experts"),
    }


def _cohere2(metadata: Metadata) -> Config:
    require(metadata, {"expert_gating_func": (None, 0, SIGMOID), "expert_weights_scale": (None, 0, 1)})
    heads = attention_heads(metadata)
    rms, own = (metadata.get(f"attention.layer_norm{kind}_epsilon") for kind in ("_rms", ""))
    if not rms and not own:
        raise CheckpointError(f"{metadata.where} does not say the epsilon of its norms")
    kinds = _kinds(metadata)
    parameters = whole_rotary(metadata, heads["head_dim"])
    return {
        "model_type": "cohere2_moe",
        "architectures": ["Cohere2MoeForCausalLM"],
        **heads,
        "rms_norm_eps": metadata.number("attention.layer_norm_rms_epsilon") if rms else None,
        **({} if rms else {"layer_norm_eps": metadata.number("attention.layer_norm_epsilon")}),
        "rope_theta": parameters["rope_theta"],
        "rope_parameters": parameters,
        "sliding_window": metadata.size("attention.sliding_window"),
        "layer_types": kinds,
        "mlp_layer_types": _mlp_kinds(metadata),
        "prefix_dense_sliding_window_pattern": 1,  # the first, dense layers have positions
        "prefix_dense_intermediate_size": metadata.size("feed_forward_length"),
        "intermediate_size": metadata.size("expert_feed_forward_length"),
        "num_experts": metadata.size("expert_count"),
        "num_shared_experts": metadata.count("expert_shared_count", 0),
        "shared_expert_combination_strategy": "average",
        "expert_selection_fn": "sigmoid",
        "norm_topk_prob": metadata.flag("expert_weights_norm"),
        "logit_scale": float(metadata.number("logit_scale")),
        "attention_bias": False,
    }


def _cohere2_layer(config: Config) -> Places:
    return {
        "attn_norm.weight": "input_layernorm.weight",
        **ATTENTION,
        **DENSE_MLP,
        **ROUTER,
        **shared_experts("shared_experts"),
    }


ARCHITECTURES = {
    "mimo2": Architecture(_mimo2, _mimo2_layer, own=_mimo2_own),
    "exaone-moe": Architecture(_exaone, _exaone_layer, ignored=frozenset({FREQUENCY_TABLE})),
    "cohere2moe": Architecture(_cohere2, _cohere2_layer, epsilon=None),
}
