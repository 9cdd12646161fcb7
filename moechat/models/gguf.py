"""Translates a GGUF file into a transformers model: configuration and tensor names.

Metadata keys, tensor names and conventions are llama.cpp's, including properties of an architecture that
files do not state (normalisation of routed weights, order of rotary halves). Metadata that would change a
result is used or rejected, never ignored.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from moechat.errors import CheckpointError, UnsupportedModelError
from moechat.models.gguf_architectures import (
    ARCHITECTURES,
    Architecture,
    Metadata,
    quoted,
    without_float32_rounding,
)
from moechat.store.gguf_file import BF16, F16, PLAIN, GgufSource
from moechat.store.gguf_header import GgufHeader

# Without leading zeros, so that every layer and expert has one name.
_NUMBER = "(0|[1-9][0-9]{0,8})"
_BLOCK = re.compile(rf"blk\.{_NUMBER}\.(.+)")
_MAX_BLOCKS = 10_000
# Limits the memory for names, three per expert, whatever a header claims. The largest models have about
# 30,000 experts in total.
_MAX_EXPERTS = 65_536
_MAX_TOTAL_EXPERTS = 1 << 18
_MODEL_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_EXPERTS = {"ffn_gate_exps.weight": "gate", "ffn_up_exps.weight": "up", "ffn_down_exps.weight": "down"}
# Files of early 2024 have one tensor per expert.
_EXPERT = re.compile(rf"ffn_(gate|up|down)\.{_NUMBER}\.weight")
# Tables in old files that llama.cpp computes from the metadata.
_IGNORED_TENSORS = re.compile(r"blk\.\d+\.attn_rot_embd(\..+)?")


@dataclass(frozen=True)
class GgufModel:
    """A GGUF file as a transformers model.

    Attributes:
        config: Content of ``config.json``.
        generation: Content of ``generation_config.json``.
        sources: Location of each checkpoint tensor.
        has_vocabulary: The file has a tokenizer.
    """

    config: dict[str, Any]
    generation: dict[str, Any]
    sources: dict[str, GgufSource]
    has_vocabulary: bool


def describe_gguf(header: GgufHeader, where: str) -> GgufModel:
    """Configuration and tensors of the model that a file holds.

    Args:
        header: Header of the file; for a split model the first part's, with all tensors.
        where: Name of the file, for messages.

    Raises:
        UnsupportedModelError: It is not a mixture of experts, moechat does not read its architecture from
            GGUF files, or it has a property that moechat does not compute.
        CheckpointError: Values or tensors are missing or contradict each other.
    """
    name = header.metadata.get("general.architecture")
    if not isinstance(name, str):
        raise CheckpointError(
            f"{where} does not say its architecture", hint="download or copy the file again"
        )
    kind = header.metadata.get("general.type", "model")
    if kind != "model":
        raise UnsupportedModelError(f"{where} holds no language model, but a GGUF file of type {kind!r}")
    metadata = Metadata(header, name, where)
    known = ", ".join(sorted(arch.model_type for arch in ARCHITECTURES.values()))
    if name not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"{where} is of the architecture {name[:80]!r}; from GGUF files moechat reads {known}",
            hint="take the model's own repository, with safetensors files",
        )
    if name == "llama" and not metadata.get("expert_count"):
        raise UnsupportedModelError(
            f"{where} has no experts: moechat is for mixture-of-experts models",
            hint=f"from GGUF files it reads {known}",
        )
    architecture = ARCHITECTURES[name]
    config = _config(architecture, metadata, header, where)
    sources = _sources(architecture, header, config, metadata.number("expert_count"), where)
    return GgufModel(config, _generation(metadata), sources, "tokenizer.ggml.tokens" in header.metadata)


def _config(architecture: Architecture, metadata: Metadata, header: GgufHeader, where: str) -> dict[str, Any]:
    blocks = metadata.number("block_count")
    if not isinstance(blocks, int) or blocks > min(_MAX_BLOCKS, len(header.tensors)):
        raise CheckpointError(f"{where} claims {blocks} layers, with {len(header.tensors)} tensors")
    experts = metadata.number("expert_count")
    if not isinstance(experts, int) or experts > min(_MAX_EXPERTS, _MAX_TOTAL_EXPERTS // blocks):
        raise CheckpointError(
            f"{where} claims {experts} experts in each of {blocks} layers; moechat reads up to "
            f"{_MAX_EXPERTS} in a layer and {_MAX_TOTAL_EXPERTS} in all"
        )
    heads, hidden = metadata.number("attention.head_count"), metadata.number("embedding_length")
    head_dim = metadata.number(
        "attention.key_length", metadata.get("rope.dimension_count") or hidden // heads
    )
    for key, value in (("attention.value_length", head_dim), ("rope.dimension_count", head_dim)):
        if metadata.number(key, value) != head_dim:
            raise UnsupportedModelError(
                f"{where}: {key} is {metadata.get(key)}, heads have {head_dim}: moechat does not read that"
            )
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError(f"{where} has no matrix token_embd.weight")
    config = {
        "architectures": [architecture.class_name],
        "model_type": architecture.model_type,
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "num_hidden_layers": blocks,
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.number("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": metadata.number("context_length"),
        "rms_norm_eps": metadata.number("attention.layer_norm_rms_epsilon"),
        "num_experts_per_tok": metadata.number("expert_used_count"),
        "rope_parameters": _rotary(metadata, where),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "dtype": "bfloat16" if embedding.kind == BF16 else "float16",
        "bos_token_id": metadata.token("bos_token_id"),
        "eos_token_id": metadata.token("eos_token_id"),
        "pad_token_id": metadata.token("padding_token_id"),
        **architecture.config(metadata),
    }
    _require_known_routing(config, metadata, where)
    return config


def _require_known_routing(config: dict[str, Any], metadata: Metadata, where: str) -> None:
    """Reject routing parameters that differ from transformers' model of the family."""
    norm = config.get("norm_topk_prob", True)
    expected = {
        "expert_weights_norm": (None, norm),
        "expert_weights_scale": (None, 0, 1),
        "expert_gating_func": (None, 0, 1),  # 1: softmax
        "expert_shared_count": (None, 0),
        "expert_group_count": (None, 0, 1),
    }
    for key, values in expected.items():
        if metadata.get(key) not in values:
            raise UnsupportedModelError(
                f"{where}: {key} is {quoted(metadata.get(key))}, which moechat does not compute"
            )


