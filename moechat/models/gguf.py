"""Which transformers model a GGUF file holds: configuration and tensor names by architecture.

Names and conventions are llama.cpp's: its metadata keys and tensor names, and what its graph of an
architecture computes where the file does not say (whether routed weights are normalised, how rotary halves
lie). Everything that a file states and that would change a result is used or refused, never passed over.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from moechat.errors import CheckpointError, UnsupportedModelError
from moechat.store.gguf_file import BF16, F16, PLAIN, GgufSource
from moechat.store.gguf_header import GgufHeader

# Numbers as llama.cpp writes them: with leading zeros a layer or an expert would have many names.
_NUMBER = "(0|[1-9][0-9]{0,8})"
_BLOCK = re.compile(rf"blk\.{_NUMBER}\.(.+)")
_MAX_BLOCKS = 10_000
# A header is small whatever it claims; each expert of a layer gets three names here. The largest models have
# some 30,000 experts in all.
_MAX_EXPERTS = 65_536
_MAX_EXPERTS_IN_ALL = 1 << 18
_EXPERTS = {"ffn_gate_exps.weight": "gate", "ffn_up_exps.weight": "up", "ffn_down_exps.weight": "down"}
# Files of early 2024 have a tensor an expert.
_EXPERT = re.compile(rf"ffn_(gate|up|down)\.{_NUMBER}\.weight")
# Tables of old files that llama.cpp computes anew from the metadata.
_PASSED_OVER = re.compile(r"blk\.\d+\.attn_rot_embd(\..+)?")

_AROUND = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
}
_QK_NORMS = {"attn_q_norm.weight": "self_attn.q_norm.weight", "attn_k_norm.weight": "self_attn.k_norm.weight"}


@dataclass(frozen=True)
class Architecture:
    """How one of llama.cpp's architectures is spelt in transformers.

    Attributes:
        model_type: The family.
        class_name: transformers' class, as in ``architectures``.
        experts: Name of an expert's matrix in a layer, with ``{expert}``, by gate, up, down.
        router: Name of a layer's router.
        layer: Other names in a layer.
        interleaved: Rotary halves of queries and keys are interleaved in the file.
        config: Further configuration, from the file.
    """

    model_type: str
    class_name: str
    experts: Mapping[str, str]
    router: str
    config: Callable[[_Metadata], dict[str, Any]]
    layer: Mapping[str, str] = field(default_factory=lambda: _LAYER)
    interleaved: bool = False


@dataclass(frozen=True)
class GgufModel:
    """A file as a transformers model.

    Attributes:
        config: Content of ``config.json``.
        generation: Content of ``generation_config.json``.
        sources: Where each of the checkpoint's tensors lies.
        has_vocabulary: The file has a tokenizer.
    """

    config: dict[str, Any]
    generation: dict[str, Any]
    sources: dict[str, GgufSource]
    has_vocabulary: bool


class _Metadata:
    """A file's values, of its architecture and checked."""

    def __init__(self, header: GgufHeader, architecture: str, where: str) -> None:
        self._values = header.metadata
        self._architecture = architecture
        self._where = where

    def number(self, key: str, default: float | None = None) -> Any:
        """A positive number of the architecture.

        Raises:
            CheckpointError: It is missing, and there is no default, or something else.
        """
        value = self._values.get(f"{self._architecture}.{key}", default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise CheckpointError(
                f"{self._where}: {self._architecture}.{key} is {_shown(value)}; a positive number is expected"
            )
        return _shortest(value)

    def get(self, key: str) -> Any:
        """A value of the architecture, or ``None``."""
        return self._values.get(f"{self._architecture}.{key}")

    def names(self, prefix: str) -> list[str]:
        """Which values of the architecture have keys that begin so."""
        whole = f"{self._architecture}.{prefix}"
        return [key.removeprefix(f"{self._architecture}.") for key in self._values if key.startswith(whole)]

    def token(self, key: str) -> int | None:
        """Number of a special token."""
        value = self._values.get(f"tokenizer.ggml.{key}")
        return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None

    def plain(self, key: str) -> Any:
        """A value by its whole key."""
        return self._values.get(key)


def _mixtral(metadata: _Metadata) -> dict[str, Any]:
    return {
        "intermediate_size": metadata.number("feed_forward_length"),
        "num_local_experts": metadata.number("expert_count"),
        "sliding_window": metadata.get("attention.sliding_window") or None,
    }


def _qwen3_moe(metadata: _Metadata) -> dict[str, Any]:
    return {
        "intermediate_size": metadata.number("feed_forward_length"),
        "moe_intermediate_size": metadata.number("expert_feed_forward_length"),
        "num_experts": metadata.number("expert_count"),
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "attention_bias": False,
    }


def _olmoe(metadata: _Metadata) -> dict[str, Any]:
    return {
        "intermediate_size": metadata.number("feed_forward_length"),
        "num_experts": metadata.number("expert_count"),
        "norm_topk_prob": False,
        "clip_qkv": metadata.get("attention.clamp_kqv") or None,
        "attention_bias": False,
    }


_PROJECTIONS = {part: f"mlp.experts.{{expert}}.{part}_proj.weight" for part in ("gate", "up", "down")}
_MIXTRAL = Architecture(
    "mixtral",
    "MixtralForCausalLM",
    {
        part: f"block_sparse_moe.experts.{{expert}}.{name}.weight"
        for part, name in (("gate", "w1"), ("down", "w2"), ("up", "w3"))
    },
    "block_sparse_moe.gate.weight",
    _mixtral,
    interleaved=True,
)
ARCHITECTURES = {
    "llama": _MIXTRAL,  # with experts; Mixtral's attention is Llama's
    "qwen3moe": Architecture(
        "qwen3_moe", "Qwen3MoeForCausalLM", _PROJECTIONS, "mlp.gate.weight", _qwen3_moe, _LAYER | _QK_NORMS
    ),
    "olmoe": Architecture(
        "olmoe", "OlmoeForCausalLM", _PROJECTIONS, "mlp.gate.weight", _olmoe, _LAYER | _QK_NORMS
    ),
}


def describe_gguf(header: GgufHeader, where: str) -> GgufModel:
    """Configuration and tensors of the model that a file holds.

    Args:
        header: Of the file; of a model in several files the first one's, with all tensors.
        where: Its name, for messages.

    Raises:
        UnsupportedModelError: It is no mixture of experts, or one of an architecture that is not read from
            GGUF files, or it states what moechat does not compute.
        CheckpointError: Values or tensors are missing, or do not fit together.
    """
    name = header.metadata.get("general.architecture")
    if not isinstance(name, str):
        raise CheckpointError(
            f"{where} does not say its architecture", hint="download or copy the file again"
        )
    kind = header.metadata.get("general.type", "model")
    if kind != "model":
        raise UnsupportedModelError(f"{where} holds no language model, but a GGUF file of type {kind!r}")
    metadata = _Metadata(header, name, where)
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


def _config(
    architecture: Architecture, metadata: _Metadata, header: GgufHeader, where: str
) -> dict[str, Any]:
    blocks = metadata.number("block_count")
    if not isinstance(blocks, int) or blocks > min(_MAX_BLOCKS, len(header.tensors)):
        raise CheckpointError(f"{where} claims {blocks} layers, with {len(header.tensors)} tensors")
    experts = metadata.number("expert_count")
    if not isinstance(experts, int) or experts > min(_MAX_EXPERTS, _MAX_EXPERTS_IN_ALL // blocks):
        raise CheckpointError(
            f"{where} claims {experts} experts in each of {blocks} layers; moechat reads up to "
            f"{_MAX_EXPERTS} in a layer and {_MAX_EXPERTS_IN_ALL} in all"
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


def _require_known_routing(config: dict[str, Any], metadata: _Metadata, where: str) -> None:
    """Refuse what a file says of its routing where transformers' model of the family does otherwise."""
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
                f"{where}: {key} is {_shown(metadata.get(key))}, which moechat does not compute"
            )


def _rotary(metadata: _Metadata, where: str) -> dict[str, Any]:
    rotary: dict[str, Any] = {"rope_theta": float(metadata.number("rope.freq_base", 10000.0))}
    kind = metadata.get("rope.scaling.type")
    if kind is None:  # as llama.cpp takes it; without a factor it scales nothing
        kind = "linear"
    if kind not in ("none", "linear", "yarn"):
        raise UnsupportedModelError(
            f"{where}: its rotary scaling is {_shown(kind)}, which moechat does not read"
        )
    _require_known_scaling(metadata, kind, where)
    # Files of 2023 have the old key.
    key = "rope.scaling.factor" if metadata.get("rope.scaling.factor") is not None else "rope.scale_linear"
    if kind == "yarn":
        rotary |= {"rope_type": "yarn", "factor": float(metadata.number(key))}
        rotary["original_max_position_embeddings"] = metadata.number("rope.scaling.original_context_length")
        for own, name in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")):
            if metadata.get(f"rope.scaling.{own}") is not None:
                rotary[name] = float(metadata.number(f"rope.scaling.{own}"))
        return rotary
    unscaled = kind == "none" or metadata.get(key) in (None, 0)  # 0: not given
    factor = 1.0 if unscaled else float(metadata.number(key))
    return rotary | ({"rope_type": "default"} if factor == 1 else {"rope_type": "linear", "factor": factor})


def _require_known_scaling(metadata: _Metadata, kind: str, where: str) -> None:
    """Refuse what a file says of its rotary scaling that :func:`_rotary` does not use and that matters."""
    used = ("type", "factor", "original_context_length", "finetuned", "yarn_beta_fast", "yarn_beta_slow")
    neutral = {
        "alpha": (0,),
        "attn_factor": (1,),
        "yarn_attn_factor": (1,),
        "yarn_ext_factor": (-1, 1 if kind == "yarn" else 0),  # -1: as the type has it
        "yarn_log_multiplier": (0,),
    }
    for key in metadata.names("rope.scaling."):
        name = key.removeprefix("rope.scaling.")
        if name not in used and metadata.get(key) not in neutral.get(name, ()):
            raise UnsupportedModelError(
                f"{where}: {key[:200]} is {_shown(metadata.get(key))}, which moechat does not compute"
            )


def _generation(metadata: _Metadata) -> dict[str, Any]:
    """Tokens that end an answer, and how its makers want it drawn, where newer files say that."""
    ends = [metadata.token(key) for key in ("eos_token_id", "eot_token_id", "eom_token_id")]
    found: dict[str, Any] = {"eos_token_id": list(dict.fromkeys(end for end in ends if end is not None))}
    if metadata.token("bos_token_id") is not None:
        found["bos_token_id"] = metadata.token("bos_token_id")
    names = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}
    for key, name in names.items():
        value = metadata.plain(f"general.sampling.{key}")
        if isinstance(value, int | float) and not isinstance(value, bool):
            found[name] = _shortest(value)
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
        if number is None and part in _AROUND:
            found[_AROUND[part]] = GgufSource(tensor, _dense_type(described.kind))
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
        elif not _PASSED_OVER.fullmatch(tensor):
            unknown.append(tensor)
    if unknown:
        raise UnsupportedModelError(
            f"{where} has {len(unknown)} tensors that a {architecture.model_type} model does not have, "
            f"first {unknown[0][:200]!r}",
            hint="take the model's own repository, with safetensors files",
        )
    return found


def _expert_type(header: GgufHeader) -> str:
    """What experts appear as: the floats that all of them are, else decoded."""
    kinds = {
        tensor.kind
        for name, tensor in header.tensors.items()
        if (match := _BLOCK.fullmatch(name)) and (match[2] in _EXPERTS or _EXPERT.fullmatch(match[2]))
    }
    return {F16: "F16", BF16: "BF16"}.get(kinds.pop(), "F32") if len(kinds) == 1 else "F32"


def _dense_type(kind: int) -> str:
    return PLAIN[kind][0] if kind in PLAIN else "F16"


def _shortest(value: int | float) -> int | float:
    """The number that was meant by one that went through float32: 0.6 and not 0.60000002."""
    return (
        float(np.format_float_positional(np.float32(value), unique=True))
        if isinstance(value, float)
        else value
    )


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}…"
