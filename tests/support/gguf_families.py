"""Tiny random models of llama.cpp's architectures, as in transformers and as in GGUF files.

The tables follow llama.cpp's converter, not moechat's reader. ``scripts/bench/gguf_parity`` compares
llama.cpp's own logits of these files with both.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.constants import GGMLQuantizationType as Kind
from gguf_encoders import encode
from numpy.typing import NDArray
from transformers import AutoConfig, AutoModelForCausalLM

Array = NDArray[np.float32]
Tensors = dict[str, Array]
WORDS = 264
CONTEXT = 256
_COMMON: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 512,
    "moe_intermediate_size": 256,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-6,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
    "bos_token_id": 257,
    "eos_token_id": 258,
    "pad_token_id": None,
}
_NORMS = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
_LATE_NORMS = {"input_layernorm": "attn_norm", "post_attention_layernorm": "post_attention_norm"}
_ATTENTION = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
}
_QK_NORMS = {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}
_MLP = {f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")}
_ROUTER = {"mlp.gate": "ffn_gate_inp"}


def _shared(name: str) -> dict[str, str]:
    return {f"mlp.{name}.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")}


@dataclass(frozen=True)
class Family:
    """One architecture.

    Attributes:
        architecture: llama.cpp's name.
        model_type: transformers' name.
        values: Of the tiny configuration, besides the common ones.
        names: File's name of a module in a layer; parameters keep ``.weight`` and ``.bias``.
        metadata: Keys besides the common ones, without the architecture's name.
        change: The file's tensors of one of the model's, by the name in a layer; ``None`` where only the name
            changes.
        outer: File's names of tensors outside the layers.
        extra: Tensors that only the file has.
    """

    architecture: str
    model_type: str
    values: Mapping[str, Any]
    names: Mapping[str, str]
    metadata: Callable[[Any], Mapping[str, Any]]
    change: Callable[[str, Array, Any], Mapping[str, Array] | None] = lambda name, values, config: None
    outer: Mapping[str, str] = field(
        default_factory=lambda: {
            "model.embed_tokens.weight": "token_embd.weight",
            "model.norm.weight": "output_norm.weight",
            "lm_head.weight": "output.weight",
        }
    )
    extra: Callable[[Any], Tensors] = lambda config: {}

    def config(self, **changes: Any) -> Any:
        """The tiny configuration."""
        values = {**_COMMON, **self.values, **changes}
        left_out = {key for key, value in self.values.items() if value is None}
        return AutoConfig.for_model(
            self.model_type, **{key: value for key, value in values.items() if key not in left_out}
        )


def random_model(config: Any, seed: int = 7) -> Any:
    """A model in float32 whose values bfloat16 can represent, and large enough that a wrong one shows."""
    generator = torch.Generator().manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            noise = torch.randn(tensor.shape, generator=generator)
            if name.endswith("A_log"):
                values = noise.abs().add(0.1).log()
            elif tensor.dim() < 2:
                values = tensor.nan_to_num(0.0).clamp(-2, 2) + noise * 0.1 if "norm" in name else noise * 0.2
            else:
                inputs = (
                    tensor.shape[-2]
                    if "experts.down" in name and config.model_type == "gpt_oss"
                    else tensor.shape[-1]
                )
                values = noise * (1.5 / inputs**0.5)
            tensor.copy_(values.bfloat16().float())
    return model


def gguf_tensors(family: Family, model: Any) -> Tensors:
    """The model's weights under the file's names and in the file's layout."""
    found: Tensors = {}
    for name, tensor in model.state_dict().items():
        values = tensor.float().numpy()
        match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)
        if not match:
            if name == "lm_head.weight" and model.config.tie_word_embeddings:
                continue
            (part, values), *_ = _changed(family, name, values, model.config, family.outer)
            found[part] = values
            continue
        for part, changed in _changed(family, match[2], values, model.config, family.names):
            found[f"blk.{match[1]}.{part}"] = np.ascontiguousarray(changed)
    return found | family.extra(model.config)


def _changed(
    family: Family, name: str, values: Array, config: Any, names: Mapping[str, str]
) -> Iterator[tuple[str, Array]]:
    special = family.change(name, values, config)
    if special is not None:
        yield from special.items()
    elif name.endswith("experts.gate_up_proj"):
        gate, up = np.split(values, 2, axis=1)
        yield from (("ffn_gate_exps.weight", gate), ("ffn_up_exps.weight", up))
    elif name.endswith("experts.down_proj"):
        yield "ffn_down_exps.weight", values
    elif name in names:
        yield names[name], values
    else:
        module, _, kind = name.rpartition(".")
        yield f"{names[module]}.{kind}", values


