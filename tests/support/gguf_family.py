"""A tiny random model of one of llama.cpp's architectures, and its tensors and metadata in a GGUF file.

Modules with names and metadata of families follow llama.cpp's converter, not moechat's reader.
``scripts/bench/gguf_parity`` compares llama.cpp's own logits of these files with both.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tiny import auto_class
from transformers import AutoConfig

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
        joined: Names of a layer's tensors whose rows the file has in one, by its name.
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
    joined: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

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
    model = auto_class(config).from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            noise = torch.randn(tensor.shape, generator=generator)
            if not tensor.is_floating_point():  # for each word the experts that it takes
                experts = torch.rand(len(tensor), config.n_routed_experts, generator=generator)
                tensor.copy_(experts.topk(tensor.shape[1]).indices)
                continue
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
    for layer in range(model.config.num_hidden_layers):
        for name, parts in family.joined.items():
            values = [found.pop(f"blk.{layer}.{part}") for part in parts]
            found[f"blk.{layer}.{name}"] = np.concatenate(values)
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
        "attention.head_count_kv": (None if family.architecture == "gemma4" else config.num_key_value_heads),
        "attention.layer_norm_rms_epsilon": getattr(config, "rms_norm_eps", None),
        "expert_used_count": getattr(config, "num_experts_per_tok", None),
    }
    if "rope_theta" in rope:
        common["rope.freq_base"] = float(rope["rope_theta"])
    return {**common, **family.metadata(config)}