def _rotary(metadata: Metadata, where: str) -> dict[str, Any]:
    rotary: dict[str, Any] = {"rope_theta": float(metadata.number("rope.freq_base", 10000.0))}
    kind = metadata.get("rope.scaling.type")
    if kind is None:  # llama.cpp's default; has no effect without a factor
        kind = "linear"
    if kind not in ("none", "linear", "yarn"):
        raise UnsupportedModelError(
            f"{where}: its rotary scaling is {quoted(kind)}, which moechat does not read"
        )
    _require_known_scaling(metadata, kind, where)
    # Files of 2023 use the second key.
    key = "rope.scaling.factor" if metadata.get("rope.scaling.factor") is not None else "rope.scale_linear"
    if kind == "yarn":
        rotary |= {"rope_type": "yarn", "factor": float(metadata.number(key))}
        rotary["original_max_position_embeddings"] = metadata.number("rope.scaling.original_context_length")
        for own, name in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")):
            if metadata.get(f"rope.scaling.{own}") is not None:
                rotary[name] = float(metadata.number(f"rope.scaling.{own}"))
        return rotary
    unscaled = kind == "none" or metadata.get(key) in (None, 0)  # 0: not set
    factor = 1.0 if unscaled else float(metadata.number(key))
    return rotary | ({"rope_type": "default"} if factor == 1 else {"rope_type": "linear", "factor": factor})


def _require_known_scaling(metadata: Metadata, kind: str, where: str) -> None:
    """Reject rotary scaling parameters that would have an effect and that :func:`_rotary` does not use."""
    used = ("type", "factor", "original_context_length", "finetuned", "yarn_beta_fast", "yarn_beta_slow")
    neutral = {
        "alpha": (0,),
        "attn_factor": (1,),
        "yarn_attn_factor": (1,),
        "yarn_ext_factor": (-1, 1 if kind == "yarn" else 0),  # -1: default of the type
        "yarn_log_multiplier": (0,),
    }
    for key in metadata.names("rope.scaling."):
        name = key.removeprefix("rope.scaling.")
        if name not in used and metadata.get(key) not in neutral.get(name, ()):
            raise UnsupportedModelError(
                f"{where}: {key[:200]} is {quoted(metadata.get(key))}, which moechat does not compute"
            )


