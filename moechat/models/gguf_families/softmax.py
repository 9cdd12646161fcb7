"""Hunyuan-A13B and ERNIE 4.5: routers that score by softmax."""

from __future__ import annotations

from moechat.errors import UnsupportedModelError
from moechat.models.gguf_families.architecture import (
    ATTENTION,
    DENSE_MLP,
    NORMS,
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
from moechat.store.gguf_changes import Reshape

_ROUTING = {
    "expert_weights_norm": (None, True),
    "expert_weights_scale": (None, 0, 1),
    "expert_gating_func": (None, 0, 1),
    "expert_group_count": (None, 0, 1),
}


def _heads(metadata: Metadata) -> Config:
    heads = attention_heads(metadata)
    return heads | {"rope_parameters": whole_rotary(metadata, heads["head_dim"])}


def _hunyuan(metadata: Metadata) -> Config:
    require(metadata, {**_ROUTING, "expert_shared_count": (None, 1)})
    size = metadata.size("feed_forward_length")
    for key in ("expert_feed_forward_length", "expert_shared_feed_forward_length"):
        if metadata.size(key, size) != size:
            raise UnsupportedModelError(
                f"{metadata.where}: {key} is {metadata.get(key)}, feed_forward_length {size}; moechat reads "
                "Hunyuan's models with experts of one size"
            )
    return {
        "model_type": "hunyuan_v1_moe",
        "architectures": ["HunYuanMoEV1ForCausalLM"],
        **_heads(metadata),
        "intermediate_size": size,
        "num_experts": metadata.size("expert_count"),
        "moe_topk": metadata.size("expert_used_count"),
        "attention_bias": False,
    }


def _hunyuan_layer(config: Config) -> Places:
    return {
        **NORMS,
        **ATTENTION,
        "attn_q_norm.weight": "self_attn.query_layernorm.weight",
        "attn_k_norm.weight": "self_attn.key_layernorm.weight",
        "ffn_gate_inp.weight": "mlp.gate.wg.weight",
        **shared_experts("shared_mlp"),
    }


def _ernie(metadata: Metadata) -> Config:
    require(metadata, _ROUTING)
    metadata.get("expert_shared_feed_forward_length")  # follows from the number of shared experts
    return {
        "model_type": "ernie4_5_moe",
        "architectures": ["Ernie4_5_MoeForCausalLM"],
        **_heads(metadata),
        "intermediate_size": metadata.size("feed_forward_length"),
        "moe_intermediate_size": metadata.size("expert_feed_forward_length"),
        "moe_num_experts": metadata.size("expert_count"),
        "moe_k": metadata.size("expert_used_count"),
        "moe_num_shared_experts": metadata.count("expert_shared_count", 0),
        "moe_layer_start_index": metadata.count("leading_dense_block_count", 0),
        "moe_layer_end_index": -1,
        "moe_layer_interval": metadata.size("interleave_moe_layer_step", 1),
        "use_bias": False,
    }


def _ernie_layer(config: Config) -> Places:
    bias = Reshape((1, config["moe_num_experts"]))
    return {
        **NORMS,
        **ATTENTION,
        **DENSE_MLP,
        **ROUTER,
        "exp_probs_b.bias": Place("mlp.moe_statics.e_score_correction_bias", (bias,)),
        **shared_experts("shared_experts"),
    }


ARCHITECTURES = {
    "hunyuan-moe": Architecture(_hunyuan, _hunyuan_layer),
    "ernie4_5-moe": Architecture(_ernie, _ernie_layer),
}
