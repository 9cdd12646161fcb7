"""gpt-oss, Qwen3-Next and Qwen3.5 as GGUF files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from gguf_family import Array, Family
from gguf_names import ATTENTION, LATE_NORMS, QK_NORMS, ROUTER, shared, swap


def _gpt_oss_change(name: str, values: Array, config: Any) -> Mapping[str, Array] | None:
    if name == "self_attn.sinks":
        return {"attn_sinks.weight": values}
    if name == "mlp.experts.gate_up_proj":
        rows = values.swapaxes(1, 2)
        return {"ffn_gate_exps.weight": rows[:, ::2], "ffn_up_exps.weight": rows[:, 1::2]}
    if name == "mlp.experts.gate_up_proj_bias":
        return {"ffn_gate_exps.bias": values[:, ::2], "ffn_up_exps.bias": values[:, 1::2]}
    if name == "mlp.experts.down_proj":
        return {"ffn_down_exps.weight": values.swapaxes(1, 2)}
    if name == "mlp.experts.down_proj_bias":
        return {"ffn_down_exps.bias": values}
    return None


GPT_OSS = Family(
    "gpt-oss",
    "gpt_oss",
    {
        "intermediate_size": 256,
        "num_local_experts": 4,
        "sliding_window": 8,
        "rope_parameters": {"rope_type": "default", "rope_theta": 150000.0},
    },
    {**LATE_NORMS, **ATTENTION, "mlp.router": "ffn_gate_inp"},
    lambda config: {
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.sliding_window": config.sliding_window,
        "expert_feed_forward_length": config.intermediate_size,
        "expert_count": config.num_local_experts,
    },
    _gpt_oss_change,
)


def _delta_net(name: str, values: Array) -> Mapping[str, Array] | None:
    if name.endswith("A_log"):
        return {"ssm_a": -np.exp(values)}
    if name.endswith("dt_bias"):
        return {"ssm_dt.bias": values}
    if name.endswith("conv1d.weight"):
        return {"ssm_conv1d.weight": values.squeeze(1)}
    return None


def _plus_one(name: str, values: Array, names: Mapping[str, str]) -> Mapping[str, Array] | None:
    if name.endswith("norm.weight") and name != "linear_attn.norm.weight":
        return {f"{names[name.removesuffix('.weight')]}.weight": values + 1}
    return None


_QWEN_NAMES = {
    **LATE_NORMS,
    **ATTENTION,
    **QK_NORMS,
    **ROUTER,
    **shared("shared_expert"),
    "model.norm": "output_norm",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
}


def _qwen3_next_change(name: str, values: Array, config: Any) -> Mapping[str, Array] | None:
    if name == "mlp.shared_expert_gate.weight":
        return {"ffn_gate_inp_shexp.weight": values[0]}
    if name == "linear_attn.in_proj_qkvz.weight":
        keys, size = config.linear_num_key_heads, config.linear_key_head_dim
        ratio = config.linear_num_value_heads // keys * config.linear_value_head_dim
        by_head = values.reshape(keys, -1, values.shape[1])
        q, k, v, z = np.split(by_head, np.cumsum([size, size, ratio]), axis=1)
        flat = [part.reshape(-1, values.shape[1]) for part in (q, k, v, z)]
        return {"attn_qkv.weight": np.concatenate(flat[:3]), "attn_gate.weight": flat[3]}
    if name == "linear_attn.in_proj_ba.weight":
        return {"ssm_ba.weight": values}
    return _delta_net(name, values) or _plus_one(name, values, _QWEN_NAMES)


def _qwen35_change(name: str, values: Array, config: Any) -> Mapping[str, Array] | None:
    if name == "mlp.shared_expert_gate.weight":
        return {"ffn_gate_inp_shexp.weight": values[0]}
    keys = config.linear_num_key_heads
    ratio = config.linear_num_value_heads // keys
    before = 2 * keys * config.linear_key_head_dim
    leaf = name.removeprefix("linear_attn.").removesuffix(".weight")
    if leaf in ("A_log", "dt_bias", "in_proj_a", "in_proj_b", "in_proj_z"):
        values = swap(values, 0, keys, ratio)
    elif leaf in ("in_proj_qkv", "conv1d"):
        values = swap(values, 0, keys, ratio, before)
    elif leaf == "out_proj":
        return {"ssm_out.weight": swap(values, 1, keys, ratio)}
    renamed = {
        "in_proj_a": "ssm_alpha",
        "in_proj_b": "ssm_beta",
        "in_proj_z": "attn_gate",
        "in_proj_qkv": "attn_qkv",
    }
    if leaf in renamed:
        return {f"{renamed[leaf]}.weight": values}
    return _delta_net(name, values) or _plus_one(name, values, _QWEN_NAMES)


def _qwen_metadata(config: Any) -> dict[str, Any]:
    return {
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "rope.dimension_count": int(config.head_dim * config.rope_parameters["partial_rotary_factor"]),
        "expert_count": config.num_experts,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_shared_feed_forward_length": config.shared_expert_intermediate_size,
        "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "ssm.state_size": config.linear_key_head_dim,
        "ssm.group_count": config.linear_num_key_heads,
        "ssm.time_step_rank": config.linear_num_value_heads,
        "ssm.inner_size": config.linear_num_value_heads * config.linear_value_head_dim,
        "full_attention_interval": config.layer_types.index("full_attention") + 1,
    }


_QWEN_VALUES = {
    "num_experts": 4,
    "shared_expert_intermediate_size": 256,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
}
QWEN3_NEXT = Family("qwen3next", "qwen3_next", _QWEN_VALUES, _QWEN_NAMES, _qwen_metadata, _qwen3_next_change)
QWEN35 = Family(
    "qwen35moe",
    "qwen3_5_moe_text",
    {**_QWEN_VALUES, "intermediate_size": None},
    _QWEN_NAMES,
    lambda config: {
        **_qwen_metadata(config),
        "feed_forward_length": None,
        "rope.dimension_sections": [3, 3, 2, 0],
    },
    _qwen35_change,
)
