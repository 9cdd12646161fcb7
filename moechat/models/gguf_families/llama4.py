"""Llama 4."""

from __future__ import annotations

from moechat.models.gguf_families.architecture import (
    ATTENTION,
    NORMS,
    SIGMOID,
    Architecture,
    Config,
    Places,
    attention_heads,
    require,
)
from moechat.models.gguf_families.positions import FREQUENCY_TABLE, factored_rotary
from moechat.models.gguf_metadata import Metadata

# As llama.cpp has them; files do not state these.
_CHUNK, _PERIOD = 8192, 4
_EXPERTS_WITHOUT_NORM = 128  # Maverick


def _config(metadata: Metadata) -> Config:
    require(
        metadata,
        {
            "expert_weights_norm": (None, False),
            "expert_weights_scale": (None, 0, 1),
            "expert_gating_func": (None, 0, SIGMOID),
            "expert_shared_count": (None, 1),
            "attention.sliding_window": (None, _CHUNK),
            "attention.sliding_window_pattern": (None, _PERIOD),
        },
    )
    heads = attention_heads(metadata)
    experts = metadata.size("expert_count")
    return {
        "model_type": "llama4_text",
        "architectures": ["Llama4ForCausalLM"],
        **heads,
        "rope_parameters": factored_rotary(metadata, heads["head_dim"]),
        "intermediate_size": metadata.size("expert_feed_forward_length"),
        "intermediate_size_mlp": metadata.size("feed_forward_length"),
        "num_local_experts": experts,
        "interleave_moe_layer_step": metadata.size("interleave_moe_layer_step"),
        "use_qk_norm": experts != _EXPERTS_WITHOUT_NORM,
        "no_rope_layer_interval": _PERIOD,
        "attention_chunk_size": _CHUNK,
        "attn_temperature_tuning": True,
        "floor_scale": _CHUNK,
        "attn_scale": 0.1,
        "attention_bias": False,
    }


def _layer(config: Config) -> Places:
    parts = ("gate", "up", "down")
    return {
        **NORMS,
        **ATTENTION,
        **{f"ffn_{part}.weight": f"feed_forward.{part}_proj.weight" for part in parts},
        "ffn_gate_inp.weight": "feed_forward.router.weight",
        **{f"ffn_{part}_shexp.weight": f"feed_forward.shared_expert.{part}_proj.weight" for part in parts},
    }


ARCHITECTURES = {"llama4": Architecture(_config, _layer, ignored=frozenset({FREQUENCY_TABLE}))}
