"""Qwen3-Next, Qwen3.5-MoE: gated linear attention in most layers."""

from __future__ import annotations

from moechat.errors import CheckpointError
from moechat.models.gguf_families.architecture import (
    ATTENTION,
    ROUTER,
    Architecture,
    Config,
    Place,
    Places,
    attention_heads,
    shared_experts,
)
from moechat.models.gguf_families.early import shared_expert_gate, softmax_routing
from moechat.models.gguf_families.positions import partial_rotary
from moechat.models.gguf_metadata import Metadata
from moechat.store.gguf_changes import Add, Change, LogOfNegative, Reshape, Ungroup

_MINUS_ONE = Add(-1.0)
_INTERVAL = 4


def _linear_attention(metadata: Metadata) -> Config:
    values, inner = metadata.size("ssm.time_step_rank"), metadata.size("ssm.inner_size")
    keys = metadata.size("ssm.group_count")
    if inner % values or values % keys:
        raise CheckpointError(
            f"{metadata.where}: ssm.inner_size {inner}, ssm.time_step_rank {values} and ssm.group_count "
            f"{keys} do not fit together"
        )
    return {
        "linear_num_value_heads": values,
        "linear_value_head_dim": inner // values,
        "linear_num_key_heads": keys,
        "linear_key_head_dim": metadata.size("ssm.state_size"),
        "linear_conv_kernel_dim": metadata.size("ssm.conv_kernel"),
    }


def _config(metadata: Metadata) -> Config:
    softmax_routing(metadata, norm=True)
    heads = attention_heads(metadata)
    layers = metadata.size("block_count") - metadata.count("nextn_predict_layers", 0)
    interval = metadata.size("full_attention_interval", _INTERVAL)
    recurrent = metadata.flags("attention.recurrent_layers", layers)
    if recurrent is None:
        recurrent = tuple((layer + 1) % interval != 0 for layer in range(layers))
    return {
        **heads,
        **_linear_attention(metadata),
        "rope_parameters": partial_rotary(metadata, heads["head_dim"]),
        "layer_types": ["linear_attention" if each else "full_attention" for each in recurrent],
        "moe_intermediate_size": metadata.size("expert_feed_forward_length"),
        "shared_expert_intermediate_size": metadata.size("expert_shared_feed_forward_length"),
        "num_experts": metadata.size("expert_count"),
        "attention_bias": False,
    }


def _qwen3_next(metadata: Metadata) -> Config:
    return _config(metadata) | {
        "model_type": "qwen3_next",
        "architectures": ["Qwen3NextForCausalLM"],
        "intermediate_size": metadata.size("feed_forward_length", 1),
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _qwen35_moe(metadata: Metadata) -> Config:
    # Positions of text are the same in all three sections of its rotary embedding.
    metadata.get("rope.dimension_sections")
    return _config(metadata) | {
        "model_type": "qwen3_5_moe_text",
        "architectures": ["Qwen3_5MoeForCausalLM"],
    }


def _norms() -> Places:
    return {
        "attn_norm.weight": Place("input_layernorm.weight", (_MINUS_ONE,)),
        "post_attention_norm.weight": Place("post_attention_layernorm.weight", (_MINUS_ONE,)),
        "attn_q_norm.weight": Place("self_attn.q_norm.weight", (_MINUS_ONE,)),
        "attn_k_norm.weight": Place("self_attn.k_norm.weight", (_MINUS_ONE,)),
        "ssm_norm.weight": "linear_attn.norm.weight",
    }


def _feed_forward(config: Config) -> Places:
    return {
        **ROUTER,
        **shared_experts("shared_expert"),
        "ffn_gate_inp_shexp.weight": shared_expert_gate(config),
    }


def _kernel(config: Config) -> Reshape:
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    values = config["linear_num_value_heads"] * config["linear_value_head_dim"]
    return Reshape((2 * keys + values, 1, config["linear_conv_kernel_dim"]))


def _qwen3_next_layer(config: Config) -> Places:
    return {
        **_norms(),
        **ATTENTION,
        **_feed_forward(config),
        # moechat.models.joined_weights makes in_proj_qkvz of the first two; early files hold it as ssm_in.
        "attn_qkv.weight": "linear_attn.in_proj_qkv.weight",
        "attn_gate.weight": "linear_attn.in_proj_z.weight",
        "ssm_in.weight": "linear_attn.in_proj_qkvz.weight",
        "ssm_ba.weight": "linear_attn.in_proj_ba.weight",
        "ssm_conv1d.weight": Place("linear_attn.conv1d.weight", (_kernel(config),)),
        "ssm_dt.bias": "linear_attn.dt_bias",
        "ssm_a": Place("linear_attn.A_log", (LogOfNegative(),)),
        "ssm_out.weight": "linear_attn.out_proj.weight",
    }


def _qwen35_moe_layer(config: Config) -> Places:
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    size = config["linear_value_head_dim"]
    before = 2 * keys * config["linear_key_head_dim"]

    def grouped(size: int = 1, axis: int = 0, start: int = 0) -> tuple[Change, ...]:
        """The file has the values' heads in another order: the first of every key's, then the second."""
        return (Ungroup(values // keys, keys, size, axis, start),) if values != keys else ()

    return {
        **_norms(),
        **ATTENTION,
        **_feed_forward(config),
        "attn_qkv.weight": Place("linear_attn.in_proj_qkv.weight", grouped(size, start=before)),
        "attn_gate.weight": Place("linear_attn.in_proj_z.weight", grouped(size)),
        "ssm_beta.weight": Place("linear_attn.in_proj_b.weight", grouped()),
        "ssm_alpha.weight": Place("linear_attn.in_proj_a.weight", grouped()),
        "ssm_conv1d.weight": Place(
            "linear_attn.conv1d.weight", (*grouped(size, start=before), _kernel(config))
        ),
        "ssm_dt.bias": Place("linear_attn.dt_bias", grouped()),
        "ssm_a": Place("linear_attn.A_log", (LogOfNegative(), *grouped())),
        "ssm_out.weight": Place("linear_attn.out_proj.weight", grouped(size, axis=1)),
    }


_MODEL: Places = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": Place("model.norm.weight", (_MINUS_ONE,)),
    "output.weight": "lm_head.weight",
}
ARCHITECTURES = {
    "qwen3next": Architecture(_qwen3_next, _qwen3_next_layer, _MODEL),
    "qwen35moe": Architecture(_qwen35_moe, _qwen35_moe_layer, _MODEL),
}
