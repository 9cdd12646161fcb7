"""DeepSeek-V2 and V3 and the models built like them: GLM-4.7-Flash, Kimi-K2, Mistral Large 3 and Small 4."""

from __future__ import annotations

from moechat.errors import UnsupportedModelError
from moechat.models.gguf_families.architecture import (
    DENSE_MLP,
    NORMS,
    ROUTER,
    SIGMOID,
    SOFTMAX,
    Architecture,
    Config,
    Places,
    require,
    shared_experts,
)
from moechat.models.gguf_families.glm import sigmoid_routing
from moechat.models.gguf_families.positions import rotary
from moechat.models.gguf_metadata import Metadata

# GLM-4.7-Flash, whose early files do not state how its router scores.
_GLM_FLASH_BLOCKS, _GLM_FLASH_WORDS = (47, 48), 154880
# Growth of queries with the logarithm of positions in all of Mistral's models; most files do not state it.
_QUERY_SCALE = 0.1


def latent_attention(metadata: Metadata) -> Config:
    """Sizes of attention whose keys and values are made of a short latent vector.

    Raises:
        CheckpointError: A value is missing or malformed.
    """
    heads = metadata.size("attention.head_count")
    rotated = metadata.size("rope.dimension_count")
    # Files without the first keys hold the matrix for keys and values of all heads in one.
    keys = metadata.size("attention.key_length_mla", metadata.get("attention.key_length"))
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "q_lora_rank": metadata.count("attention.q_lora_rank", 0) or None,
        "kv_lora_rank": metadata.size("attention.kv_lora_rank"),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": keys - rotated,
        "v_head_dim": metadata.size("attention.value_length_mla", metadata.get("attention.value_length")),
        "attention_bias": False,
    }


def _mistral4(metadata: Metadata) -> Config:
    require(
        metadata,
        {
            "expert_gating_func": (None, 0, SOFTMAX),
            "expert_weights_norm": (True,),
            "rope.scaling.type": ("yarn",),
        },
    )
    rotary_parameters = rotary(metadata, log_multiplier=True)
    length = rotary_parameters["original_max_position_embeddings"]
    require(metadata, {"attention.temperature_length": (None, 0, length)})
    return {
        "model_type": "mistral4",
        "architectures": ["Mistral4ForCausalLM"],
        **latent_attention(metadata),
        **sigmoid_routing(metadata),  # of the same metadata; scores are softmax
        "rope_parameters": rotary_parameters
        | {"llama_4_scaling_beta": float(metadata.number("attention.temperature_scale", _QUERY_SCALE))},
        "rope_interleave": True,
        "first_k_dense_replace": metadata.count("leading_dense_block_count", 0),
    }


def _config(metadata: Metadata) -> Config:
    if metadata.get("attention.temperature_scale"):  # Mistral Large 3
        return _mistral4(metadata)
    yarn = metadata.get("rope.scaling.type") == "yarn"
    config = {
        **latent_attention(metadata),
        **sigmoid_routing(metadata),
        "rope_parameters": rotary(metadata, log_multiplier=yarn),
        "first_k_dense_replace": metadata.count("leading_dense_block_count", 0),
    }
    if _scoring(metadata) == SIGMOID:
        return config | {
            "model_type": "deepseek_v3",
            "architectures": ["DeepseekV3ForCausalLM"],
            "rope_interleave": True,
            "num_nextn_predict_layers": 0,
        }
    if config["norm_topk_prob"]:
        raise metadata.refused("expert_weights_norm")
    if config["n_group"] > 1:
        # llama.cpp ranks groups by their two best experts; DeepSeek-V2 by the best.
        config["topk_method"] = "group_limited_greedy"
    return config | {
        "model_type": "deepseek_v2",
        "architectures": ["DeepseekV2ForCausalLM"],
        "topk_method": config.get("topk_method", "greedy"),
        "head_dim": config["qk_rope_head_dim"],
    }


def _scoring(metadata: Metadata) -> int:
    """How the router scores experts: ``SOFTMAX`` or ``SIGMOID``."""
    stated = metadata.get("expert_gating_func")
    if stated in (SOFTMAX, SIGMOID):
        return int(stated)
    if stated not in (None, 0):
        raise UnsupportedModelError(
            f"{metadata.where}: expert_gating_func is {stated!r}, which moechat does not compute"
        )
    words = metadata.header.tensors["token_embd.weight"].shape[0]
    flash = words == _GLM_FLASH_WORDS and metadata.size("block_count") in _GLM_FLASH_BLOCKS
    return SIGMOID if flash else SOFTMAX


def latent_places() -> Places:
    """Places of attention with latent vectors."""
    return {
        "attn_q.weight": "self_attn.q_proj.weight",
        "attn_q_a.weight": "self_attn.q_a_proj.weight",
        "attn_q_a_norm.weight": "self_attn.q_a_layernorm.weight",
        "attn_q_b.weight": "self_attn.q_b_proj.weight",
        "attn_kv_a_mqa.weight": "self_attn.kv_a_proj_with_mqa.weight",
        "attn_kv_a_norm.weight": "self_attn.kv_a_layernorm.weight",
        # moechat.models.joined_weights makes kv_b_proj of the first two; early files hold it as it is.
        "attn_k_b.weight": "self_attn.k_b_proj.weight",
        "attn_v_b.weight": "self_attn.v_b_proj.weight",
        "attn_kv_b.weight": "self_attn.kv_b_proj.weight",
        "attn_output.weight": "self_attn.o_proj.weight",
    }


def latent_layer() -> Places:
    """Places of a layer with latent vectors, dense or with experts, routed as in DeepSeek-V3."""
    return {
        **NORMS,
        **latent_places(),
        **DENSE_MLP,
        **ROUTER,
        "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
        **shared_experts("shared_experts"),
    }


ARCHITECTURES = {
    "deepseek2": Architecture(_config, lambda config: latent_layer()),
    "mistral4": Architecture(_mistral4, lambda config: latent_layer()),
}
