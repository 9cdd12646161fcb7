"""gpt-oss."""

from __future__ import annotations

from moechat.models.gguf_families.architecture import (
    ATTENTION,
    ATTENTION_BIASES,
    Architecture,
    Config,
    Places,
    attention_heads,
    require,
)
from moechat.models.gguf_families.positions import whole_rotary
from moechat.models.gguf_metadata import Metadata

_PERIOD = 2


def _config(metadata: Metadata) -> Config:
    require(
        metadata,
        {
            "expert_weights_norm": (None,),
            "expert_weights_scale": (None, 0, 1),
            "expert_gating_func": (None, 0, 3),  # 3: softmax of the chosen ones
            "expert_shared_count": (None, 0),
            "expert_group_count": (None, 0, 1),
            "attention.sliding_window_pattern": (None, _PERIOD),
        },
    )
    heads = attention_heads(metadata)
    rotary = whole_rotary(metadata, heads["head_dim"])
    if rotary["rope_type"] == "yarn":
        rotary["truncate"] = False  # as in the model; llama.cpp rounds the range of its ramp
    layers = metadata.size("block_count")
    return {
        "model_type": "gpt_oss",
        "architectures": ["GptOssForCausalLM"],
        **heads,
        "rope_parameters": rotary,
        "intermediate_size": metadata.size("expert_feed_forward_length"),
        "num_local_experts": metadata.size("expert_count"),
        "sliding_window": metadata.size("attention.sliding_window"),
        "layer_types": [
            "full_attention" if layer % _PERIOD == _PERIOD - 1 else "sliding_attention"
            for layer in range(layers)
        ],
        "attention_bias": True,
    }


def _layer(config: Config) -> Places:
    return {
        "attn_norm.weight": "input_layernorm.weight",
        "post_attention_norm.weight": "post_attention_layernorm.weight",
        **ATTENTION,
        **ATTENTION_BIASES,
        "attn_output.bias": "self_attn.o_proj.bias",
        "attn_sinks.weight": "self_attn.sinks",
        "ffn_gate_inp.weight": "mlp.router.weight",
        "ffn_gate_inp.bias": "mlp.router.bias",
    }


ARCHITECTURES = {"gpt-oss": Architecture(_config, _layer)}
