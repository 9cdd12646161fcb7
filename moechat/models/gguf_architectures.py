"""llama.cpp's architectures and their metadata, in the terms of transformers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from moechat.errors import CheckpointError
from moechat.store.gguf_header import GgufHeader

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
    """transformers' names for one of llama.cpp's architectures.

    Attributes:
        model_type: Name of the family.
        class_name: transformers' class, as in ``architectures``.
        experts: Name of an expert's gate, up and down matrix in a layer, with ``{expert}``.
        router: Name of a layer's router.
        config: Gives the additional configuration from the file's metadata.
        layer: Other names in a layer.
        interleaved: Rotary halves of queries and keys are interleaved in the file.
    """

    model_type: str
    class_name: str
    experts: Mapping[str, str]
    router: str
    config: Callable[[Metadata], dict[str, Any]]
    layer: Mapping[str, str] = field(default_factory=lambda: _LAYER)
    interleaved: bool = False


class Metadata:
    """Checked access to the metadata of a file."""

    def __init__(self, header: GgufHeader, architecture: str, where: str) -> None:
        self._values = header.metadata
        self._architecture = architecture
        self._where = where

    def number(self, key: str, default: float | None = None) -> Any:
        """A positive number of the architecture.

        Raises:
            CheckpointError: It is missing without a default, or not a positive number.
        """
        value = self._values.get(f"{self._architecture}.{key}", default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise CheckpointError(
                f"{self._where}: {self._architecture}.{key} is {quoted(value)}; a positive number is expected"
            )
        return without_float32_rounding(value)

    def get(self, key: str) -> Any:
        """A value of the architecture, or ``None``."""
        return self._values.get(f"{self._architecture}.{key}")

    def names(self, prefix: str) -> list[str]:
        """Keys of the architecture's values that begin with ``prefix``."""
        whole = f"{self._architecture}.{prefix}"
        return [key.removeprefix(f"{self._architecture}.") for key in self._values if key.startswith(whole)]

    def token(self, key: str) -> int | None:
        """Id of a special token; ``None`` if missing or invalid."""
        value = self._values.get(f"tokenizer.ggml.{key}")
        return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None

    def plain(self, key: str) -> Any:
        """A value by its full key."""
        return self._values.get(key)


def _mixtral(metadata: Metadata) -> dict[str, Any]:
    return {
        "intermediate_size": metadata.number("feed_forward_length"),
        "num_local_experts": metadata.number("expert_count"),
        "sliding_window": metadata.get("attention.sliding_window") or None,
    }


def _qwen3_moe(metadata: Metadata) -> dict[str, Any]:
    return {
        "intermediate_size": metadata.number("feed_forward_length"),
        "moe_intermediate_size": metadata.number("expert_feed_forward_length"),
        "num_experts": metadata.number("expert_count"),
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "attention_bias": False,
    }


def _olmoe(metadata: Metadata) -> dict[str, Any]:
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


def without_float32_rounding(value: int | float) -> int | float:
    """The shortest decimal number with the same float32 value: 0.6, not 0.60000002."""
    return (
        float(np.format_float_positional(np.float32(value), unique=True))
        if isinstance(value, float)
        else value
    )


def quoted(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}…"
