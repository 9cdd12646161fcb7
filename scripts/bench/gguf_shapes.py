"""What a GGUF file of a mixture-of-experts model holds: tensors, metadata, and the bytes a token reads.

Pure arithmetic over a transformers configuration; no package is needed. ``gguf_files.py`` writes such a file,
``bench/cpu`` measures it. Names and metadata are those that llama.cpp's loaders of the architectures
``llama`` (Mixtral), ``olmoe``, ``qwen3moe``, ``qwen35moe``, ``deepseek2`` (GLM-4.7-Flash), ``lfm2moe`` and
``gemma4`` ask for.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

# Of the writer: part of the name of a file, so that files of another form are not taken for these.
REVISION = 2
# Weights and bytes of a block of each encoding (ggml-common.h: block_q4_0, block_q4_K and so on).
BLOCKS = {
    "f32": (1, 4),
    "q4_0": (32, 18),
    "q5_0": (32, 22),
    "q8_0": (32, 34),
    "q4_k": (256, 144),
    "q5_k": (256, 176),
    "q6_k": (256, 210),
    "mxfp4": (32, 17),
}
FORMATS = ("q4_k", "q4_k_m", "q4_0")
_ARCHITECTURES = {
    "mixtral": "llama",
    "olmoe": "olmoe",
    "qwen3_moe": "qwen3moe",
    "qwen3_5_moe_text": "qwen35moe",
    "glm4_moe_lite": "deepseek2",
    "lfm2_moe": "lfm2moe",
    "gemma4_text": "gemma4",
}
# Families whose tensors and values stand in functions of their own.
_OWN = ("lfm2_moe", "gemma4_text")
_EXPERTS = {"mixtral": "num_local_experts", "glm4_moe_lite": "n_routed_experts"}


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
        metadata: Values by key; ints are written as uint32, also of lists, floats as float32.
        tensors: In file order.
    """

    architecture: str
    metadata: Mapping[str, int | float | str | list[int]]
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
        config: A transformers configuration of Mixtral, OLMoE, Qwen3-MoE, Qwen3.5-MoE, GLM-4.7-Flash,
            LFM2-MoE or Gemma 4.
        kind: One of :data:`FORMATS`.
        neurons: Of an expert instead of the configuration's.
        context: Tokens that the file says the model was made for.

    Raises:
        ValueError: The family is another one, has no such format here, or a row is no whole number of blocks.
    """
    family = str(config["model_type"])
    if family not in _ARCHITECTURES:
        raise ValueError(f"there is no GGUF form for {family}; known: {', '.join(sorted(_ARCHITECTURES))}")
    architecture = _ARCHITECTURES[family]
    if family in _OWN:
        return _own_plan(config, family, kind, neurons, context)
    hidden, layers, vocabulary = config["hidden_size"], config["num_hidden_layers"], config["vocab_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head = config.get("head_dim") or hidden // heads
    linear, latent = family == "qwen3_5_moe_text", family == "glm4_moe_lite"
    experts = config[_EXPERTS.get(family, "num_experts")]
    top_k = config["num_experts_per_tok"]
    inner = (
        neurons or config["intermediate_size" if family in ("mixtral", "olmoe") else "moe_intermediate_size"]
    )
    if (linear or latent) and kind == "q4_k_m":
        raise ValueError(f"the mix q4_k_m of {family} is not known here")

    mix = _Mix(kind, layers, experts)
    tensors = [Tensor("token_embd.weight", (vocabulary, hidden), mix.base, parts=vocabulary)]
    for layer in range(layers):
        block = f"blk.{layer}."
        tensors.append(Tensor(block + "attn_norm.weight", (hidden,), "f32"))
        if latent:
            tensors += _latent_attention(config, block, mix.base)
            if layer < config["first_k_dense_replace"]:
                tensors += _feed_forward(block, "", config["intermediate_size"], hidden, mix.base)
                continue
            shared = config["n_shared_experts"] * inner
            tensors += _feed_forward(block, "_shexp", shared, hidden, mix.base)
            tensors.append(Tensor(block + "exp_probs_b.bias", (experts,), "f32"))
        elif linear:
            tensors += _qwen35_layer(config, block, config["layer_types"][layer], mix.base)
        else:
            tensors += [
                Tensor(block + "attn_q.weight", (heads * head, hidden), mix.base),
                Tensor(block + "attn_k.weight", (kv_heads * head, hidden), mix.key),
                Tensor(block + "attn_v.weight", (kv_heads * head, hidden), mix.value(layer)),
                Tensor(block + "attn_output.weight", (hidden, heads * head), mix.output),
                Tensor(block + "ffn_norm.weight", (hidden,), "f32"),
            ]
        if family in ("olmoe", "qwen3_moe"):
            # OLMoE norms all heads together, Qwen3 each by itself with the same weights.
            wide = {"olmoe": (heads * head, kv_heads * head), "qwen3_moe": (head, head)}[family]
            tensors += [
                Tensor(block + "attn_q_norm.weight", (wide[0],), "f32"),
                Tensor(block + "attn_k_norm.weight", (wide[1],), "f32"),
            ]
        tensors += [
            Tensor(block + "ffn_gate_inp.weight", (experts, hidden), "f32"),
            Tensor(block + "ffn_gate_exps.weight", (experts, inner, hidden), mix.base, experts, top_k),
            Tensor(block + "ffn_up_exps.weight", (experts, inner, hidden), mix.base, experts, top_k),
            Tensor(block + "ffn_down_exps.weight", (experts, hidden, inner), mix.down(layer), experts, top_k),
        ]
    tensors += [
        Tensor("output_norm.weight", (hidden,), "f32"),
        Tensor("output.weight", (vocabulary, hidden), mix.head),
    ]

    own: dict[str, int | float | list[int]] = {
        "context_length": context,
        "embedding_length": hidden,
        "block_count": layers,
        "feed_forward_length": inner,
        "attention.head_count": heads,
        "attention.head_count_kv": kv_heads,
        "attention.key_length": head,
        "attention.value_length": head,
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "rope.freq_base": float(config["rope_parameters"]["rope_theta"] if linear else config["rope_theta"]),
        "rope.dimension_count": head,
        "expert_count": experts,
        "expert_used_count": top_k,
        "expert_feed_forward_length": inner,
        "vocab_size": vocabulary,
    }
    if linear:
        own |= _qwen35_values(config)
    if latent:
        own |= _latent_values(config)
    return _plan(architecture, tensors, own)


def _plan(architecture: str, tensors: list[Tensor], own: Mapping[str, int | float | list[int]]) -> GgufPlan:
    # Tokens are given as numbers, so there is no vocabulary of texts.
    metadata: dict[str, int | float | str | list[int]] = {"tokenizer.ggml.model": "no_vocab"}
    metadata |= {f"{architecture}.{key}": value for key, value in own.items()}
    return GgufPlan(architecture, metadata, tuple(tensors))


def _own_plan(
    config: Mapping[str, Any], family: str, kind: str, neurons: int | None, context: int
) -> GgufPlan:
    """The file of a model whose head is its embedding."""
    if kind == "q4_k_m":
        raise ValueError(f"the mix q4_k_m of {family} is not known here")
    hidden, vocabulary = config["hidden_size"], config["vocab_size"]
    inner = neurons or config["moe_intermediate_size"]
    layer_of, values_of, norm, epsilon = {
        "lfm2_moe": (_lfm2_layer, _lfm2_values, "token_embd_norm", "norm_eps"),
        "gemma4_text": (_gemma4_layer, _gemma4_values, "output_norm", "rms_norm_eps"),
    }[family]
    tensors = [
        # Read as a whole, since it is the head.
        Tensor("token_embd.weight", (vocabulary, hidden), kind),
        Tensor(f"{norm}.weight", (hidden,), "f32"),
    ]
    if family == "gemma4_text":
        tensors.append(Tensor("rope_freqs.weight", (config["global_head_dim"] // 2,), "f32"))
    for layer in range(config["num_hidden_layers"]):
        tensors += layer_of(config, layer, inner, kind)
    own: dict[str, int | float | list[int]] = {
        "context_length": context,
        "embedding_length": hidden,
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.layer_norm_rms_epsilon": float(config[epsilon]),
        "expert_count": config["num_experts"],
        "expert_feed_forward_length": inner,
        "vocab_size": vocabulary,
        **values_of(config),
    }
    return _plan(_ARCHITECTURES[family], tensors, own)


def _experts(block: str, config: Mapping[str, Any], inner: int, used: int, kind: str) -> list[Tensor]:
    hidden, experts = config["hidden_size"], config["num_experts"]
    return [
        Tensor(block + "ffn_gate_inp.weight", (experts, hidden), "f32"),
        Tensor(block + "ffn_gate_exps.weight", (experts, inner, hidden), kind, experts, used),
        Tensor(block + "ffn_up_exps.weight", (experts, inner, hidden), kind, experts, used),
        Tensor(
            block + "ffn_down_exps.weight", (experts, hidden, inner), _fitting(kind, inner), experts, used
        ),
    ]


def _lfm2_layer(config: Mapping[str, Any], layer: int, inner: int, kind: str) -> list[Tensor]:
    """A layer with attention or a gated short convolution."""
    hidden, block = config["hidden_size"], f"blk.{layer}."
    head = hidden // config["num_attention_heads"]
    keys = config["num_key_value_heads"] * head
    plain = {"attn_norm": (hidden,), "ffn_norm": (hidden,)}
    if config["layer_types"][layer] == "full_attention":
        matrices = {"attn_q": (hidden, hidden), "attn_k": (keys, hidden), "attn_v": (keys, hidden)}
        matrices["attn_output"] = hidden, hidden
        plain |= {"attn_q_norm": (head,), "attn_k_norm": (head,)}
    else:
        matrices = {"shortconv.in_proj": (3 * hidden, hidden), "shortconv.out_proj": (hidden, hidden)}
    tensors = [
        *(Tensor(f"{block}{name}.weight", shape, kind) for name, shape in matrices.items()),
        *(Tensor(f"{block}{name}.weight", shape, "f32") for name, shape in plain.items()),
    ]
    if "shortconv.in_proj" in matrices:
        tensors.append(Tensor(block + "shortconv.conv.weight", (hidden, config["conv_L_cache"]), "f32"))
    if layer < config["num_dense_layers"]:
        return tensors + _feed_forward(block, "", config["intermediate_size"], hidden, kind)
    tensors += _experts(block, config, inner, config["num_experts_per_tok"], kind)
    return [*tensors, Tensor(block + "exp_probs_b.bias", (config["num_experts"],), "f32")]


def _lfm2_values(config: Mapping[str, Any]) -> dict[str, int | float | list[int]]:
    keys = config["num_key_value_heads"]
    return {
        "attention.head_count_kv": [
            keys if each == "full_attention" else 0 for each in config["layer_types"]
        ],
        "rope.freq_base": float(config["rope_theta"]),
        "shortconv.l_cache": config["conv_L_cache"],
        "expert_used_count": config["num_experts_per_tok"],
        "expert_gating_func": 2,
        "leading_dense_block_count": config["num_dense_layers"],
    }


def _gemma4_layer(config: Mapping[str, Any], layer: int, inner: int, kind: str) -> list[Tensor]:
    """A layer with a dense feed-forward part beside its experts."""
    hidden, block, sizes = config["hidden_size"], f"blk.{layer}.", _gemma4_heads(config, layer)
    heads, keys, head = config["num_attention_heads"] * sizes[1], sizes[0] * sizes[1], sizes[1]
    full = config["layer_types"][layer] == "full_attention"
    matrices = {"attn_q": (heads, hidden), "attn_k": (keys, hidden), "attn_output": (hidden, heads)}
    if not (full and config["attention_k_eq_v"]):
        matrices["attn_v"] = keys, hidden
    norms = ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")
    more = ("pre_ffw_norm_2", "post_ffw_norm_1", "post_ffw_norm_2")
    plain = {**dict.fromkeys((*norms, *more), (hidden,)), "attn_q_norm": (head,), "attn_k_norm": (head,)}
    return [
        *(Tensor(f"{block}{name}.weight", shape, kind) for name, shape in matrices.items()),
        *(Tensor(f"{block}{name}.weight", shape, "f32") for name, shape in plain.items()),
        *_feed_forward(block, "", config["intermediate_size"], hidden, kind),
        *_experts(block, config, inner, config["top_k_experts"], kind),
        Tensor(block + "ffn_gate_inp.scale", (hidden,), "f32"),
        Tensor(block + "ffn_down_exps.scale", (config["num_experts"],), "f32"),
        Tensor(block + "layer_output_scale.weight", (1,), "f32"),
    ]


def _gemma4_heads(config: Mapping[str, Any], layer: int) -> tuple[int, int]:
    """Heads of keys, and elements of a head."""
    if config["layer_types"][layer] == "full_attention":
        return config["num_global_key_value_heads"], config["global_head_dim"]
    return config["num_key_value_heads"], config["head_dim"]


def _gemma4_values(config: Mapping[str, Any]) -> dict[str, int | float | list[int]]:
    kinds, layers = config["layer_types"], range(config["num_hidden_layers"])
    rotary = config["rope_parameters"]
    return {
        "attention.head_count_kv": [_gemma4_heads(config, layer)[0] for layer in layers],
        "attention.key_length": config["global_head_dim"],
        "attention.value_length": config["global_head_dim"],
        "attention.key_length_swa": config["head_dim"],
        "attention.value_length_swa": config["head_dim"],
        "attention.sliding_window": config["sliding_window"],
        "attention.sliding_window_pattern": [int(kind == "sliding_attention") for kind in kinds],
        "rope.freq_base": float(rotary["full_attention"]["rope_theta"]),
        "rope.freq_base_swa": float(rotary["sliding_attention"]["rope_theta"]),
        "rope.dimension_count": config["global_head_dim"],
        "rope.dimension_count_swa": config["head_dim"],
        "final_logit_softcapping": float(config["final_logit_softcapping"]),
        "expert_used_count": config["top_k_experts"],
        "embedding_length_per_layer_input": 0,
        "attention.shared_kv_layers": 0,
    }


def _fitting(kind: str, columns: int) -> str:
    """``kind``, or what llama.cpp's quantiser takes if rows are no whole number of its blocks."""
    return kind if columns % BLOCKS[kind][0] == 0 else "q5_0"