def _generation(metadata: Metadata) -> dict[str, Any]:
    """End tokens and, in newer files, sampling parameters."""
    ends = [metadata.token(key) for key in ("eos_token_id", "eot_token_id", "eom_token_id")]
    found: dict[str, Any] = {"eos_token_id": list(dict.fromkeys(end for end in ends if end is not None))}
    if metadata.token("bos_token_id") is not None:
        found["bos_token_id"] = metadata.token("bos_token_id")
    names = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}
    for key, name in names.items():
        value = metadata.plain(f"general.sampling.{key}")
        if isinstance(value, int | float) and not isinstance(value, bool):
            found[name] = without_float32_rounding(value)
            found["do_sample"] = True
    return found


def _sources(
    architecture: Architecture, header: GgufHeader, config: dict[str, Any], experts: int, where: str
) -> dict[str, GgufSource]:
    blocks = config["num_hidden_layers"]
    heads = {}
    if architecture.interleaved:
        heads = {
            "attn_q.weight": config["num_attention_heads"],
            "attn_k.weight": config["num_key_value_heads"],
        }
    expert_type = _expert_type(header)
    layer = {**architecture.layer, "ffn_gate_inp.weight": architecture.router}
    found: dict[str, GgufSource] = {}
    unknown = []
    for tensor, described in header.tensors.items():
        match = _BLOCK.fullmatch(tensor)
        number, part = (int(match[1]), match[2]) if match else (None, tensor)
        prefix = f"model.layers.{number}."
        single = _EXPERT.fullmatch(part)
        if number is not None and number >= blocks:
            raise CheckpointError(
                f"{where}: {tensor[:200]!r} belongs to layer {number} (from 0) of {blocks}",
                hint="download or copy the file again",
            )
        if number is None and part in _MODEL_TENSORS:
            found[_MODEL_TENSORS[part]] = GgufSource(tensor, _dense_type(described.kind))
        elif number is not None and part in layer:
            if part in heads and (len(described.shape) != 2 or described.shape[0] % (2 * heads[part])):
                raise CheckpointError(
                    f"{where}: {tensor} has shape {list(described.shape)} for {heads[part]} heads"
                )
            found[prefix + layer[part]] = GgufSource(
                tensor, _dense_type(described.kind), heads=heads.get(part, 0)
            )
        elif number is not None and part in _EXPERTS and len(described.shape) == 3:
            if described.shape[0] != experts:
                raise CheckpointError(
                    f"{where}: {tensor} holds {described.shape[0]} experts, the model has {experts} a layer",
                    hint="download or copy the file again",
                )
            name = prefix + architecture.experts[_EXPERTS[part]]
            for expert in range(experts):
                found[name.format(expert=expert)] = GgufSource(tensor, expert_type, expert)
        elif number is not None and single:
            if int(single[2]) >= experts:
                raise CheckpointError(
                    f"{where}: {tensor} belongs to expert {single[2]} (from 0) of {experts}",
                    hint="download or copy the file again",
                )
            name = prefix + architecture.experts[single[1]]
            found[name.format(expert=int(single[2]))] = GgufSource(tensor, expert_type)
        elif not _IGNORED_TENSORS.fullmatch(tensor):
            unknown.append(tensor)
    if unknown:
        raise UnsupportedModelError(
            f"{where} has {len(unknown)} tensors that a {architecture.model_type} model does not have, "
            f"first {unknown[0][:200]!r}",
            hint="take the model's own repository, with safetensors files",
        )
    return found


def _expert_type(header: GgufHeader) -> str:
    """Visible type of experts: their float type if it is the same for all, else ``F32`` (decoded)."""
    kinds = {
        tensor.kind
        for name, tensor in header.tensors.items()
        if (match := _BLOCK.fullmatch(name)) and (match[2] in _EXPERTS or _EXPERT.fullmatch(match[2]))
    }
    return {F16: "F16", BF16: "BF16"}.get(kinds.pop(), "F32") if len(kinds) == 1 else "F32"


def _dense_type(kind: int) -> str:
    return PLAIN[kind][0] if kind in PLAIN else "F16"
