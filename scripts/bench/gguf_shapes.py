"""What a GGUF file of a mixture-of-experts model holds: tensors, metadata, and the bytes a token reads.

Pure arithmetic over a transformers configuration; no package is needed. ``gguf_files.py`` writes such a file,
``bench/cpu`` measures it. Names and metadata are those that llama.cpp's loaders of the architectures
``llama`` (Mixtral), ``olmoe`` and ``qwen3moe`` ask for.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

# Of the writer: part of the name of a file, so that files of another form are not taken for these.
REVISION = 1
# Weights and bytes of a block of each encoding (ggml-common.h: block_q4_0, block_q4_K and so on).
BLOCKS = {
    "f32": (1, 4),
    "q4_0": (32, 18),
    "q8_0": (32, 34),
    "q4_k": (256, 144),
    "q5_k": (256, 176),
    "q6_k": (256, 210),
}
FORMATS = ("q4_k", "q4_k_m", "q4_0")
_ARCHITECTURES = {"mixtral": "llama", "olmoe": "olmoe", "qwen3_moe": "qwen3moe"}


@dataclass(frozen=True)
class Tensor:
    """One tensor.

    Attributes:
        name: As llama.cpp calls it.
        shape: Slowest dimension first; the last one is what a product sums over.
        kind: A key of :data:`BLOCKS`.
        parts: Equal parts along the first dimension: tokens of an embedding, experts.
        used: Parts that one token reads.
    """

    name: str
    shape: tuple[int, ...]
    kind: str
    parts: int = 1
    used: int = 1

    def __post_init__(self) -> None:
        weights, _ = BLOCKS[self.kind]
        if self.shape[-1] % weights:
            raise ValueError(f"{self.name}: rows of {self.shape[-1]} weights cannot be {self.kind}")

    @property
    def nbytes(self) -> int:
        """Bytes of it in the file, without padding."""
        weights, nbytes = BLOCKS[self.kind]
        elements = 1
        for size in self.shape:
            elements *= size
        return elements // weights * nbytes

    @property
    def active_bytes(self) -> int:
        """Bytes of it that one token reads."""
        return self.nbytes // self.parts * self.used


@dataclass(frozen=True)
class GgufPlan:
    """A whole file.

    Attributes:
        architecture: ``general.architecture``.
        metadata: Values by key; ints are written as uint32, floats as float32.
        tensors: In file order.
    """

    architecture: str
    metadata: Mapping[str, int | float | str]
    tensors: tuple[Tensor, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def active_bytes(self) -> int:
        """Bytes of weights that one token reads."""
        return sum(tensor.active_bytes for tensor in self.tensors)

    @property
    def expert_active_bytes(self) -> int:
        """Of these, bytes of experts."""
        return sum(tensor.active_bytes for tensor in self.tensors if "_exps" in tensor.name)

    @property
    def fingerprint(self) -> str:
        """Hash of all of it, 8 hex digits."""
        text = json.dumps([REVISION, self.to_json()], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:8]

    def to_json(self) -> dict[str, Any]:
        """For the writer, which may run under another interpreter."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> GgufPlan:
        """The reverse of :meth:`to_json`."""
        tensors = tuple(Tensor(**{**entry, "shape": tuple(entry["shape"])}) for entry in values["tensors"])
        return cls(values["architecture"], dict(values["metadata"]), tensors)


@dataclass(frozen=True)
class _Mix:
    """Encodings of the matrices of a format (llama.cpp's src/llama-quant.cpp, llama_tensor_get_type_impl).

    Attributes:
        kind: One of :data:`FORMATS`.
        layers: Of the model.
        experts: Of a layer; llama.cpp's mix knows models with eight.
    """

    kind: str
    layers: int
    experts: int

    @property
    def base(self) -> str:
        """Of most matrices."""
        return "q4_k" if self.mixed else self.kind

    @property
    def mixed(self) -> bool:
        """Whether matrices differ."""
        return self.kind == "q4_k_m"

    @property
    def head(self) -> str:
        """Of the head."""
        return "q6_k" if self.mixed else self.kind

    @property
    def key(self) -> str:
        """Of the key projection."""
        return "q8_0" if self.mixed and self.experts == 8 else self.base

    @property
    def output(self) -> str:
        """Of the attention's output projection."""
        return "q5_k" if self.mixed and self.experts == 8 else self.base

    def value(self, layer: int) -> str:
        """Of the value projection."""
        return "q8_0" if self.mixed and self.experts == 8 else self.down(layer)

    def down(self, layer: int) -> str:
        """Of the experts' down projection."""
        first, last = self.layers // 8, 7 * self.layers // 8
        more = layer < first or layer >= last or (layer - first) % 3 == 2
        return "q6_k" if self.mixed and more else self.base


