"""One of llama.cpp's architectures in the terms of transformers, and what most of them share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from moechat.errors import UnsupportedModelError
from moechat.models.gguf_metadata import Metadata
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


# Of a head for multi-token prediction, beside its layer: named as in DeepSeek's checkpoints.
_HEAD_NORMS = {
    "nextn.enorm.weight": "enorm.weight",
    "nextn.hnorm.weight": "hnorm.weight",
    "nextn.shared_head_norm.weight": "shared_head.norm.weight",
}


def head_place(layer: Places, part: str) -> Place | None:
    """Place of a tensor that only a head for multi-token prediction has; ``None``: it is another tensor.

    Args:
        layer: Places of a layer's tensors; the norms of heads are changed as its are.
        part: Name of the tensor without ``blk.N.``.
    """
    if part == "nextn.eh_proj.weight":
        return Place("eh_proj.weight")
    if part not in _HEAD_NORMS:
        return None
    norm = layer["attn_norm.weight"]
    return Place(_HEAD_NORMS[part], norm.changes if isinstance(norm, Place) else ())


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
