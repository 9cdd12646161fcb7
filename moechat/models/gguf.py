"""Translates a GGUF file into a transformers model: configuration and tensor names.

Metadata keys, tensor names and conventions are llama.cpp's, including properties of an architecture that
files do not state (normalisation of routed weights, order of rotary halves). Metadata that would change a
result is used or rejected, never ignored.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moechat.errors import CheckpointError, UnsupportedModelError
from moechat.models.expert_tensors import expert_name
from moechat.models.gguf_architectures import ARCHITECTURES
from moechat.models.gguf_families.architecture import Architecture, Place, common_config, head_place
from moechat.models.gguf_metadata import EMBEDDING, VOCABULARY, Metadata, without_float32_rounding
from moechat.models.mtp_types import MTP_TYPES
from moechat.store.gguf_file import BF16, F16, I32, PLAIN, GgufSource
from moechat.store.gguf_header import GgufArray, GgufHeader, GgufTensor
from moechat.store.gguf_tables import Tables

# Without leading zeros, so that every layer and expert has one name.
_NUMBER = "(0|[1-9][0-9]{0,8})"
_BLOCK = re.compile(rf"blk\.{_NUMBER}\.(.+)")
_MAX_BLOCKS = 10_000
# Limits the memory for names, three per expert, whatever a header claims. The largest models have about
# 30,000 experts in total.
_MAX_EXPERTS = 65_536
_MAX_TOTAL_EXPERTS = 1 << 18
_EXPERTS = {
    f"ffn_{part}_exps.{kind}": (part, kind)
    for part in ("gate", "up", "down", "gate_up")
    for kind in ("weight", "bias")
}
# Files of early 2024 have one tensor per expert.
_EXPERT = re.compile(rf"ffn_(gate|up|down)\.{_NUMBER}\.weight")
# Tables in old files that llama.cpp computes from the metadata.
_IGNORED_TENSORS = re.compile(r"blk\.\d+\.attn_rot_embd(\..+)?")
# Values that change results where an architecture has them, and the values that change nothing. Architectures
# that compute with one read it.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.scale": (0,),
    "attention.temperature_length": (0,),
    "attention.temperature_scale": (0,),
    "attention.value_scale": (0, 1),
    "attn_logit_softcapping": (0,),
    "embedding_scale": (0, 1),
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
    "expert_shared_count": (0,),
    "expert_weights_scale": (0, 1),
    "final_logit_softcapping": (0,),
    "interleave_moe_layer_step": (0, 1),
    "leading_dense_block_count": (0,),
    "logit_scale": (0, 1),
    "moe_every_n_layers": (0, 1),
    "residual_scale": (0, 1),
    "router_logit_softcapping": (0,),
    "swiglu_clamp_exp": (),
    "swiglu_clamp_shexp": (),
}


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


def describe_gguf(header: GgufHeader, where: str, tables: Tables | None = None) -> GgufModel:
    """Configuration and tensors of the model that a file holds.

    Args:
        header: Header of the file; for a split model the first part's, with all tensors.
        where: Name of the file, for messages.
        tables: Small tensors that belong to the configuration.

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
    metadata = Metadata(header, name, where, tables)
    known = ", ".join(sorted(ARCHITECTURES))
    if name not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"{where} is of the architecture {name[:80]!r}; from GGUF files moechat reads {known}",
            hint="take the model's own repository, with safetensors files",
        )
    if not metadata.get("expert_count"):
        raise UnsupportedModelError(
            f"{where} has no experts: moechat is for mixture-of-experts models",
            hint=f"from GGUF files it reads {known}",
        )
    architecture = ARCHITECTURES[name]
    config = _config(architecture, metadata)
    sources = _sources(architecture, metadata, config)
    return GgufModel(config, _generation(metadata), sources, VOCABULARY in header.metadata)