def _latent_attention(config: Mapping[str, Any], block: str, kind: str) -> list[Tensor]:
    """Latent attention of a layer of GLM-4.7-Flash, and the norm behind it."""
    hidden, heads, rank = config["hidden_size"], config["num_attention_heads"], config["kv_lora_rank"]
    plain, rotated, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    queries = config["q_lora_rank"]
    matrices = {
        "attn_q_a": (queries, hidden),
        "attn_q_b": (heads * (plain + rotated), queries),
        "attn_kv_a_mqa": (rank + rotated, hidden),
        "attn_k_b": (heads, rank, plain),
        "attn_v_b": (heads, value, rank),
        "attn_output": (hidden, heads * value),
    }
    norms = {"attn_q_a_norm": queries, "attn_kv_a_norm": rank, "ffn_norm": hidden}
    return [
        *(
            Tensor(f"{block}{name}.weight", shape, _fitting(kind, shape[-1]))
            for name, shape in matrices.items()
        ),
        *(Tensor(f"{block}{name}.weight", (size,), "f32") for name, size in norms.items()),
    ]


def _feed_forward(block: str, suffix: str, inner: int, hidden: int, kind: str) -> list[Tensor]:
    shapes = {"ffn_gate": (inner, hidden), "ffn_up": (inner, hidden), "ffn_down": (hidden, inner)}
    return [
        Tensor(f"{block}{name}{suffix}.weight", shape, _fitting(kind, shape[-1]))
        for name, shape in shapes.items()
    ]


