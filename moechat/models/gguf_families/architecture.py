"""One of llama.cpp's architectures in the terms of transformers, and what most of them share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moechat.errors import UnsupportedModelError
from moechat.models.gguf_metadata import Metadata, quoted
from moechat.store.gguf_changes import Change, Rows

Config = dict[str, Any]


@dataclass(frozen=True)
class Place:
    """Name of a tensor in the checkpoint, and the changes that give its values.

    Attributes:
        name: The whole name, or the part after ``model.layers.N.``.
        changes: Applied in order to the file's tensor.
        integers: Its elements are whole numbers.
    """

    name: str
    changes: tuple[Change, ...] = ()
    integers: bool = False


Places = Mapping[str, Place | str | tuple[Place, ...]]
"""By the file's name; several for a tensor in which the file joins some of the checkpoint's."""


@dataclass(frozen=True)
class Architecture:
    """transformers' names for one of llama.cpp's architectures.

    Attributes:
        config: Content of ``config.json`` from the metadata, on top of :func:`common_config`: at least
            ``model_type`` and ``architectures``.
        layer: Places of a layer's tensors by the file's name without ``blk.N.``, from the configuration.
            Experts are found by the reader itself.
        model: Places of the tensors outside the layers.
        ignored: Names of tensors, without ``blk.N.``, that hold nothing that moechat computes with.
        epsilon: Key of the norms' epsilon; ``None`` if ``config`` reads it.
        own: Places of tensors that differ by layer, from the configuration and the layer's number.
    """

    config: Callable[[Metadata], Config]
    layer: Callable[[Config], Places]
    model: Places = field(default_factory=lambda: MODEL)
    ignored: frozenset[str] = frozenset()
    epsilon: str | None = "attention.layer_norm_rms_epsilon"
    own: Callable[[Config, int], Places] = lambda config, layer: {}


MODEL: Places = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
NORMS: Places = {
    "attn_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
}
ATTENTION: Places = {
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
}
ATTENTION_BIASES: Places = {
    "attn_q.bias": "self_attn.q_proj.bias",
    "attn_k.bias": "self_attn.k_proj.bias",
    "attn_v.bias": "self_attn.v_proj.bias",
}
QK_NORMS: Places = {
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
}
ROUTER: Places = {"ffn_gate_inp.weight": "mlp.gate.weight"}
DENSE_MLP: Places = {f"ffn_{part}.weight": f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")}


def joined_attention(queries: int, keys: int, values: int, *, bias: bool = False) -> Places:
    """Places of queries, keys and values in one tensor, with so many rows each."""
    sizes = {"q": queries, "k": keys, "v": values}
    starts = {"q": 0, "k": queries, "v": queries + keys}
    return {
        f"attn_qkv.{kind}": tuple(
            Place(f"self_attn.{part}_proj.{kind}", (Rows(starts[part], size, sum(sizes.values())),))
            for part, size in sizes.items()
        )
        for kind in (("weight", "bias") if bias else ("weight",))
    }


def shared_experts(name: str) -> Places:
    """Places of the experts that every token passes through."""
    return {f"ffn_{part}_shexp.weight": f"mlp.{name}.{part}_proj.weight" for part in ("gate", "up", "down")}


def common_config(metadata: Metadata, epsilon: str | None) -> Config:
    """Values of ``config.json`` that all architectures have; ``epsilon`` as in :class:`Architecture`.

    Raises:
        CheckpointError: A value is missing or malformed.
    """
    tensors = metadata.header.tensors
    blocks = metadata.size("block_count") - metadata.count("nextn_predict_layers", 0)
    return {
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "hidden_size": metadata.size("embedding_length"),
        "num_hidden_layers": blocks,
        "max_position_embeddings": metadata.size("context_length"),
        **({} if epsilon is None else {"rms_norm_eps": metadata.number(epsilon)}),
        "num_experts_per_tok": metadata.size("expert_used_count"),
        "tie_word_embeddings": "output.weight" not in tensors,
        "bos_token_id": metadata.token("bos_token_id"),
        "eos_token_id": metadata.token("eos_token_id"),
        "pad_token_id": metadata.token("padding_token_id"),
    }


def attention_heads(metadata: Metadata, *, rotated: bool = True) -> Config:
    """Heads of grouped attention, all layers alike.

    Args:
        metadata: Of the file.
        rotated: Whole heads are rotated, so that a file which does not state their size says it so.

    Raises:
        CheckpointError: A value is missing or malformed.
        UnsupportedModelError: Values have another size than keys.
    """
    heads = metadata.size("attention.head_count")
    default = rotated_default(metadata, heads) if rotated else metadata.size("embedding_length") // heads
    head_dim = metadata.size("attention.key_length", default)
    if metadata.size("attention.value_length", head_dim) != head_dim:
        raise UnsupportedModelError(
            f"{metadata.where}: attention.value_length is {metadata.get('attention.value_length')}, "
            f"heads have {head_dim}: moechat does not read that"
        )
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.size("attention.head_count_kv", heads),
        "head_dim": head_dim,
    }


def rotated_default(metadata: Metadata, heads: int) -> int:
    """Size of a head in files that do not state it."""
    rotated = metadata.get("rope.dimension_count")
    return rotated if isinstance(rotated, int) and rotated else metadata.size("embedding_length") // heads


def whole_rotary(metadata: Metadata, head_dim: int) -> Config:
    """Rotary parameters where whole heads are rotated.

    Raises:
        UnsupportedModelError: The file rotates another part.
    """
    if metadata.size("rope.dimension_count", head_dim) != head_dim:
        raise UnsupportedModelError(
            f"{metadata.where}: rope.dimension_count is {metadata.get('rope.dimension_count')}, "
            f"heads have {head_dim}: moechat does not read that"
        )
    return rotary(metadata)


# Rotary scaling of Llama 3.1 and of Llama 4 Scout, which files state by its factors only.
_FREQUENCY_FACTORS = ((1.0, 4.0), (1.0, 1.0))
_ORIGINAL_LENGTH = 8192
FREQUENCY_TABLE = "rope_freqs.weight"


def factored_rotary(metadata: Metadata, head_dim: int) -> Config:
    """As :func:`whole_rotary`, where the file may have a factor for each frequency.

    Raises:
        UnsupportedModelError: The factors are not those of Llama's scaling.
    """
    unscaled = whole_rotary(metadata, head_dim)
    factors = metadata.table(FREQUENCY_TABLE)
    if factors is None or set(factors) == {1.0}:
        return unscaled
    waves = 2 * np.pi * unscaled["rope_theta"] ** (np.arange(0, head_dim, 2) / head_dim)
    for low, high in _FREQUENCY_FACTORS:
        found = {
            "rope_type": "llama3",
            "rope_theta": unscaled["rope_theta"],
            "factor": max(factors),
            "low_freq_factor": low,
            "high_freq_factor": high,
            "original_max_position_embeddings": _ORIGINAL_LENGTH,
        }
        if unscaled["rope_type"] == "default" and _has_factors(waves, factors, found):
            return found
    raise UnsupportedModelError(
        f"{metadata.where}: the factors in {FREQUENCY_TABLE} are of no rotary scaling that moechat knows",
        hint="take the model's own repository, with safetensors files",
    )


def _has_factors(waves: NDArray[np.float64], factors: tuple[float, ...], scaling: Config) -> bool:
    """Whether Llama's scaling divides frequencies of these wave lengths by these factors."""
    longest, low, high = (
        scaling[key] for key in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
    )
    if len(factors) != len(waves):
        return False
    smooth = np.zeros(len(waves)) if low == high else (longest / waves - low) / (high - low)
    between = 1 / ((1 - smooth) / scaling["factor"] + smooth)
    expected = np.where(
        waves < longest / high, 1, np.where(waves > longest / low, scaling["factor"], between)
    )
    return bool(np.allclose(expected, factors, rtol=1e-4))