def plan_gguf(
    config: Mapping[str, Any], kind: str, *, neurons: int | None = None, context: int = 4096
) -> GgufPlan:
    """The file of a model; norms and routers are float32, as llama.cpp wants.

    ``q4_k`` and ``q4_0`` encode every matrix alike, the head too: what llama.cpp reads least of. ``q4_k_m``
    is the mix that most people use, with more bits for the matrices that need them.

    Args:
        config: A transformers configuration of Mixtral, OLMoE or Qwen3-MoE.
        kind: One of :data:`FORMATS`.
        neurons: Of an expert instead of the configuration's.
        context: Tokens that the file says the model was made for.

    Raises:
        ValueError: The family is another one, or a row is no whole number of blocks.
    """
    family = str(config["model_type"])
    if family not in _ARCHITECTURES:
        raise ValueError(f"there is no GGUF form for {family}; known: {', '.join(sorted(_ARCHITECTURES))}")
    architecture = _ARCHITECTURES[family]
    hidden, layers, vocabulary = config["hidden_size"], config["num_hidden_layers"], config["vocab_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head = config.get("head_dim") or hidden // heads
    experts = config["num_local_experts" if family == "mixtral" else "num_experts"]
    top_k = config["num_experts_per_tok"]
    inner = neurons or config["moe_intermediate_size" if family == "qwen3_moe" else "intermediate_size"]

    mix = _Mix(kind, layers, experts)
    tensors = [Tensor("token_embd.weight", (vocabulary, hidden), mix.base, parts=vocabulary)]
    for layer in range(layers):
        block = f"blk.{layer}."
        tensors += [
            Tensor(block + "attn_norm.weight", (hidden,), "f32"),
            Tensor(block + "attn_q.weight", (heads * head, hidden), mix.base),
            Tensor(block + "attn_k.weight", (kv_heads * head, hidden), mix.key),
            Tensor(block + "attn_v.weight", (kv_heads * head, hidden), mix.value(layer)),
            Tensor(block + "attn_output.weight", (hidden, heads * head), mix.output),
        ]
        if family != "mixtral":
            # OLMoE norms all heads together, Qwen3 each by itself with the same weights.
            wide = {"olmoe": (heads * head, kv_heads * head), "qwen3_moe": (head, head)}[family]
            tensors += [
                Tensor(block + "attn_q_norm.weight", (wide[0],), "f32"),
                Tensor(block + "attn_k_norm.weight", (wide[1],), "f32"),
            ]
        tensors += [
            Tensor(block + "ffn_norm.weight", (hidden,), "f32"),
            Tensor(block + "ffn_gate_inp.weight", (experts, hidden), "f32"),
            Tensor(block + "ffn_gate_exps.weight", (experts, inner, hidden), mix.base, experts, top_k),
            Tensor(block + "ffn_up_exps.weight", (experts, inner, hidden), mix.base, experts, top_k),
            Tensor(block + "ffn_down_exps.weight", (experts, hidden, inner), mix.down(layer), experts, top_k),
        ]
    tensors += [
        Tensor("output_norm.weight", (hidden,), "f32"),
        Tensor("output.weight", (vocabulary, hidden), mix.head),
    ]

    own: dict[str, int | float] = {
        "context_length": context,
        "embedding_length": hidden,
        "block_count": layers,
        "feed_forward_length": inner,
        "attention.head_count": heads,
        "attention.head_count_kv": kv_heads,
        "attention.key_length": head,
        "attention.value_length": head,
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "rope.freq_base": float(config["rope_theta"]),
        "rope.dimension_count": head,
        "expert_count": experts,
        "expert_used_count": top_k,
        "expert_feed_forward_length": inner,
        "vocab_size": vocabulary,
    }
    # Tokens are given as numbers, so there is no vocabulary of texts.
    metadata: dict[str, int | float | str] = {"tokenizer.ggml.model": "no_vocab"}
    metadata |= {f"{architecture}.{key}": value for key, value in own.items()}
    return GgufPlan(architecture, metadata, tuple(tensors))
