"""Nemotron-H: layers of Mamba 2, of attention without positions, and of experts without gates."""

from __future__ import annotations

from moechat.models.gguf_families.architecture import Architecture, Config, Place, Places
from moechat.models.gguf_metadata import Metadata
from moechat.store.gguf_changes import LogOfNegative, Reshape

_MODEL: Places = {
    "token_embd.weight": "model.embeddings.weight",
    "output_norm.weight": "model.norm_f.weight",
    "output.weight": "lm_head.weight",
}
_EPSILON = "attention.layer_norm_epsilon"  # also of norms by root mean squares


def _config(metadata: Metadata) -> Config:
    tensors, blocks = metadata.header.tensors, metadata.size("block_count")
    keys = metadata.counts("attention.head_count_kv", blocks)
    neurons = metadata.counts("feed_forward_length", blocks)
    groups = metadata.count("expert_group_count", 0) or 1
    heads = metadata.size("ssm.time_step_rank")
    kinds = []
    for layer in range(blocks - metadata.count("nextn_predict_layers", 0)):
        if keys[layer]:
            kinds.append("full_attention")
        elif neurons[layer]:
            routed = f"blk.{layer}.ffn_gate_inp.weight" in tensors
            kinds.append("moe" if routed else "mlp")
        else:
            kinds.append("linear_attention")
    return {
        "model_type": "nemotron_h",
        "architectures": ["NemotronHForCausalLM"],
        "layers_block_type": kinds,
        "layer_norm_epsilon": metadata.number(_EPSILON),
        "num_attention_heads": metadata.size("attention.head_count"),
        "num_key_value_heads": max(keys) or metadata.size("attention.head_count"),
        "head_dim": metadata.size("attention.key_length"),
        "intermediate_size": max(neurons) or metadata.size("expert_feed_forward_length"),
        "mlp_hidden_act": "relu2",
        "mamba_num_heads": heads,
        "mamba_head_dim": metadata.size("ssm.inner_size") // heads,
        "ssm_state_size": metadata.size("ssm.state_size"),
        "n_groups": metadata.size("ssm.group_count"),
        "conv_kernel": metadata.size("ssm.conv_kernel"),
        "use_conv_bias": any(name.endswith(".ssm_conv1d.bias") for name in tensors),
        "n_routed_experts": metadata.size("expert_count"),
        "n_shared_experts": metadata.size("expert_shared_count", 1),
        "moe_intermediate_size": metadata.size("expert_feed_forward_length"),
        "moe_shared_expert_intermediate_size": metadata.size("expert_shared_feed_forward_length"),
        "moe_latent_size": metadata.count("moe_latent_size", 0) or None,
        "n_group": groups,
        "topk_group": metadata.count("expert_group_used_count", 0) or groups,
        "norm_topk_prob": metadata.flag("expert_weights_norm"),
        "routed_scaling_factor": float(metadata.number("expert_weights_scale", 1.0)),
    }


def _layer(config: Config) -> Places:
    heads, groups = config["mamba_num_heads"], config["n_groups"]
    inner = heads * config["mamba_head_dim"]
    channels = inner + 2 * groups * config["ssm_state_size"]
    kernel = Reshape((channels, 1, config["conv_kernel"]))
    return {
        "attn_norm.weight": "norm.weight",
        "attn_q.weight": "mixer.q_proj.weight",
        "attn_k.weight": "mixer.k_proj.weight",
        "attn_v.weight": "mixer.v_proj.weight",
        "attn_output.weight": "mixer.o_proj.weight",
        "ssm_in.weight": "mixer.in_proj.weight",
        "ssm_conv1d.weight": Place("mixer.conv1d.weight", (kernel,)),
        "ssm_conv1d.bias": "mixer.conv1d.bias",
        "ssm_dt.bias": "mixer.dt_bias",
        "ssm_a": Place("mixer.A_log", (LogOfNegative(), Reshape((heads,)))),
        "ssm_d": Place("mixer.D", (Reshape((heads,)),)),
        "ssm_norm.weight": Place("mixer.norm.weight", (Reshape((inner,)),)),
        "ssm_out.weight": "mixer.out_proj.weight",
        "ffn_up.weight": "mixer.up_proj.weight",
        "ffn_down.weight": "mixer.down_proj.weight",
        "ffn_gate_inp.weight": "mixer.gate.weight",
        "exp_probs_b.bias": "mixer.gate.e_score_correction_bias",
        "ffn_latent_down.weight": "mixer.fc1_latent_proj.weight",
        "ffn_latent_up.weight": "mixer.fc2_latent_proj.weight",
        "ffn_up_shexp.weight": "mixer.shared_experts.up_proj.weight",
        "ffn_down_shexp.weight": "mixer.shared_experts.down_proj.weight",
    }


ARCHITECTURES = {"nemotron_h_moe": Architecture(_config, _layer, _MODEL, epsilon=_EPSILON)}