def partial_rotary(metadata: Metadata, head_dim: int) -> Config:
    """Rotary parameters with ``partial_rotary_factor``."""
    return rotary(metadata) | {
        "partial_rotary_factor": metadata.size("rope.dimension_count", head_dim) / head_dim
    }


def rotary(metadata: Metadata, *, base: str = "rope.freq_base", log_multiplier: bool = False) -> Config:
    """Rotary parameters as transformers has them.

    Args:
        metadata: Of the file.
        base: Key of the base.
        log_multiplier: As in DeepSeek's models, YaRN scales attention instead of queries and keys.

    Raises:
        CheckpointError: A value is malformed.
        UnsupportedModelError: The file scales in a way that moechat does not read.
    """
    found: Config = {"rope_theta": float(metadata.number(base, 10000.0))}
    kind = metadata.get("rope.scaling.type")
    if kind is None:  # llama.cpp's default; has no effect without a factor
        kind = "linear"
    if kind not in ("none", "linear", "yarn"):
        raise UnsupportedModelError(
            f"{metadata.where}: its rotary scaling is {quoted(kind)}, which moechat does not read"
        )
    _require_known_scaling(metadata, kind, log_multiplier)
    # Files of 2023 use the second key.
    key = "rope.scaling.factor" if metadata.get("rope.scaling.factor") is not None else "rope.scale_linear"
    if kind == "yarn":
        found |= {"rope_type": "yarn", "factor": float(metadata.number(key))}
        found["original_max_position_embeddings"] = metadata.size("rope.scaling.original_context_length")
        for own, name in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")):
            if metadata.get(f"rope.scaling.{own}") is not None:
                found[name] = float(metadata.number(f"rope.scaling.{own}"))
        if log_multiplier:
            # The converter multiplies it by 0.1, and cancels scaling by any other way.
            scale = float(metadata.number("rope.scaling.yarn_log_multiplier")) * 10
            scale = round(scale, 6)
            found |= {"mscale": scale, "mscale_all_dim": scale, "attention_factor": 1.0}
        return found
    unscaled = kind == "none" or metadata.get(key) in (None, 0)  # 0: not set
    factor = 1.0 if unscaled else float(metadata.number(key))
    return found | ({"rope_type": "default"} if factor == 1 else {"rope_type": "linear", "factor": factor})


def _require_known_scaling(metadata: Metadata, kind: str, log_multiplier: bool) -> None:
    """Reject rotary scaling parameters that would have an effect and that :func:`rotary` does not use."""
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
        if log_multiplier and name == "yarn_log_multiplier":
            continue
        if name not in used and metadata.get(key) not in neutral.get(name, ()):
            raise metadata.refused(key)


def require(metadata: Metadata, expected: Mapping[str, tuple[Any, ...]]) -> None:
    """Reject values that differ from those that transformers' model of the family computes with.

    Raises:
        UnsupportedModelError: One differs.
    """
    for key, values in expected.items():
        if metadata.get(key) not in values:
            raise metadata.refused(key)


SOFTMAX, SIGMOID, SOFTMAX_OF_CHOSEN, SQRT_SOFTPLUS = 1, 2, 3, 4
"""Values of ``expert_gating_func``; 0 and none mean the architecture's own."""