def metadata_of(family: Family, config: Any) -> dict[str, Any]:
    """All keys of the architecture, without its name."""
    rope = getattr(config, "rope_parameters", None) or {}
    common = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": getattr(config, "intermediate_size", None),
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": (
            None if family is _GEMMA4 else config.num_key_value_heads  # differs by layer
        ),
        "attention.layer_norm_rms_epsilon": getattr(config, "rms_norm_eps", None),
        "expert_used_count": getattr(config, "num_experts_per_tok", None),
    }
    if "rope_theta" in rope:
        common["rope.freq_base"] = float(rope["rope_theta"])
    return {**common, **family.metadata(config)}


Choose = Callable[[str, tuple[int, ...]], Kind]


def all_as(kind: Kind) -> Choose:
    """Matrices in one type; vectors and routers in float32, and so what has no whole blocks even of Q8_0."""

    def chosen(name: str, shape: tuple[int, ...]) -> Kind:
        if len(shape) == 1 or re.search(
            r"ffn_gate_inp|conv1d|shortconv\.conv|_exps\.bias|ssm_a|ssm_norm|\.scale$", name
        ):
            return Kind.F32
        columns = shape[-1]
        block = gguf.GGML_QUANT_SIZES[kind][0]
        if columns % block == 0:
            return kind
        return Kind.Q8_0 if columns % 32 == 0 else Kind.F32

    return chosen


def write_family(
    family: Family,
    config: Any,
    tensors: Tensors,
    path: Path,
    choose: Choose,
    *,
    changes: Mapping[str, Any] | None = None,
    dequantised: bool = False,
    parts: int = 1,
) -> None:
    """Write a GGUF file.

    Args:
        family: The architecture.
        config: The model's.
        tensors: From :func:`gguf_tensors`.
        path: The file.
        choose: Type of a tensor.
        changes: Metadata to set instead; ``None`` removes a key. Keys with ``general.`` are whole.
        dequantised: Store the values that ``choose`` leaves, as float32.
        parts: Number of files.
    """
    most = -(-len(tensors) // parts) if parts > 1 else 0
    writer = gguf.GGUFWriter(path, family.architecture, split_max_tensors=most)
    values = {f"{family.architecture}.{key}": value for key, value in metadata_of(family, config).items()}
    for key, value in (changes or {}).items():
        values[key if key.startswith("general.") else f"{family.architecture}.{key}"] = value
    for key, value in values.items():
        _add(writer, key, value)
    _add_words(writer, config.vocab_size)
    for name, array in tensors.items():
        kind = choose(name, array.shape)
        packed = encode(array, kind)
        if dequantised:
            packed, kind = np.array(gguf.dequantize(packed, kind), np.float32), Kind.F32
        writer.add_tensor(name, packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if value is None:
        return
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, list(value))


def _add_words(writer: gguf.GGUFWriter, words: int) -> None:
    """Byte tokens and a few special ones."""
    bytes_ = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = [chr(byte) for byte in bytes_] + [chr(256 + n) for n in range(256 - len(bytes_))]
    special = [f"<|{number}|>" for number in range(words - 257)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*letters, letters[0] + letters[1], *special])
    writer.add_token_types([1] * 257 + [3] * len(special))
    writer.add_token_merges([f"{letters[0]} {letters[1]}"])
    writer.add_bos_token_id(257)
    writer.add_eos_token_id(258)


def _swap(values: Array, axis: int, outer: int, inner: int, start: int = 0) -> Array:
    """Exchange the slow and the fast index of positions of an axis, from ``start`` on."""
    values = np.moveaxis(values, axis, 0)
    rest = values[start:].reshape(outer, inner, -1, *values.shape[1:])
    moved = np.concatenate([values[:start], rest.swapaxes(0, 1).reshape(values[start:].shape)])
    return np.moveaxis(moved, 0, axis)


# --- gpt-oss


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


