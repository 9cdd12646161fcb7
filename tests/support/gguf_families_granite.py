"""Granite 3 and 4 as GGUF files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from gguf_family import Array, Family
from gguf_names import ATTENTION, NORMS, mamba_change


def _granite_change(name: str, values: Array, config: Any) -> Mapping[str, Array] | None:
    if name in ("self_attn.q_proj.weight", "self_attn.k_proj.weight"):
        heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
        halves = values.reshape(heads, 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
        return {f"attn_{name[10]}.weight": halves}
    if name == "shared_mlp.input_linear.weight":
        gate, up = np.split(values, 2)
        return {"ffn_gate_shexp.weight": gate, "ffn_up_shexp.weight": up}
    return None


_VALUES = {
    "num_local_experts": 4,
    "intermediate_size": 256,
    "shared_intermediate_size": 512,
    "head_dim": None,
    "embedding_multiplier": 3.0,
    "logits_scaling": 2.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.2,
}
_NAMES = {
    **NORMS,
    **ATTENTION,
    "block_sparse_moe.router": "ffn_gate_inp",
    "shared_mlp.output_linear": "ffn_down_shexp",
}


def _metadata(config: Any) -> dict[str, Any]:
    return {
        "expert_count": config.num_local_experts,
        "expert_shared_feed_forward_length": config.shared_intermediate_size,
        "rope.dimension_count": config.hidden_size // config.num_attention_heads,
        "embedding_scale": config.embedding_multiplier,
        "logit_scale": config.logits_scaling,
        "residual_scale": config.residual_multiplier,
        "attention.scale": config.attention_multiplier,
        "vocab_size": config.vocab_size,
    }


GRANITE = Family("granitemoe", "granitemoeshared", _VALUES, _NAMES, _metadata, _granite_change)


def _hybrid_change(name: str, values: Array, config: Any) -> Mapping[str, Array] | None:
    found = _granite_change(name, values, config)
    if found is None and name.startswith("mamba."):
        found = mamba_change(name.removeprefix("mamba."), values, config.mamba_n_groups)
    return found


GRANITE_HYBRID = Family(
    "granitehybrid",
    "granitemoehybrid",
    {
        **_VALUES,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "mamba_n_heads": 8,
        "mamba_d_state": 64,
        "mamba_n_groups": 2,
        "mamba_chunk_size": 64,
        "tie_word_embeddings": True,
    },
    {**_NAMES, "mamba.in_proj": "ssm_in", "mamba.conv1d": "ssm_conv1d", "mamba.out_proj": "ssm_out"},
    lambda config: {
        **_metadata(config),
        "attention.head_count_kv": [
            config.num_key_value_heads * (kind == "full_attention") for kind in config.layer_types
        ],
        "ssm.conv_kernel": config.mamba_d_conv,
        "ssm.state_size": config.mamba_d_state,
        "ssm.group_count": config.mamba_n_groups,
        "ssm.inner_size": config.mamba_expand * config.hidden_size,
        "ssm.time_step_rank": config.mamba_n_heads,
        "rope.scaling.finetuned": False,
    },
    _hybrid_change,
)
