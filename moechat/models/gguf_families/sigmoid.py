"""MiniMax-M2, dots.llm1, LFM2-MoE and Trinity (AFMoE): routers that score by sigmoid."""

from __future__ import annotations

from moechat.models.gguf_families.architecture import (
    ATTENTION,
    DENSE_MLP,
    NORMS,
    QK_NORMS,
    ROUTER,
    SIGMOID,
    Architecture,
    Config,
    Place,
    Places,
    attention_heads,
    require,
    shared_experts,
)
from moechat.models.gguf_families.glm import sigmoid_routing
from moechat.models.gguf_families.positions import partial_rotary, whole_rotary
from moechat.models.gguf_metadata import Metadata
from moechat.store.gguf_changes import Reshape

_ROUTING = {
    "expert_weights_norm": (None, True),
    "expert_gating_func": (None, 0, SIGMOID),
    "expert_group_count": (None, 0, 1),
}


def _minimax_m2(metadata: Metadata) -> Config:
    require(metadata, {**_ROUTING, "expert_weights_scale": (None, 0, 1), "expert_shared_count": (None, 0)})
    heads = attention_heads(metadata)
    return {
        "model_type": "minimax_m2",
        "architectures": ["MiniMaxM2ForCausalLM"],
        **heads,
        "rope_parameters": partial_rotary(metadata, heads["head_dim"]),
        "intermediate_size": metadata.size("expert_feed_forward_length"),
        "num_local_experts": metadata.size("expert_count"),
    }


def _minimax_m2_layer(config: Config) -> Places:
    return {
        **NORMS,
        **ATTENTION,
        **QK_NORMS,
        **ROUTER,
        "exp_probs_b.bias": "mlp.e_score_correction_bias",
    }


def _dots1(metadata: Metadata) -> Config:
    require(metadata, {"expert_gating_func": (None, 0, SIGMOID)})
    heads = attention_heads(metadata)
    return {
        "model_type": "dots1",
        "architectures": ["Dots1ForCausalLM"],
        **heads,
        **sigmoid_routing(metadata),
        "rope_parameters": whole_rotary(metadata, heads["head_dim"]),
        "first_k_dense_replace": metadata.count("leading_dense_block_count", 0),
        "layer_types": ["full_attention"] * metadata.size("block_count"),
        "attention_bias": False,
    }


def _dots1_layer(config: Config) -> Places:
    return {
        **NORMS,
        **ATTENTION,
        **QK_NORMS,
        **DENSE_MLP,
        **ROUTER,
        "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
        **shared_experts("shared_experts"),
    }


def _lfm2(metadata: Metadata) -> Config:
    require(metadata, {**_ROUTING, "expert_weights_scale": (None, 0, 1), "expert_shared_count": (None, 0)})
    layers = metadata.size("block_count")
    keys = metadata.counts("attention.head_count_kv", layers)
    heads = metadata.size("attention.head_count")
    head_dim = metadata.size("embedding_length") // heads
    require(
        metadata,
        {"attention.key_length": (None, head_dim), "attention.value_length": (None, head_dim)},
    )
    return {
        "model_type": "lfm2_moe",
        "architectures": ["Lfm2MoeForCausalLM"],
        "num_attention_heads": heads,
        "num_key_value_heads": max(max(keys), 1),
        "norm_eps": metadata.number("attention.layer_norm_rms_epsilon"),
        "rope_parameters": whole_rotary(metadata, head_dim),
        "layer_types": ["full_attention" if each else "conv" for each in keys],
        "conv_L_cache": metadata.size("shortconv.l_cache"),
        "conv_bias": False,
        "intermediate_size": metadata.size("feed_forward_length"),
        "moe_intermediate_size": metadata.size("expert_feed_forward_length"),
        "num_dense_layers": metadata.count("leading_dense_block_count", 0),
        "num_experts": metadata.size("expert_count"),
        "norm_topk_prob": True,
        "use_expert_bias": True,
        "routed_scaling_factor": 1.0,
    }


def _lfm2_layer(config: Config) -> Places:
    kernel = Reshape((config["hidden_size"], 1, config["conv_L_cache"]))
    return {
        "attn_norm.weight": "operator_norm.weight",
        "ffn_norm.weight": "ffn_norm.weight",
        **ATTENTION,
        "attn_output.weight": "self_attn.out_proj.weight",
        "attn_q_norm.weight": "self_attn.q_layernorm.weight",
        "attn_k_norm.weight": "self_attn.k_layernorm.weight",
        "shortconv.conv.weight": Place("conv.conv.weight", (kernel,)),
        "shortconv.in_proj.weight": "conv.in_proj.weight",
        "shortconv.out_proj.weight": "conv.out_proj.weight",
        "ffn_gate.weight": "feed_forward.w1.weight",
        "ffn_down.weight": "feed_forward.w2.weight",
        "ffn_up.weight": "feed_forward.w3.weight",
        "ffn_gate_inp.weight": "feed_forward.gate.weight",
        "exp_probs_b.bias": "feed_forward.expert_bias",
    }


_LFM2_MODEL: Places = {
    "token_embd.weight": "model.embed_tokens.weight",
    "token_embd_norm.weight": "model.embedding_norm.weight",  # llama.cpp's name; it is the last norm
    "output_norm.weight": "model.embedding_norm.weight",
    "output.weight": "lm_head.weight",
}


def _afmoe(metadata: Metadata) -> Config:
    require(metadata, _ROUTING)
    heads = attention_heads(metadata)
    layers = metadata.size("block_count")
    period = metadata.size("attention.sliding_window_pattern", 4)
    return {
        "model_type": "afmoe",
        "architectures": ["AfmoeForCausalLM"],
        **heads,
        "rope_parameters": whole_rotary(metadata, heads["head_dim"]),
        "intermediate_size": metadata.size("feed_forward_length"),
        "moe_intermediate_size": metadata.size("expert_feed_forward_length"),
        "num_dense_layers": metadata.count("leading_dense_block_count", 0),
        "num_experts": metadata.size("expert_count"),
        "num_shared_experts": metadata.count("expert_shared_count"),
        "route_scale": float(metadata.number("expert_weights_scale", 1.0)),
        "sliding_window": metadata.size("attention.sliding_window"),
        "global_attn_every_n_layers": period,
        "layer_types": [
            "sliding_attention" if (layer + 1) % period else "full_attention" for layer in range(layers)
        ],
        "mup_enabled": True,  # llama.cpp always scales embeddings
        "attention_bias": False,
    }


def _afmoe_layer(config: Config) -> Places:
    return {
        "attn_norm.weight": "input_layernorm.weight",
        "post_attention_norm.weight": "post_attention_layernorm.weight",
        "ffn_norm.weight": "pre_mlp_layernorm.weight",
        "post_ffw_norm.weight": "post_mlp_layernorm.weight",
        **ATTENTION,
        **QK_NORMS,
        **DENSE_MLP,
        "attn_gate.weight": "self_attn.gate_proj.weight",
        "ffn_gate_inp.weight": "mlp.router.gate.weight",
        "exp_probs_b.bias": "mlp.expert_bias",
        **shared_experts("shared_experts"),
    }


ARCHITECTURES = {
    "minimax-m2": Architecture(_minimax_m2, _minimax_m2_layer),
    "dots1": Architecture(_dots1, _dots1_layer),
    "lfm2moe": Architecture(_lfm2, _lfm2_layer, _LFM2_MODEL),
    "afmoe": Architecture(_afmoe, _afmoe_layer),
}