_GPT_OSS = Family(
    "gpt-oss",
    "gpt_oss",
    {
        "intermediate_size": 256,
        "num_local_experts": 4,
        "sliding_window": 8,
        "rope_parameters": {"rope_type": "default", "rope_theta": 150000.0},
    },
    {**_LATE_NORMS, **_ATTENTION, "mlp.router": "ffn_gate_inp"},
    lambda config: {
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.sliding_window": config.sliding_window,
        "expert_feed_forward_length": config.intermediate_size,
        "expert_count": config.num_local_experts,
    },
    _gpt_oss_change,
)

# --- Qwen3-Next and Qwen3.5


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
    **_LATE_NORMS,
    **_ATTENTION,
    **_QK_NORMS,
    **_ROUTER,
    **_shared("shared_expert"),
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
        values = _swap(values, 0, keys, ratio)
    elif leaf in ("in_proj_qkv", "conv1d"):
        values = _swap(values, 0, keys, ratio, before)
    elif leaf == "out_proj":
        return {"ssm_out.weight": _swap(values, 1, keys, ratio)}
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
_QWEN3_NEXT = Family("qwen3next", "qwen3_next", _QWEN_VALUES, _QWEN_NAMES, _qwen_metadata, _qwen3_next_change)
_QWEN35 = Family(
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

# --- GLM-4.5 and DeepSeek


def _sigmoid(config: Any) -> dict[str, Any]:
    return {
        "expert_count": config.n_routed_experts,
        "expert_shared_count": config.n_shared_experts,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "leading_dense_block_count": config.first_k_dense_replace,
        "expert_gating_func": 2,
        "expert_weights_scale": float(config.routed_scaling_factor),
        "expert_weights_norm": config.norm_topk_prob,
        "expert_group_count": config.n_group,
        "expert_group_used_count": config.topk_group,
    }


def _correction(name: str, values: Array, config: Any) -> Mapping[str, Array] | None:
    return {"exp_probs_b.bias": values} if name.endswith("e_score_correction_bias") else None


_SIGMOID_VALUES = {
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "routed_scaling_factor": 1.5,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
}
_GLM4_MOE = Family(
    "glm4moe",
    "glm4_moe",
    {
        **_SIGMOID_VALUES,
        "use_qk_norm": True,
        "attention_bias": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
    },
    {**_LATE_NORMS, **_ATTENTION, **_QK_NORMS, **_MLP, **_ROUTER, **_shared("shared_experts")},
    lambda config: {
        **_sigmoid(config),
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "rope.dimension_count": config.head_dim // 2,
    },
    _correction,
)


def _latent_change(name: str, values: Array, config: Any) -> Mapping[str, Array] | None:
    if name == "self_attn.kv_b_proj.weight":
        heads = values.reshape(config.num_attention_heads, -1, values.shape[1])
        keys, values = np.split(heads, [config.qk_nope_head_dim], axis=1)
        return {"attn_k_b.weight": keys.swapaxes(1, 2), "attn_v_b.weight": values}
    return _correction(name, values, config)


_LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 64,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "head_dim": 32,
}
_LATENT_NAMES = {
    **_NORMS,
    "self_attn.q_proj": "attn_q",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.o_proj": "attn_output",
    **_MLP,
    **_ROUTER,
    **_shared("shared_experts"),
}


def _latent_metadata(config: Any) -> dict[str, Any]:
    found = {
        "attention.head_count_kv": 1,
        "attention.q_lora_rank": config.q_lora_rank,
        "attention.kv_lora_rank": config.kv_lora_rank,
        "attention.key_length": config.kv_lora_rank + config.qk_rope_head_dim,
        "attention.value_length": config.kv_lora_rank,
        "attention.key_length_mla": config.qk_nope_head_dim + config.qk_rope_head_dim,
        "attention.value_length_mla": config.v_head_dim,
        "rope.dimension_count": config.qk_rope_head_dim,
        "vocab_size": config.vocab_size,
    }
    rope = config.rope_parameters
    if rope["rope_type"] == "yarn":
        found |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": float(rope["factor"]),
            "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
            "rope.scaling.yarn_log_multiplier": 0.1 * rope["mscale_all_dim"],
        }
    return found


_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
}


def _deepseek_v2_metadata(config: Any) -> dict[str, Any]:
    return {
        **_latent_metadata(config),
        **_sigmoid(config),
        "expert_gating_func": None,
        "expert_weights_norm": None,
        "expert_group_count": None,
        "expert_group_used_count": None,
    }