def _latent_values(config: Mapping[str, Any]) -> dict[str, int | float | list[int]]:
    rank, rotated = config["kv_lora_rank"], config["qk_rope_head_dim"]
    return {
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count_kv": 1,
        "attention.q_lora_rank": config["q_lora_rank"],
        "attention.kv_lora_rank": rank,
        "attention.key_length": rank + rotated,
        "attention.value_length": rank,
        "attention.key_length_mla": config["qk_nope_head_dim"] + rotated,
        "attention.value_length_mla": config["v_head_dim"],
        "rope.dimension_count": rotated,
        "leading_dense_block_count": config["first_k_dense_replace"],
        "expert_shared_count": config["n_shared_experts"],
        "expert_gating_func": 2,
        "expert_weights_scale": float(config["routed_scaling_factor"]),
        "expert_weights_norm": config["norm_topk_prob"],
        "expert_group_count": config["n_group"],
        "expert_group_used_count": config["topk_group"],
    }


def _qwen35_layer(config: Mapping[str, Any], block: str, layer_type: str, kind: str) -> list[Tensor]:
    """Attention, or linear attention, and the shared expert of a layer of Qwen3.5-MoE."""
    hidden, head = config["hidden_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    values, v_dim = config["linear_num_value_heads"], config["linear_value_head_dim"]
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    channels, shared = 2 * keys + values * v_dim, config["shared_expert_intermediate_size"]
    if layer_type == "full_attention":
        # A gate lies behind each query.
        matrices = {"attn_q": (2 * heads, hidden), "attn_k": (kv_heads, hidden), "attn_v": (kv_heads, hidden)}
        matrices["attn_output"] = hidden, heads
        plain = {"attn_q_norm.weight": (head,), "attn_k_norm.weight": (head,)}
    else:
        matrices = {"attn_qkv": (channels, hidden), "attn_gate": (values * v_dim, hidden)}
        matrices |= {"ssm_beta": (values, hidden), "ssm_alpha": (values, hidden)}
        matrices["ssm_out"] = hidden, values * v_dim
        plain = {
            "ssm_conv1d.weight": (channels, config["linear_conv_kernel_dim"]),
            "ssm_norm.weight": (v_dim,),
        }
        plain |= {"ssm_dt.bias": (values,), "ssm_a": (values,)}
    matrices |= {"ffn_gate_shexp": (shared, hidden), "ffn_up_shexp": (shared, hidden)}
    matrices["ffn_down_shexp"] = hidden, shared
    plain |= {"post_attention_norm.weight": (hidden,), "ffn_gate_inp_shexp.weight": (hidden,)}
    return [
        *(Tensor(f"{block}{name}.weight", shape, kind) for name, shape in matrices.items()),
        *(Tensor(block + name, shape, "f32") for name, shape in plain.items()),
    ]


def _qwen35_values(config: Mapping[str, Any]) -> dict[str, int | float | list[int]]:
    rope, values = config["rope_parameters"], config["linear_num_value_heads"]
    return {
        "rope.dimension_count": int(config["head_dim"] * rope["partial_rotary_factor"]),
        "rope.dimension_sections": [*rope["mrope_section"], 0],
        "expert_shared_feed_forward_length": config["shared_expert_intermediate_size"],
        "ssm.conv_kernel": config["linear_conv_kernel_dim"],
        "ssm.state_size": config["linear_key_head_dim"],
        "ssm.group_count": config["linear_num_key_heads"],
        "ssm.time_step_rank": values,
        "ssm.inner_size": values * config["linear_value_head_dim"],
        "full_attention_interval": config["layer_types"].index("full_attention") + 1,
    }
