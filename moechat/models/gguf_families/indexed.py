"""DeepSeek-V3.2 and GLM-5: attention with latent vectors, to the tokens that an indexer chooses."""

from __future__ import annotations

from moechat.models.gguf_families.architecture import SIGMOID, Architecture, Config, Places, require
from moechat.models.gguf_families.deepseek import latent_attention, latent_layer
from moechat.models.gguf_families.glm import sigmoid_routing
from moechat.models.gguf_families.positions import rotary
from moechat.models.gguf_metadata import Metadata

# GLM-5.2, whose first files do not state which layers have an indexer: those up to layer 2, and every fourth.
_LONG_CONTEXT, _FULL, _PERIOD = 1 << 20, 2, 4


def _config(metadata: Metadata) -> Config:
    require(
        metadata,
        {
            "expert_gating_func": (None, 0, SIGMOID),
            "attention.temperature_scale": (None, 0),
            "rope.dimension_sections": (None,),
        },
    )
    yarn = metadata.get("rope.scaling.type") == "yarn"
    return {
        **latent_attention(metadata),
        **sigmoid_routing(metadata),
        "rope_parameters": rotary(metadata, log_multiplier=yarn),
        "first_k_dense_replace": metadata.count("leading_dense_block_count", 0),
        "index_n_heads": metadata.size("attention.indexer.head_count"),
        "index_head_dim": metadata.size("attention.indexer.key_length"),
        "index_topk": metadata.size("attention.indexer.top_k"),
    }


def _deepseek_v32(metadata: Metadata) -> Config:
    return _config(metadata) | {"model_type": "deepseek_v32", "architectures": ["DeepseekV32ForCausalLM"]}


def _glm_dsa(metadata: Metadata) -> Config:
    layers = metadata.size("block_count") - metadata.count("nextn_predict_layers", 0)
    full = metadata.flags("attention.indexer.types", layers)
    if full is None:
        shared = metadata.size("context_length") >= _LONG_CONTEXT
        full = tuple(
            not shared or layer <= _FULL or (layer - _FULL) % _PERIOD == 0 for layer in range(layers)
        )
    return _config(metadata) | {
        "model_type": "glm_moe_dsa",
        "architectures": ["GlmMoeDsaForCausalLM"],
        "indexer_types": ["full" if each else "shared" for each in full],
    }


def _layer(config: Config) -> Places:
    indexer = "self_attn.indexer"
    return {
        **latent_layer(),
        "indexer.k_norm.weight": f"{indexer}.k_norm.weight",
        "indexer.k_norm.bias": f"{indexer}.k_norm.bias",
        "indexer.proj.weight": f"{indexer}.weights_proj.weight",
        "indexer.attn_k.weight": f"{indexer}.wk.weight",
        "indexer.attn_q_b.weight": f"{indexer}.wq_b.weight",
    }


ARCHITECTURES = {
    "deepseek32": Architecture(_deepseek_v32, _layer),
    "glm-dsa": Architecture(_glm_dsa, _layer),
}
