"""Every model type of transformers that has experts, with a tiny configuration made from its default one."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from moechat.models.refused_families import NOT_TRIED, REASONS

LAYERS = 4
# Largest values of text models by key; smaller defaults stay.
_TEXT = {
    **dict.fromkeys(("vocab_size", "unpadded_vocab_size"), 101),
    **dict.fromkeys(("max_position_embeddings",), 256),
    **dict.fromkeys(("hidden_size", "d_model"), 64),
    **dict.fromkeys(("intermediate_size", "prefix_dense_intermediate_size", "ffn_hidden_size"), 96),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size", "ffn_dim"), 48),
    **dict.fromkeys(
        (
            "shared_expert_intermediate_size",
            "moe_shared_expert_intermediate_size",
            "shared_intermediate_size",
            "moe_latent_size",
        ),
        32,
    ),
    **dict.fromkeys(("num_hidden_layers", "num_layers"), LAYERS),
    **dict.fromkeys(
        ("num_attention_heads", "mamba_num_heads", "linear_num_value_heads", "linear_num_heads"), 4
    ),
    **dict.fromkeys(("num_key_value_heads", "num_global_key_value_heads", "linear_num_key_heads"), 2),
    **dict.fromkeys(("head_dim", "v_head_dim", "qk_nope_head_dim", "index_head_dim", "kv_lora_rank"), 16),
    **dict.fromkeys(
        ("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim", "mamba_head_dim"), 16
    ),
    **dict.fromkeys(("mamba_d_head", "mamba_d_state", "ssm_state_size", "index_topk"), 16),
    **dict.fromkeys(("global_head_dim", "q_lora_rank"), 32),
    **dict.fromkeys(("qk_rope_head_dim", "mamba_n_heads", "sliding_window"), 8),
    **dict.fromkeys(
        ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
        8,
    ),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk", "moe_top_k", "top_k_experts"), 2),
    # With few heads many tokens have a score of exactly zero, and which of them are chosen is left to chance.
    **dict.fromkeys(("index_n_heads",), 16),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "num_dense_layers"), 1),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"), 1),
    **dict.fromkeys(("n_groups", "mamba_n_groups", "moe_layer_start_index", "eos_token_id"), 1),
    **dict.fromkeys(("bos_token_id", "pad_token_id"), 0),
}
# And of what turns pictures into hidden states, which is built only to be removed.
_PICTURES = {
    **dict.fromkeys(("hidden_size", "intermediate_size", "hidden_dim", "embed_dim", "image_size"), 32),
    **dict.fromkeys(("depth", "num_hidden_layers", "num_layers"), 1),
    **dict.fromkeys(("num_heads", "num_attention_heads"), 2),
    **dict.fromkeys(("out_hidden_size", "text_hidden_size"), 64),
    **dict.fromkeys(("num_position_embeddings",), 16),
}
_GEMMA_4 = {
    "enable_moe_block": True,
    "num_experts": 8,
    "top_k_experts": 2,
    "moe_intermediate_size": 48,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 101,
}
_QWEN_4 = {
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 16,
    "indexer_compress_ratio": 4,
}
# Values of a text model that rules cannot find.
OWN: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {
        "num_expert_group": 1,
        "topk_group": 1,
        "num_experts_per_token": 2,
    },
    "deepseek_v2": {"num_experts_per_tok": 2, "topk_method": "greedy"},
    "dots1": {
        "moe_intermediate_size": 48,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
    },
    "gemma4": _GEMMA_4,
    "gemma4_text": _GEMMA_4,
    "glm4v_moe": {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "mrope_section": [2, 1, 1],
            "partial_rotary_factor": 0.5,
        }
    },
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "hunyuan_v1_moe": {"head_dim": 16, "moe_topk": 2, "num_experts": 8},
    "hy_v4_vl": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "longcat_flash": {"head_dim": 8, "qk_head_dim": 24, "zero_expert_num": 2},
    "qwen4_exp": _QWEN_4,
    "qwen4_exp_text": _QWEN_4,
    "step3p7": {"sliding_window": 8},
}

# Model types that are refused, each with a part of what was found.
REFUSED = {
    "dbrx": "transformers cannot build a model of type 'dbrx'",
    "deepseek_ocr2": "transformers cannot build a model of type 'deepseek_ocr2'",
    "diffusion_gemma": "transformers cannot build a model of type 'diffusion_gemma'",
    "doge": "has no routed experts",
    "ernie4_5_vl_moe": "several expert modules in one decoder layer",
    "inkling2": "computes a gate that moechat does not have",
    "inkling2_loop": "computes a gate that moechat does not have",
    "inkling2_loop_text": "computes a gate that moechat does not have",
    "inkling2_text": "computes a gate that moechat does not have",
    "jetmoe": "computes its experts in JetMoe",
    "longcat_flash": "computes its experts in LongcatFlashExperts",
    "muse_spark": "normalises each expert's output",
}
# Why, for people.
WHY = {
    **REASONS,
    **dict.fromkeys(
        NOT_TRIED, "not tried: transformers does not build it from its own default configuration"
    ),
}
# Their part for pictures is too large to write in a test, or transformers does not load what it has written
# (aria_text): that for text is built, and its experts are found.
BUILT = (
    "aria_text",
    "dots3_note",
    "dots3_note_text",
    "inkling_mm_model",
    "qwen3_omni_moe_thinker",
    "unlimited_ocr",
)


def takes_pictures(name: str) -> bool:
    """Whether a model type also takes pictures or sound."""
    return isinstance(getattr(CONFIG_MAPPING[name](), "vision_config", None), PretrainedConfig)


def types_with_experts() -> list[str]:
    """Model types that write text and whose module has a class for experts or a mixture of them."""
    found = []
    for name in CONFIG_MAPPING:
        if not (
            name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or name in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
        ):
            continue
        directory = Path(inspect.getfile(CONFIG_MAPPING[name])).parent
        sources = list(directory.glob("modeling_*.py"))
        if not sources and name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:  # the model of another type computes it
            sources = [Path(inspect.getfile(MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[name]]))]
        for source in sources:
            if re.search(r"^class \w*(Experts|MoE|Moe|SparseMLP)\w*\(", source.read_text(), flags=re.M):
                found.append(name)
                break
    return sorted(found)


def tiny_family(name: str) -> Any:
    """A tiny configuration of a model type."""
    kind = CONFIG_MAPPING[name]
    values = kind().to_dict()
    if "text_config" in values and isinstance(values["text_config"], dict):
        text = _small_text(values["text_config"])
        others = {
            key: _small(value, _PICTURES)
            for key, value in values.items()
            if key != "text_config" and isinstance(value, dict) and key.endswith("_config")
        }
        rest = {key: value for key, value in _plain(values).items() if key not in ("text_config", *others)}
        return kind(**{**rest, **others, "text_config": {**text, **OWN.get(name, {})}})
    return kind(**{**_small_text(values), **OWN.get(name, {})})


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """Without what configurations derive themselves."""
    left_out = (
        "per_layer_config",
        "layers_block_type",
        "transformers_version",
        "architectures",
        "torch_dtype",
        "dtype",
    )
    return {
        key: value
        for key, value in values.items()
        if value is not None and key not in left_out and not key.startswith("_")
    }


def _small(values: dict[str, Any], most: dict[str, int]) -> dict[str, Any]:
    return {
        key: min(value, most[key]) if key in most and type(value) is int else value
        for key, value in _plain(values).items()
    }


def _small_text(values: dict[str, Any]) -> dict[str, Any]:
    layers = values.get("num_hidden_layers") or 0
    small = _small(values, _TEXT)
    if small.get("kv_lora_rank") and "num_attention_heads" in small:
        small["num_key_value_heads"] = small["num_attention_heads"]  # latents have no groups
    if values.get("head_dim") and values["head_dim"] == values.get("qk_rope_head_dim"):
        small["head_dim"] = small["qk_rope_head_dim"]
    kept = _kept_layers(small, layers)
    return {
        key: [value[place] for place in kept] if isinstance(value, list) and len(value) == layers else value
        for key, value in small.items()
    }


def _kept_layers(values: dict[str, Any], layers: int) -> list[int]:
    """Places of the layers that stay: the first of each kind, then the first ones."""
    kinds = list(
        zip(
            *(value for key, value in values.items() if isinstance(value, list) and len(value) == layers),
            strict=True,
        )
    )
    first = {repr(kind): place for place, kind in reversed(list(enumerate(kinds)))}
    wanted = dict.fromkeys([*sorted(first.values()), *range(layers)])
    return sorted(list(wanted)[:LAYERS])


def table() -> str:
    """What the manual says of every model type, as Markdown."""
    running = [name for name in types_with_experts() if name not in {*REFUSED, *BUILT}]
    pictures = [name for name in running if takes_pictures(name)]

    def names(chosen: Iterable[str]) -> str:
        return ", ".join(f"`{name}`" for name in chosen) + "."

    lines = [
        names(name for name in running if name not in pictures),
        "",
        f"The text part of these runs; pictures and sound are not taken: {names(pictures)}",
        "",
        f"These are built, but their logits were not compared: {names(BUILT)}",
        "",
        "| refused | because |",
        "|---|---|",
        *(f"| `{name}` | {reason} |" for name, reason in sorted(WHY.items())),
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
