"""Granite 3 and 4: softmax routers and scaled residual streams; Granite 4 has layers of Mamba 2."""

from __future__ import annotations

from moechat.errors import CheckpointError
from moechat.models.gguf_families.architecture import (
    NORMS,
    Architecture,
    Config,
    Place,
    Places,
    attention_heads,
    require,
)
from moechat.models.gguf_families.early import interleaved_attention
from moechat.models.gguf_families.positions import whole_rotary
from moechat.models.gguf_metadata import Metadata
from moechat.store.gguf_changes import LogOfNegative, Reshape

_ROUTING = {
    "expert_weights_norm": (None, True),
    "expert_weights_scale": (None, 0, 1),
    "expert_gating_func": (None, 0, 1),
    "expert_group_count": (None, 0, 1),
    "expert_shared_count": (None, 0, 1),
}


def _common(metadata: Metadata, head_dim: int) -> Config:
    require(metadata, _ROUTING)
    return {
        "intermediate_size": metadata.size(
            "expert_feed_forward_length", metadata.size("feed_forward_length")
        ),
        "num_local_experts": metadata.size("expert_count"),
        "embedding_multiplier": float(metadata.number("embedding_scale", 1.0)),
        "residual_multiplier": float(metadata.number("residual_scale", 1.0)),
        "logits_scaling": float(metadata.number("logit_scale", 1.0)),
        "attention_multiplier": float(metadata.number("attention.scale", head_dim**-0.5)),
        "attention_bias": False,
    }


def _granite(metadata: Metadata) -> Config:
    heads = attention_heads(metadata)
    shared = metadata.count("expert_shared_feed_forward_length", 0)
    own: Config = {"model_type": "granitemoe", "architectures": ["GraniteMoeForCausalLM"]}
    if shared:
        own = {
            "model_type": "granitemoeshared",
            "architectures": ["GraniteMoeSharedForCausalLM"],
            "shared_intermediate_size": shared,
        }
    return {
        **own,
        **heads,
        **_common(metadata, heads["head_dim"]),
        "rope_parameters": whole_rotary(metadata, heads["head_dim"]),
    }


def _hybrid(metadata: Metadata) -> Config:
    layers, hidden = metadata.size("block_count"), metadata.size("embedding_length")
    keys = metadata.counts("attention.head_count_kv", layers)
    heads = metadata.size("attention.head_count")
    head_dim = hidden // heads
    require(metadata, dict.fromkeys(("attention.key_length", "attention.value_length"), (None, head_dim)))
    inner, mamba_heads = metadata.size("ssm.inner_size"), metadata.size("ssm.time_step_rank")
    if inner % hidden or inner % mamba_heads:
        raise CheckpointError(
            f"{metadata.where}: ssm.inner_size is {inner}; multiples of embedding_length, {hidden}, and of "
            f"ssm.time_step_rank, {mamba_heads}, are expected"
        )
    own: Config = {"position_embedding_type": None}
    if metadata.flag("rope.scaling.finetuned", True):  # llama.cpp's switch for positions in this architecture
        own = {"position_embedding_type": "rope", "rope_parameters": whole_rotary(metadata, head_dim)}
    return {
        "model_type": "granitemoehybrid",
        "architectures": ["GraniteMoeHybridForCausalLM"],
        **_common(metadata, head_dim),
        **own,
        "num_attention_heads": heads,
        "num_key_value_heads": max(keys) or heads,
        "layer_types": ["full_attention" if each else "linear_attention" for each in keys],
        "shared_intermediate_size": metadata.size("expert_shared_feed_forward_length"),
        "mamba_n_heads": mamba_heads,
        "mamba_d_head": inner // mamba_heads,
        "mamba_d_state": metadata.size("ssm.state_size"),
        "mamba_n_groups": metadata.size("ssm.group_count"),
        "mamba_d_conv": metadata.size("ssm.conv_kernel"),
        "mamba_expand": inner // hidden,
        "mamba_conv_bias": any(name.endswith(".ssm_conv1d.bias") for name in metadata.header.tensors),
        "mamba_proj_bias": False,
    }


def _layer(config: Config) -> Places:
    return {
        **NORMS,
        **interleaved_attention(config),
        "ffn_gate_inp.weight": "block_sparse_moe.router.weight",
        # moechat.models.joined_weights makes shared_mlp.input_linear of the first two.
        "ffn_gate_shexp.weight": "shared_mlp.gate_linear.weight",
        "ffn_up_shexp.weight": "shared_mlp.up_linear.weight",
        "ffn_down_shexp.weight": "shared_mlp.output_linear.weight",
    }


def _hybrid_layer(config: Config) -> Places:
    heads, groups = config["mamba_n_heads"], config["mamba_n_groups"]
    inner = heads * config["mamba_d_head"]
    channels = inner + 2 * groups * config["mamba_d_state"]
    kernel = Reshape((channels, 1, config["mamba_d_conv"]))
    return {
        **_layer(config),
        "ssm_in.weight": "mamba.in_proj.weight",
        "ssm_conv1d.weight": Place("mamba.conv1d.weight", (kernel,)),
        "ssm_conv1d.bias": "mamba.conv1d.bias",
        "ssm_dt.bias": "mamba.dt_bias",
        "ssm_a": Place("mamba.A_log", (LogOfNegative(), Reshape((heads,)))),
        "ssm_d": Place("mamba.D", (Reshape((heads,)),)),
        "ssm_norm.weight": Place("mamba.norm.weight", (Reshape((inner,)),)),
        "ssm_out.weight": "mamba.out_proj.weight",
    }


ARCHITECTURES = {
    "granitemoe": Architecture(_granite, _layer),
    "granitehybrid": Architecture(_hybrid, _hybrid_layer),
}