def _config(architecture: Architecture, metadata: Metadata) -> dict[str, Any]:
    where, tensors = metadata.where, metadata.header.tensors
    blocks = metadata.size("block_count")
    if blocks > min(_MAX_BLOCKS, len(tensors)):
        raise CheckpointError(f"{where} claims {blocks} layers, with {len(tensors)} tensors")
    if metadata.count("nextn_predict_layers", 0) >= blocks:
        raise CheckpointError(
            f"{where} claims {metadata.get('nextn_predict_layers')} layers for prediction of {blocks}"
        )
    experts = metadata.size("expert_count")
    if experts > min(_MAX_EXPERTS, _MAX_TOTAL_EXPERTS // blocks):
        raise CheckpointError(
            f"{where} claims {experts} experts in each of {blocks} layers; moechat reads up to "
            f"{_MAX_EXPERTS} in a layer and {_MAX_TOTAL_EXPERTS} in all"
        )
    embedding = tensors.get(EMBEDDING)
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError(f"{where} has no matrix {EMBEDDING}")
    words = metadata.plain(VOCABULARY)
    if isinstance(words, GgufArray) and words.length > embedding.shape[0]:
        raise CheckpointError(
            f"{where}: {EMBEDDING} has {embedding.shape[0]} rows for {words.length} words in the vocabulary"
        )
    config = {
        **common_config(metadata, architecture.epsilon),
        "dtype": "bfloat16" if embedding.kind == BF16 else "float16",
        **architecture.config(metadata),
    }
    for key, neutral in _NEUTRAL.items():
        if key not in metadata.used and (value := metadata.get(key)) is not None and value not in neutral:
            raise metadata.refused(key)
    return config


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


def _sources(architecture: Architecture, metadata: Metadata, config: dict[str, Any]) -> dict[str, GgufSource]:
    where, tensors = metadata.where, metadata.header.tensors
    every, kept = metadata.size("block_count"), config["num_hidden_layers"]
    experts = metadata.size("expert_count")
    expert_type = _expert_type(metadata.header)
    layer = architecture.layer(config)
    # One that does not fit the model is left out, as those of other families are.
    of_head = [tensors.get(f"blk.{kept}.{part}") for part in _EXPERTS]
    fits = all(each is None or each.shape[:1] == (experts,) for each in of_head)
    has_head = config["model_type"] in MTP_TYPES and f"blk.{kept}.nextn.eh_proj.weight" in tensors and fits
    found: dict[str, GgufSource] = {}
    unknown = []
    for tensor, described in tensors.items():
        match = _BLOCK.fullmatch(tensor)
        number, part = (int(match[1]), match[2]) if match else (None, tensor)
        if number is not None and number >= every:
            raise CheckpointError(
                f"{where}: {tensor[:200]!r} belongs to layer {number} (from 0) of {every}",
                hint="download or copy the file again",
            )
        if number is not None and number >= kept and (number > kept or not has_head):
            continue  # of a layer that only predicts further tokens
        if number is not None and (part in _EXPERTS or _EXPERT.fullmatch(part)):
            found |= _expert_sources(tensor, described, number, part, experts, expert_type, where)
            continue
        place = architecture.model.get(part) if number is None else layer.get(part)
        if place is None and number is not None:
            place = architecture.own(config, number).get(part)
        if place is None and number == kept:
            place = head_place(layer, part)
        if place is None and number == kept:
            continue  # a repetition of the embedding or the head
        if place is not None:
            prefix = "" if number is None else f"model.layers.{number}."
            for each in place if isinstance(place, tuple) else (place,):
                each = Place(each) if isinstance(each, str) else each
                _require_numbers(tensor, described, each.integers, where)
                computed = any(change.arithmetic for change in each.changes)
                dtype = "F32" if computed else _dense_type(described.kind)
                found[prefix + each.name] = GgufSource(tensor, dtype, changes=each.changes)
        elif not _IGNORED_TENSORS.fullmatch(tensor) and part not in architecture.ignored:
            unknown.append(tensor)
    if unknown:
        raise UnsupportedModelError(
            f"{where} has {len(unknown)} tensors that a {config['model_type']} model does not have, "
            f"first {unknown[0][:200]!r}",
            hint="take the model's own repository, with safetensors files",
        )
    return found


def _expert_sources(
    tensor: str, described: GgufTensor, layer: int, part: str, experts: int, dtype: str, where: str
) -> dict[str, GgufSource]:
    """Sources of the experts in one tensor: those of a layer, or one of them."""
    _require_numbers(tensor, described, False, where)
    single = _EXPERT.fullmatch(part)
    if single:
        if int(single[2]) >= experts:
            raise CheckpointError(
                f"{where}: {tensor} belongs to expert {single[2]} (from 0) of {experts}",
                hint="download or copy the file again",
            )
        return {expert_name(layer, int(single[2]), single[1], "weight"): GgufSource(tensor, dtype)}
    name, kind = _EXPERTS[part]
    dimensions = 3 if kind == "weight" else 2
    if len(described.shape) != dimensions or described.shape[0] != experts:
        raise CheckpointError(
            f"{where}: {tensor} has shape {list(described.shape)}, the model has {experts} experts a layer",
            hint="download or copy the file again",
        )
    visible = dtype if kind == "weight" else _dense_type(described.kind)
    return {
        expert_name(layer, expert, name, kind): GgufSource(tensor, visible, expert)
        for expert in range(experts)
    }


def _require_numbers(tensor: str, described: GgufTensor, integers: bool, where: str) -> None:
    """Check that a tensor has whole numbers where the architecture has them, and only there."""
    if (described.kind == I32) != integers:
        from gguf.constants import GGMLQuantizationType

        wanted = "whole numbers (I32)" if integers else "a type for weights"
        name = GGMLQuantizationType(described.kind).name
        raise CheckpointError(
            f"{where}: {tensor[:200]} has type {name}; {wanted} is expected",
            hint="download or copy the file again",
        )


def _expert_type(header: GgufHeader) -> str:
    """Visible type of experts: their float type if it is the same for all, else ``F32`` (decoded)."""
    weights = {part for part, (_, kind) in _EXPERTS.items() if kind == "weight"}
    kinds = {
        tensor.kind
        for name, tensor in header.tensors.items()
        if (match := _BLOCK.fullmatch(name)) and (match[2] in weights or _EXPERT.fullmatch(match[2]))
    }
    return {F16: "F16", BF16: "BF16"}.get(kinds.pop(), "F32") if len(kinds) == 1 else "F32"


def _dense_type(kind: int) -> str:
    return PLAIN[kind][0] if kind in PLAIN else "F16"
