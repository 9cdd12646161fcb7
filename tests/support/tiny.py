"""Tiny random models of every supported family, in several shapes, as transformers itself writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedTokenizerFast,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

# Common to all: a vocabulary with an odd size, a context long enough for the tests, and no token that ends an
# answer.
_BASE: dict[str, Any] = {
    "vocab_size": 101,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
_SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
# Odd sizes: hidden and intermediate are no multiples of a block, a group or a vector.
_ODD: dict[str, Any] = {
    "hidden_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
}

SHAPES: dict[str, list[dict[str, Any]]] = {
    "mixtral": [
        {**_SMALL, "intermediate_size": 128, "num_local_experts": 4, "num_experts_per_tok": 2},
        {
            **_ODD,
            "intermediate_size": 100,
            "num_local_experts": 5,
            "num_experts_per_tok": 3,
            "tie_word_embeddings": True,
        },
    ],
    "qwen2_moe": [
        {
            **_SMALL,
            "intermediate_size": 96,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 80,
            "num_experts": 8,
            "num_experts_per_tok": 2,
        },
        {
            **_ODD,
            "intermediate_size": 100,
            "moe_intermediate_size": 36,
            "shared_expert_intermediate_size": 52,
            "num_experts": 6,
            "num_experts_per_tok": 4,
            "decoder_sparse_step": 2,
            "tie_word_embeddings": True,
        },
    ],
    "qwen3_moe": [
        {
            **_SMALL,
            "head_dim": 32,
            "intermediate_size": 96,
            "moe_intermediate_size": 128,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
        },
        {
            **_ODD,
            "head_dim": 16,
            "intermediate_size": 100,
            "moe_intermediate_size": 44,
            "num_experts": 7,
            "num_experts_per_tok": 3,
            "mlp_only_layers": [1],
            "tie_word_embeddings": True,
        },
    ],
    "olmoe": [
        {**_SMALL, "intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 4},
        {
            **_ODD,
            "num_key_value_heads": 6,
            "intermediate_size": 60,
            "num_experts": 5,
            "num_experts_per_tok": 2,
        },
    ],
    "flex_olmo": [
        {**_SMALL, "intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2},
        {
            **_ODD,
            "intermediate_size": 100,
            "num_experts": 7,
            "num_experts_per_tok": 5,
            "tie_word_embeddings": True,
        },
    ],
    "phimoe": [
        {**_SMALL, "intermediate_size": 96, "num_local_experts": 4, "num_experts_per_tok": 2},
        {
            **_ODD,
            "intermediate_size": 100,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "attention_bias": True,
            "lm_head_bias": True,
        },
    ],
    "deepseek_v2": [
        {
            **_SMALL,
            "num_key_value_heads": 4,
            "intermediate_size": 96,
            "moe_intermediate_size": 64,
            "n_routed_experts": 8,
            "n_shared_experts": 2,
            "num_experts_per_tok": 3,
            "first_k_dense_replace": 1,
            "q_lora_rank": None,
            "kv_lora_rank": 24,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 16,
            "topk_method": "greedy",
        },
        {
            **_ODD,
            "num_key_value_heads": 6,
            "intermediate_size": 100,
            "moe_intermediate_size": 36,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "num_experts_per_tok": 4,
            "first_k_dense_replace": 1,
            "q_lora_rank": 20,
            "kv_lora_rank": 24,
            "qk_nope_head_dim": 12,
            "qk_rope_head_dim": 8,
            "v_head_dim": 12,
            "n_group": 4,
            "topk_group": 2,
            "topk_method": "group_limited_greedy",
            "routed_scaling_factor": 1.7,
        },
    ],
    "deepseek_v3": [
        {
            **_SMALL,
            "num_key_value_heads": 4,
            "intermediate_size": 96,
            "moe_intermediate_size": 64,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "num_experts_per_tok": 3,
            "first_k_dense_replace": 1,
            "q_lora_rank": 24,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 16,
            "n_group": 2,
            "topk_group": 1,
        },
        {
            **_ODD,
            "num_key_value_heads": 6,
            "intermediate_size": 100,
            "moe_intermediate_size": 52,
            "n_routed_experts": 6,
            "n_shared_experts": 2,
            "num_experts_per_tok": 2,
            "first_k_dense_replace": 2,
            "q_lora_rank": None,
            "kv_lora_rank": 20,
            "qk_nope_head_dim": 12,
            "qk_rope_head_dim": 8,
            "v_head_dim": 12,
            "n_group": 3,
            "topk_group": 2,
        },
    ],
    "glm4_moe": [
        {
            **_SMALL,
            "intermediate_size": 96,
            "moe_intermediate_size": 64,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "first_k_dense_replace": 1,
            "head_dim": 16,
        },
        {
            **_ODD,
            "intermediate_size": 100,
            "moe_intermediate_size": 36,
            "n_routed_experts": 6,
            "n_shared_experts": 2,
            "num_experts_per_tok": 3,
            "first_k_dense_replace": 1,
            "head_dim": 24,
            "use_qk_norm": True,
            "attention_bias": True,
        },
    ],
    "ernie4_5_moe": [
        {
            **_SMALL,
            "intermediate_size": 96,
            "moe_intermediate_size": 64,
            "moe_num_experts": 8,
            "moe_num_shared_experts": 2,
            "moe_k": 2,
            "moe_layer_start_index": 1,
        },
        {
            **_ODD,
            "intermediate_size": 100,
            "moe_intermediate_size": 36,
            "moe_num_experts": 6,
            "moe_num_shared_experts": 1,
            "moe_k": 3,
            "moe_layer_start_index": 0,
            "tie_word_embeddings": True,
        },
    ],
    "granitemoe": [
        {
            **_SMALL,
            "intermediate_size": 64,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "embedding_multiplier": 3.0,
            "logits_scaling": 2.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.2,
        },
        {
            **_ODD,
            "intermediate_size": 100,
            "num_local_experts": 5,
            "num_experts_per_tok": 3,
            "tie_word_embeddings": True,
        },
    ],
    "dots1": [
        {
            **_SMALL,
            "intermediate_size": 96,
            "moe_intermediate_size": 64,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
        },
        {
            **_ODD,
            "intermediate_size": 100,
            "moe_intermediate_size": 36,
            "n_routed_experts": 6,
            "n_shared_experts": 2,
            "num_experts_per_tok": 3,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
        },
    ],
    "hunyuan_v1_moe": [
        {**_SMALL, "intermediate_size": 64, "num_experts": 4, "moe_topk": 2, "head_dim": 16},
        {
            **_ODD,
            "intermediate_size": 100,
            "num_experts": 6,
            "moe_topk": 3,
            "head_dim": 12,
            "tie_word_embeddings": True,
        },
    ],
    "lfm2_moe": [
        {
            **_SMALL,
            "num_hidden_layers": 4,
            "intermediate_size": 96,
            "moe_intermediate_size": 64,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "num_dense_layers": 1,
            "layer_types": ["conv", "full_attention", "conv", "full_attention"],
        },
        {
            **_ODD,
            "intermediate_size": 100,
            "moe_intermediate_size": 36,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "num_dense_layers": 1,
            "layer_types": ["conv", "conv", "full_attention"],
        },
    ],
    "minimax": [
        {
            **_SMALL,
            "intermediate_size": 64,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "head_dim": 16,
            "layer_types": ["full_attention", "linear_attention"],
            "block_size": 16,
        },
        {
            **_ODD,
            "intermediate_size": 100,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "head_dim": 12,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "block_size": 16,
        },
    ],
    "gpt_oss": [
        {
            **_SMALL,
            "intermediate_size": 64,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "head_dim": 16,
            "sliding_window": 8,
        },
        {
            **_ODD,
            "intermediate_size": 100,
            "num_local_experts": 6,
            "num_experts_per_tok": 4,
            "head_dim": 12,
            "sliding_window": 5,
        },
    ],
}

# Families without code in moechat: it suffices that transformers decorates their experts.
_SPARSE = {
    **_SMALL,
    "head_dim": 16,
    "intermediate_size": 96,
    "moe_intermediate_size": 48,
    "num_experts_per_tok": 2,
}
UNLISTED: dict[str, dict[str, Any]] = {
    "afmoe": {
        **_SPARSE,
        "num_experts": 6,
        "num_shared_experts": 1,
        "num_dense_layers": 1,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "cohere2_moe": {
        **_SPARSE,
        "num_experts": 6,
        "first_k_dense_replace": 1,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "minimax_m2": {
        **_SMALL,
        "head_dim": 16,
        "intermediate_size": 96,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
    },
    "qwen3_next": {
        **_SPARSE,
        "num_experts": 6,
        "shared_expert_intermediate_size": 32,
        "layer_types": ["linear_attention", "full_attention"],
    },
}

CASES = [(family, index) for family, shapes in SHAPES.items() for index in range(len(shapes))]


def tiny_config(family: str, shape: int = 0, **changes: Any) -> Any:
    """Configuration of one tiny model."""
    sizes = UNLISTED[family] if family in UNLISTED else SHAPES[family][shape]
    return AutoConfig.for_model(family, **{**_BASE, **sizes, **changes})


def auto_class(config: Any) -> Any:
    """The class of transformers that makes a model that writes text: of text alone if there is one."""
    text = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    return AutoModelForCausalLM if text else AutoModelForImageTextToText


def write_tiny_checkpoint(
    directory: Path, config: Any, *, seed: int = 0, dtype: torch.dtype = torch.bfloat16, **save: Any
) -> None:
    """Write a random model of ``config`` as ``save_pretrained`` does.

    The weights are large enough for every expert to matter, and everything that transformers initialises to
    zero or one (biases, norms, score corrections, sinks) is made random as well, so that nothing lost in
    loading goes unseen.
    """
    torch.manual_seed(seed)
    config = type(config).from_dict(config.to_dict())
    model = auto_class(config).from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, tensor in list(model.named_parameters()) + list(model.named_buffers()):
            if name not in model.state_dict() or not tensor.is_floating_point():
                continue
            noise = torch.randn(tensor.shape, generator=generator)
            if tensor.ndim == 1 and "norm" in name:
                tensor.copy_(1 + 0.2 * noise)
            elif "correction_bias" in name or "expert_bias" in name:
                tensor.copy_(0.3 * noise)
            else:
                tensor.copy_(noise * (0.6 / max(tensor.shape[-1], 8) ** 0.5 if tensor.ndim > 1 else 0.2))
    model.to(dtype).save_pretrained(directory, **save)


CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL_TOKENS = ["<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
BYTE_VOCABULARY = 256 + len(SPECIAL_TOKENS)


def write_byte_tokenizer(
    directory: Path, *, chat_template: str | None = CHAT_TEMPLATE, longest: int | None = None
) -> None:
    """Write a tokenizer with one token a byte and four special tokens; ``<|end|>`` ends an answer.

    Args:
        longest: It reads so many characters of a text and drops the others: a conversion is calibrated by
            a short text and takes a tenth of the time.
    """
    core = Tokenizer(
        models.BPE(vocab={c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, merges=[])
    )
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    if longest is not None:
        core.normalizer = normalizers.Replace(Regex(rf"\A[\s\S]{{{longest}}}\K[\s\S]+"), "")
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(SPECIAL_TOKENS)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|end|>")
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(directory)


def write_tiny_chat_model(directory: Path, family: str = "qwen3_moe", **changes: Any) -> None:
    """Write a tiny random model with a byte tokenizer, ready for ``moechat run``."""
    config = tiny_config(family, 0, **{"vocab_size": BYTE_VOCABULARY, **changes})
    write_tiny_checkpoint(directory, config)
    write_byte_tokenizer(directory)