_DEEPSEEK_V2 = Family(
    "deepseek2",
    "deepseek_v2",
    {
        **_LATENT,
        **_SIGMOID_VALUES,
        "norm_topk_prob": False,
        "topk_method": "greedy",
        "n_group": None,
        "topk_group": None,
        "rope_parameters": _YARN,
    },
    _LATENT_NAMES,
    _deepseek_v2_metadata,
    _latent_change,
)
_DEEPSEEK_V3 = Family(
    "deepseek2",
    "deepseek_v3",
    {
        **_LATENT,
        **_SIGMOID_VALUES,
        "n_group": 4,
        "topk_group": 2,
        "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    },
    _LATENT_NAMES,
    lambda config: {**_latent_metadata(config), **_sigmoid(config)},
    _latent_change,
)
_GLM_FLASH = Family(
    "deepseek2",
    "glm4_moe_lite",
    {
        **_LATENT,
        **_SIGMOID_VALUES,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "n_group": 1,
        "topk_group": 1,
    },
    _LATENT_NAMES,
    lambda config: {**_latent_metadata(config), **_sigmoid(config)},
    _latent_change,
)

# --- Qwen2-MoE, MiniMax-M2, dots.llm1, Hunyuan, ERNIE 4.5, LFM2, Granite, Trinity


def _heads_metadata(config: Any) -> dict[str, Any]:
    return {"attention.key_length": config.head_dim, "attention.value_length": config.head_dim}


def _shared_gate(name: str, values: Array, config: Any) -> Mapping[str, Array] | None:
    return {"ffn_gate_inp_shexp.weight": values[0]} if name == "mlp.shared_expert_gate.weight" else None


_QWEN2_MOE = Family(
    "qwen2moe",
    "qwen2_moe",
    {"num_experts": 4, "shared_expert_intermediate_size": 256},
    {**_NORMS, **_ATTENTION, **_ROUTER, **_shared("shared_expert")},
    lambda config: {
        "expert_count": config.num_experts,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_shared_feed_forward_length": config.shared_expert_intermediate_size,
    },
    _shared_gate,
)
_MINIMAX_M2 = Family(
    "minimax-m2",
    "minimax_m2",
    {
        "num_local_experts": 4,
        "intermediate_size": 256,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5},
    },
    {**_NORMS, **_ATTENTION, **_QK_NORMS, **_ROUTER},
    lambda config: {
        **_heads_metadata(config),
        "rope.dimension_count": config.head_dim // 2,
        "expert_count": config.num_local_experts,
        "expert_feed_forward_length": config.intermediate_size,
        "expert_gating_func": 2,
    },
    _correction,
)
_DOTS1 = Family(
    "dots1",
    "dots1",
    {
        **_SIGMOID_VALUES,
        "n_group": 1,
        "topk_group": 1,
        "num_key_value_heads": 4,  # llama.cpp supports no others
        "layer_types": ["full_attention"] * 4,
    },
    {**_NORMS, **_ATTENTION, **_QK_NORMS, **_MLP, **_ROUTER, **_shared("shared_experts")},
    lambda config: {**_sigmoid(config), **_heads_metadata(config)},
    _correction,
)
_HUNYUAN = Family(
    "hunyuan-moe",
    "hunyuan_v1_moe",
    {"num_experts": 4, "moe_topk": 2, "intermediate_size": 256},
    {
        **_NORMS,
        **_ATTENTION,
        "self_attn.query_layernorm": "attn_q_norm",
        "self_attn.key_layernorm": "attn_k_norm",
        "mlp.gate.wg": "ffn_gate_inp",
        **_shared("shared_mlp"),
    },
    lambda config: {
        **_heads_metadata(config),
        "expert_count": config.num_experts,
        "expert_feed_forward_length": config.intermediate_size,
        "expert_shared_feed_forward_length": config.intermediate_size,
        "expert_shared_count": 1,
    },
)
_ERNIE = Family(
    "ernie4_5-moe",
    "ernie4_5_moe",
    {"moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 2, "moe_layer_start_index": 1},
    {**_NORMS, **_ATTENTION, **_MLP, **_ROUTER, **_shared("shared_experts")},
    lambda config: {
        "expert_count": config.moe_num_experts,
        "expert_used_count": config.moe_k,
        "expert_shared_count": config.moe_num_shared_experts,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_shared_feed_forward_length": config.moe_num_shared_experts * config.moe_intermediate_size,
        "leading_dense_block_count": config.moe_layer_start_index,
        "interleave_moe_layer_step": 1,
    },
    _correction,
)


def _lfm2_change(name: str, values: Array, config: Any) -> Mapping[str, Array] | None:
    if name == "conv.conv.weight":
        return {"shortconv.conv.weight": values.squeeze(1)}
    return {"exp_probs_b.bias": values} if name.endswith("expert_bias") else None


_LFM2 = Family(
    "lfm2moe",
    "lfm2_moe",
    {
        "num_experts": 4,
        "num_dense_layers": 1,
        "norm_eps": 1e-6,
        "head_dim": None,
        "tie_word_embeddings": True,
        "layer_types": ["conv", "conv", "full_attention", "conv"],
    },
    {
        "operator_norm": "attn_norm",
        "ffn_norm": "ffn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.out_proj": "attn_output",
        "self_attn.q_layernorm": "attn_q_norm",
        "self_attn.k_layernorm": "attn_k_norm",
        "conv.in_proj": "shortconv.in_proj",
        "conv.out_proj": "shortconv.out_proj",
        "feed_forward.w1": "ffn_gate",
        "feed_forward.w2": "ffn_down",
        "feed_forward.w3": "ffn_up",
        "feed_forward.gate": "ffn_gate_inp",
    },
    lambda config: {
        "attention.head_count_kv": [
            config.num_key_value_heads if kind == "full_attention" else 0 for kind in config.layer_types
        ],
        "attention.layer_norm_rms_epsilon": config.norm_eps,
        "shortconv.l_cache": config.conv_L_cache,
        "vocab_size": config.vocab_size,
        "expert_count": config.num_experts,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "leading_dense_block_count": config.num_dense_layers,
        "expert_gating_func": 2,
    },
    _lfm2_change,
    {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.embedding_norm.weight": "token_embd_norm.weight",
    },
)


def _granite_change(name: str, values: Array, config: Any) -> Mapping[str, Array] | None:
    if name in ("self_attn.q_proj.weight", "self_attn.k_proj.weight"):
        heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
        halves = values.reshape(heads, 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
        return {f"attn_{name[10]}.weight": halves}
    if name == "shared_mlp.input_linear.weight":
        gate, up = np.split(values, 2)
        return {"ffn_gate_shexp.weight": gate, "ffn_up_shexp.weight": up}
    return None


_GRANITE = Family(
    "granitemoe",
    "granitemoeshared",
    {
        "num_local_experts": 4,
        "intermediate_size": 256,
        "shared_intermediate_size": 512,
        "head_dim": None,
        "embedding_multiplier": 3.0,
        "logits_scaling": 2.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.2,
    },
    {
        **_NORMS,
        **_ATTENTION,
        "block_sparse_moe.router": "ffn_gate_inp",
        "shared_mlp.output_linear": "ffn_down_shexp",
    },
    lambda config: {
        "expert_count": config.num_local_experts,
        "expert_shared_feed_forward_length": config.shared_intermediate_size,
        "rope.dimension_count": config.hidden_size // config.num_attention_heads,
        "embedding_scale": config.embedding_multiplier,
        "logit_scale": config.logits_scaling,
        "residual_scale": config.residual_multiplier,
        "attention.scale": config.attention_multiplier,
        "vocab_size": config.vocab_size,
    },
    _granite_change,
)


def _expert_bias(name: str, values: Array, config: Any) -> Mapping[str, Array] | None:
    return {"exp_probs_b.bias": values} if name == "mlp.expert_bias" else None


_AFMOE = Family(
    "afmoe",
    "afmoe",
    {
        "num_experts": 4,
        "num_shared_experts": 1,
        "num_dense_layers": 1,
        "route_scale": 1.5,
        "sliding_window": 8,
        "mup_enabled": True,
        "layer_types": None,
    },
    {
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "post_attention_norm",
        "pre_mlp_layernorm": "ffn_norm",
        "post_mlp_layernorm": "post_ffw_norm",
        **_ATTENTION,
        **_QK_NORMS,
        **_MLP,
        "self_attn.gate_proj": "attn_gate",
        "mlp.router.gate": "ffn_gate_inp",
        **_shared("shared_experts"),
    },
    lambda config: {
        **_heads_metadata(config),
        "expert_count": config.num_experts,
        "expert_shared_count": config.num_shared_experts,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "leading_dense_block_count": config.num_dense_layers,
        "expert_weights_scale": config.route_scale,
        "expert_weights_norm": True,
        "expert_gating_func": 2,
        "attention.sliding_window": config.sliding_window,
        "rope.dimension_count": config.head_dim,
        "vocab_size": config.vocab_size,
    },
    _expert_bias,
)

# --- Laguna and Gemma 4


def _laguna_metadata(config: Any) -> dict[str, Any]:
    full, sliding = (config.rope_parameters[kind] for kind in ("full_attention", "sliding_attention"))
    return {
        **_heads_metadata(config),
        "attention.head_count": config.num_attention_heads_per_layer,
        "attention.sliding_window": config.sliding_window,
        "rope.freq_base": float(full["rope_theta"]),
        "rope.freq_base_swa": float(sliding["rope_theta"]),
        "rope.dimension_count": int(config.head_dim * full["partial_rotary_factor"]),
        "rope.dimension_count_swa": int(config.head_dim * sliding["partial_rotary_factor"]),
        "leading_dense_block_count": config.mlp_layer_types.count("dense"),
        "expert_count": config.num_experts,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_shared_feed_forward_length": config.shared_expert_intermediate_size,
        "expert_weights_norm": True,
        "expert_weights_scale": float(config.moe_routed_scaling_factor),
        "expert_gating_func": 2,
        "vocab_size": config.vocab_size,
    }


_LAGUNA = Family(
    "laguna",
    "laguna",
    {
        "num_experts": 4,
        "shared_expert_intermediate_size": 256,
        "num_attention_heads_per_layer": [4, 6, 6, 6],
        "layer_types": ["full_attention"] + ["sliding_attention"] * 3,
        "mlp_layer_types": ["dense"] + ["sparse"] * 3,
        "sliding_window": 8,
        "moe_routed_scaling_factor": 1.5,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "default",
                "rope_theta": 500000.0,
                "partial_rotary_factor": 0.5,
            },
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 1.0,
            },
        },
    },
    {
        **_NORMS,
        **_ATTENTION,
        **_QK_NORMS,
        **_MLP,
        **_ROUTER,
        "self_attn.g_proj": "attn_gate",
        **_shared("shared_experts"),
    },
    _laguna_metadata,
    _correction,
)


