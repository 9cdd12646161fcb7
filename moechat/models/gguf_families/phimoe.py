"""Phi-3.5-MoE."""

from __future__ import annotations

from moechat.errors import CheckpointError
from moechat.models.gguf_families.architecture import (
    ATTENTION,
    ATTENTION_BIASES,
    MODEL,
    NORMS,
    Architecture,
    Config,
    Places,
    attention_heads,
    require,
)
from moechat.models.gguf_families.positions import whole_rotary
from moechat.models.gguf_metadata import Metadata

# Of Phi-3.5-MoE, the one model with scaled frequencies. The converter stores the method's default instead.
_MAGNITUDE = 1.243163121016122
_EXPERTS = 2  # of a token: the model's routing knows no other number
_LONG, _SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
_SCALING = "rope.scaling."


def _config(metadata: Metadata) -> Config:
    require(
        metadata,
        {
            "expert_used_count": (_EXPERTS,),
            "expert_weights_norm": (None, True),
            "expert_gating_func": (None, 0, 1),
            "expert_shared_count": (None, 0),
        },
    )
    heads = attention_heads(metadata)
    window = metadata.count("attention.sliding_window", 0)
    return {
        "model_type": "phimoe",
        "architectures": ["PhimoeForCausalLM"],
        **heads,
        "rope_parameters": _rotary(metadata, heads["head_dim"]),
        "intermediate_size": metadata.size("feed_forward_length"),
        "num_local_experts": metadata.size("expert_count"),
        "sliding_window": window if 0 < window < metadata.size("context_length") else None,
        "attention_bias": "blk.0.attn_q.bias" in metadata.header.tensors,
        "lm_head_bias": "output.bias" in metadata.header.tensors,
    }


def _rotary(metadata: Metadata, head_dim: int) -> Config:
    short, long = metadata.table(_SHORT), metadata.table(_LONG)
    if short is None and long is None:
        return whole_rotary(metadata, head_dim)
    if short is None or long is None or {len(short), len(long)} != {head_dim // 2}:
        raise CheckpointError(f"{metadata.where}: {_SHORT} and {_LONG} are not {head_dim // 2} factors each")
    require(
        metadata,
        {
            "rope.dimension_count": (None, head_dim),
            f"{_SCALING}type": (None, "longrope"),
            f"{_SCALING}factor": (None, 0, 1),
        },
    )
    return {
        "rope_type": "longrope",
        "rope_theta": float(metadata.number("rope.freq_base", 10000.0)),
        "short_factor": list(short),
        "long_factor": list(long),
        "short_mscale": _MAGNITUDE,
        "long_mscale": _MAGNITUDE,
        "original_max_position_embeddings": metadata.size(f"{_SCALING}original_context_length"),
    }


def _layer(config: Config) -> Places:
    return {
        **NORMS,
        "attn_norm.bias": "input_layernorm.bias",
        "ffn_norm.bias": "post_attention_layernorm.bias",
        **ATTENTION,
        **ATTENTION_BIASES,
        "attn_output.bias": "self_attn.o_proj.bias",
        "ffn_gate_inp.weight": "mlp.router.weight",
    }


_MODEL: Places = {**MODEL, "output_norm.bias": "model.norm.bias", "output.bias": "lm_head.bias"}
ARCHITECTURES = {"phimoe": Architecture(_config, _layer, _MODEL, ignored=frozenset({_LONG, _SHORT}))}
