"""Writes transformers models as GGUF files, as llama.cpp's converter does, with the gguf package's names."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.constants import GGMLQuantizationType as Kind
from gguf_encoders import encode
from numpy.typing import NDArray
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

ARCHITECTURES = {
    "mixtral": (gguf.MODEL_ARCH.LLAMA, "llama"),
    "qwen3_moe": (gguf.MODEL_ARCH.QWEN3MOE, "qwen3moe"),
    "olmoe": (gguf.MODEL_ARCH.OLMOE, "olmoe"),
}
_EXPERT = re.compile(r"(model\.layers\.\d+\.(?:mlp|block_sparse_moe)\.experts)\.(\d+)\.(\w+)\.weight")

Choose = Callable[[str, tuple[int, ...]], Kind]


def shape_of(family: str, **changes: Any) -> dict[str, Any]:
    """A small configuration whose rows are whole blocks of 256, as K-quants need them."""
    common: dict[str, Any] = {
        "vocab_size": 101,
        "hidden_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-6,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": None,
        "num_experts_per_tok": 2,
    }
    own: dict[str, dict[str, Any]] = {
        "mixtral": {"intermediate_size": 256, "num_local_experts": 4, "rope_theta": 1e6},
        "qwen3_moe": {
            "num_attention_heads": 8,
            "head_dim": 64,
            "intermediate_size": 512,
            "moe_intermediate_size": 256,
            "num_experts": 6,
            "norm_topk_prob": True,
            "rope_theta": 1e6,
        },
        "olmoe": {
            "num_key_value_heads": 4,  # llama.cpp supports no others
            "intermediate_size": 256,
            "num_experts": 6,
            "norm_topk_prob": False,
        },
    }
    return {**common, **own[family], **changes}


def save_model(family: str, directory: Path, **changes: Any) -> Any:
    """A random model in float32, saved by transformers; its configuration."""
    from transformers import AutoConfig

    torch.manual_seed(7)
    config = AutoConfig.for_model(family, **shape_of(family, **changes))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):  # ones hide an exchanged norm
                parameter.add_(torch.randn_like(parameter) * 0.1)
            elif parameter.dim() > 1:
                parameter.mul_(4)
    model.save_pretrained(directory)
    return config


def tensors_of(directory: Path) -> dict[str, NDArray[np.float32]]:
    """All tensors of a saved model."""
    found: dict[str, NDArray[np.float32]] = {}
    for file in sorted(directory.glob("*.safetensors")):
        found |= {name: tensor.float().numpy() for name, tensor in load_file(file).items()}
    return found


def write_gguf(
    family: str,
    config: Any,
    tensors: Mapping[str, NDArray[np.float32]],
    path: Path,
    choose: Choose,
    *,
    tokenizer: PreTrainedTokenizerFast | None = None,
    extra: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
    parts: int = 1,
    merged: bool = True,
) -> list[Path]:
    """Write a GGUF file; returns its parts.

    Args:
        family: transformers' name.
        config: Its configuration.
        tensors: By their names in a checkpoint.
        path: The file; in parts ``name-00001-of-00002.gguf`` stand beside it.
        choose: Type of a tensor, by its GGUF name and shape.
        tokenizer: A byte-level BPE tokenizer.
        extra: Adds metadata.
        parts: Number of files.
        merged: One tensor for all experts of a layer, else one each, as in files of early 2024.
    """
    arch, name = ARCHITECTURES[family]
    most = -(-_count(tensors, merged) // parts) if parts > 1 else 0
    writer = gguf.GGUFWriter(path, name, split_max_tensors=most)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_expert_count(getattr(config, "num_local_experts", None) or config.num_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    if family == "qwen3_moe":
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if family == "mixtral":
        writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
        writer.add_vocab_size(config.vocab_size)
    if tokenizer is not None:
        _add_tokenizer(writer, tokenizer)
    extra(writer)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    for key, values in _as_llama_cpp(family, config, tensors, merged).items():
        gguf_name = names.get_name(key, try_suffixes=(".weight",)) or key
        kind = choose(gguf_name, values.shape)
        writer.add_tensor(gguf_name, encode(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if parts == 1:
        return [path]
    return sorted(path.parent.glob(f"{path.stem}-0*.gguf"))


def _count(tensors: Mapping[str, Any], merged: bool) -> int:
    if not merged:
        return len(tensors)
    return len({(m[1], m[3]) if (m := _EXPERT.fullmatch(key)) else key for key in tensors})


def _as_llama_cpp(
    family: str, config: Any, tensors: Mapping[str, NDArray[np.float32]], merged: bool
) -> dict[str, NDArray[np.float32]]:
    """Experts of a layer in one tensor, and Llama's queries and keys with interleaved halves."""
    found: dict[str, NDArray[np.float32]] = {}
    experts: dict[str, dict[int, NDArray[np.float32]]] = {}
    for key, values in tensors.items():
        match = _EXPERT.fullmatch(key)
        if match and merged:
            experts.setdefault(f"{match[1]}.{match[3]}.weight", {})[int(match[2])] = values
            continue
        if match:
            part = {"w1": "gate", "w2": "down", "w3": "up"}.get(match[3], match[3].removesuffix("_proj"))
            layer = key.split(".")[2]
            found[f"blk.{layer}.ffn_{part}.{match[2]}.weight"] = values
            continue
        if family == "mixtral" and key.endswith(("q_proj.weight", "k_proj.weight")):
            heads = config.num_attention_heads if "q_proj" in key else config.num_key_value_heads
            halves = values.reshape(heads, 2, -1, values.shape[1])
            found[key] = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)
            continue
        found[key] = values
    for key, parts in experts.items():
        found[key] = np.stack([parts[number] for number in range(len(parts))])
    return found


def _add_tokenizer(writer: gguf.GGUFWriter, tokenizer: PreTrainedTokenizerFast) -> None:
    import json

    model = json.loads(tokenizer.backend_tokenizer.to_str())
    added = {entry["id"]: entry for entry in model["added_tokens"]}
    words = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("olmo")
    writer.add_token_list([word for word, _ in words])
    writer.add_token_types(
        [(3 if added[number]["special"] else 4) if number in added else 1 for _, number in words]
    )
    writer.add_token_merges([" ".join(merge) for merge in model["model"]["merges"]])
    writer.add_eos_token_id(tokenizer.eos_token_id)
    if tokenizer.chat_template:
        writer.add_chat_template(tokenizer.chat_template)