def _gemma4_change(name: str, values: Array, config: Any) -> Mapping[str, Array] | None:
    single = {
        "layer_scalar": "layer_output_scale.weight",
        "router.scale": "ffn_gate_inp.scale",
        "router.per_expert_scale": "ffn_down_exps.scale",
        "experts.gate_up_proj": "ffn_gate_up_exps.weight",
    }
    return {single[name]: values} if name in single else None


def _gemma4_extra(config: Any) -> Tensors:
    """Factors of the frequencies of full layers: those that do not rotate are divided by infinity."""
    half = config.per_layer_config[3].head_dim // 2
    factors = np.full(half, 1e30, np.float32)
    factors[: half // 4] = 1
    return {"rope_freqs.weight": factors}


def _gemma4_metadata(config: Any) -> dict[str, Any]:
    sliding = [kind == "sliding_attention" for kind in config.layer_types]
    own, full = config.per_layer_config[0], config.per_layer_config[3]
    return {
        "attention.head_count_kv": [
            own.num_key_value_heads if each else full.num_key_value_heads for each in sliding
        ],
        "attention.key_length": full.head_dim,
        "attention.value_length": full.head_dim,
        "attention.key_length_swa": own.head_dim,
        "attention.value_length_swa": own.head_dim,
        "attention.sliding_window": config.sliding_window,
        "attention.sliding_window_pattern": sliding,
        "attention.shared_kv_layers": 0,
        "embedding_length_per_layer_input": 0,
        "rope.freq_base": float(config.rope_parameters["full_attention"]["rope_theta"]),
        "rope.freq_base_swa": float(config.rope_parameters["sliding_attention"]["rope_theta"]),
        "rope.dimension_count": full.head_dim,
        "rope.dimension_count_swa": own.head_dim,
        "expert_count": config.num_experts,
        "expert_used_count": config.top_k_experts,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "final_logit_softcapping": config.final_logit_softcapping,
    }


_GEMMA4 = Family(
    "gemma4",
    "gemma4_text",
    {
        "num_experts_per_tok": None,
        "top_k_experts": 2,
        "num_experts": 4,
        "enable_moe_block": True,
        "hidden_size_per_layer_input": 0,
        "global_head_dim": 128,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "sliding_window": 8,
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        "final_logit_softcapping": 30.0,
        "tie_word_embeddings": True,
    },
    {
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "post_attention_norm",
        "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
        "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
        "post_feedforward_layernorm_1": "post_ffw_norm_1",
        "post_feedforward_layernorm_2": "post_ffw_norm_2",
        **_ATTENTION,
        **_QK_NORMS,
        **_MLP,
        "router.proj": "ffn_gate_inp",
    },
    _gemma4_metadata,
    _gemma4_change,
    extra=_gemma4_extra,
)

# --- Kimi-Linear and Llama 4


def _kimi_change(name: str, values: Array, config: Any) -> Mapping[str, Array] | None:
    if name == "self_attn.forget_gate.A_log":
        return {"ssm_a": -np.exp(values).reshape(1, 1, -1, 1)}
    if name == "self_attn.forget_gate.dt_bias":
        return {"ssm_dt.bias": values}
    if name == "self_attn.conv1d.weight":
        parts = np.split(values.reshape(1, -1, 1, values.shape[-1]), 3, axis=1)
        return {f"ssm_conv1d_{part}.weight": each for part, each in zip("qkv", parts, strict=True)}
    return _latent_change(name, values, config)


_KIMI = Family(
    "kimi-linear",
    "kimi_linear",
    {
        **_LATENT,
        "q_lora_rank": None,
        "num_experts_per_tok": 2,
        "num_local_experts": 8,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "linear_head_dim": 64,
        "linear_num_heads": 4,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "mlp_layer_types": ["dense"] + ["sparse"] * 3,
    },
    {
        **_LATENT_NAMES,
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.forget_gate.f_a_proj": "ssm_f_a",
        "self_attn.forget_gate.f_b_proj": "ssm_f_b",
        "self_attn.b_proj": "ssm_beta",
        "self_attn.g_a_proj": "ssm_g_a",
        "self_attn.g_b_proj": "ssm_g_b",
        "self_attn.o_norm": "ssm_norm",
    },
    lambda config: {
        "attention.head_count_kv": [int(kind == "full_attention") for kind in config.layer_types],
        "attention.kv_lora_rank": config.kv_lora_rank,
        "attention.key_length": config.kv_lora_rank + config.qk_rope_head_dim,
        "attention.key_length_mla": config.qk_nope_head_dim + config.qk_rope_head_dim,
        "attention.value_length_mla": config.v_head_dim,
        "rope.dimension_count": config.qk_rope_head_dim,
        "kda.head_dim": config.linear_head_dim,
        "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "expert_count": config.num_local_experts,
        "expert_shared_count": config.n_shared_experts,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "leading_dense_block_count": config.mlp_layer_types.count("dense"),
        "expert_weights_scale": float(config.routed_scaling_factor),
        "expert_gating_func": 2,
        "vocab_size": config.vocab_size,
    },
    _kimi_change,
)


def _llama4_change(name: str, values: Array, config: Any) -> Mapping[str, Array] | None:
    if name == "feed_forward.experts.gate_up_proj":
        gate, up = np.split(values.swapaxes(1, 2), 2, axis=1)
        return {"ffn_gate_exps.weight": gate, "ffn_up_exps.weight": up}
    if name == "feed_forward.experts.down_proj":
        return {"ffn_down_exps.weight": values.swapaxes(1, 2)}
    return None


_LLAMA4 = Family(
    "llama4",
    "llama4_text",
    {
        "num_experts_per_tok": 1,
        "num_local_experts": 4,
        "intermediate_size": 256,
        "intermediate_size_mlp": 512,
        "interleave_moe_layer_step": 2,
    },
    {
        **_NORMS,
        **_ATTENTION,
        **{f"feed_forward.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
        **{f"feed_forward.shared_expert.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")},
        "feed_forward.router": "ffn_gate_inp",
    },
    lambda config: {
        **_heads_metadata(config),
        "feed_forward_length": config.intermediate_size_mlp,
        "rope.dimension_count": config.head_dim,
        "expert_count": config.num_local_experts,
        "expert_feed_forward_length": config.intermediate_size,
        "interleave_moe_layer_step": config.interleave_moe_layer_step,
        "vocab_size": config.vocab_size,
    },
    _llama4_change,
)


def _nemotron_change(name: str, values: Array, config: Any) -> Mapping[str, Array] | None:
    inner = config.mamba_num_heads * config.mamba_head_dim
    if name == "mixer.experts.up_proj":
        return {"ffn_up_exps.weight": values}
    if name == "mixer.A_log":
        return {"ssm_a": -np.exp(values).reshape(-1, 1)}
    if name == "mixer.D":
        return {"ssm_d": values.reshape(-1, 1)}
    if name == "mixer.norm.weight":
        return {"ssm_norm.weight": values.reshape(config.n_groups, inner // config.n_groups)}
    if name == "mixer.conv1d.weight":
        return {"ssm_conv1d.weight": values[:, 0]}
    if name == "mixer.dt_bias":
        return {"ssm_dt.bias": values}
    if name == "mixer.gate.e_score_correction_bias":
        return {"exp_probs_b.bias": values}
    return None


_NEMOTRON = Family(
    "nemotron_h_moe",
    "nemotron_h",
    {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
        "num_experts_per_tok": 2,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "moe_intermediate_size": 256,
        "moe_shared_expert_intermediate_size": 256,
        "routed_scaling_factor": 2.5,
        "head_dim": 64,
        "mamba_num_heads": 8,
        "mamba_head_dim": 64,
        "ssm_state_size": 64,
        "n_groups": 2,
        "chunk_size": 64,
    },
    {
        "norm": "attn_norm",
        "mixer.in_proj": "ssm_in",
        "mixer.conv1d": "ssm_conv1d",
        "mixer.out_proj": "ssm_out",
        "mixer.q_proj": "attn_q",
        "mixer.k_proj": "attn_k",
        "mixer.v_proj": "attn_v",
        "mixer.o_proj": "attn_output",
        "mixer.gate": "ffn_gate_inp",
        "mixer.shared_experts.up_proj": "ffn_up_shexp",
        "mixer.shared_experts.down_proj": "ffn_down_shexp",
    },
    lambda config: {
        "attention.head_count_kv": [
            config.num_key_value_heads * (kind == "full_attention") for kind in config.layers_block_type
        ],
        "feed_forward_length": [
            config.moe_intermediate_size * (kind == "moe") for kind in config.layers_block_type
        ],
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_epsilon": config.layer_norm_epsilon,
        "ssm.conv_kernel": config.conv_kernel,
        "ssm.state_size": config.ssm_state_size,
        "ssm.group_count": config.n_groups,
        "ssm.inner_size": config.mamba_num_heads * config.mamba_head_dim,
        "ssm.time_step_rank": config.mamba_num_heads,
        "rope.scaling.finetuned": False,
        "expert_count": config.n_routed_experts,
        "expert_shared_count": config.n_shared_experts,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_shared_feed_forward_length": config.moe_shared_expert_intermediate_size,
        "expert_weights_norm": config.norm_topk_prob,
        "expert_weights_scale": float(config.routed_scaling_factor),
        "expert_group_count": config.n_group,
        "vocab_size": config.vocab_size,
    },
    _nemotron_change,
    {
        "model.embeddings.weight": "token_embd.weight",
        "model.norm_f.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    },
)

FAMILIES = {
    "gpt-oss": _GPT_OSS,
    "qwen3next": _QWEN3_NEXT,
    "qwen35moe": _QWEN35,
    "glm4moe": _GLM4_MOE,
    "deepseek2 (V2)": _DEEPSEEK_V2,
    "deepseek2 (V3)": _DEEPSEEK_V3,
    "deepseek2 (GLM Flash)": _GLM_FLASH,
    "qwen2moe": _QWEN2_MOE,
    "minimax-m2": _MINIMAX_M2,
    "dots1": _DOTS1,
    "hunyuan-moe": _HUNYUAN,
    "ernie4_5-moe": _ERNIE,
    "lfm2moe": _LFM2,
    "granitemoe": _GRANITE,
    "afmoe": _AFMOE,
    "laguna": _LAGUNA,
    "gemma4": _GEMMA4,
    "kimi-linear": _KIMI,
    "llama4": _LLAMA4,
    "nemotron_h_moe": _NEMOTRON,
}
