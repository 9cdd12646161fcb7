"""Tiny checkpoints with a head for multi-token prediction, named as on the hub; and transformers' head."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from families import tiny_family
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, modeling_layers

# transformers has the heads of models since 5.24.
HAS_MTP = hasattr(modeling_layers, "MtpModel")
NO_MTP = pytest.mark.skipif(not HAS_MTP, reason="transformers is too old")
# Families by the layout of their checkpoints' heads.
QWEN = ("qwen3_next", "qwen3_5_moe_text")
DEEPSEEK = ("glm4_moe", "glm4_moe_lite", "deepseek_v3")
FAMILIES = (*QWEN, *DEEPSEEK)
_FUSED = ("qwen3_5_moe_text",)  # one tensor for gate and up of all experts
# Linear attention with fewer heads is not native.
NATIVE_HEADS = {"linear_num_key_heads": 8, "linear_num_value_heads": 16}
_QWEN_NAMES = {
    "enorm": "pre_fc_norm_embedding",
    "hnorm": "pre_fc_norm_hidden",
    "eh_proj": "fc",
    "post_norm": "norm",
}


def write_with_head(directory: Path, family: str, *, seed: int = 0, **changed: Any) -> tuple[Any, Any]:
    """Write a random model with a head; returns transformers' model and its ``MtpModel``.

    Args:
        directory: Of the checkpoint.
        family: One of :data:`FAMILIES`.
        seed: Of the weights.
        changed: Other values of the configuration, as far as the family has them.
    """
    config = tiny_family(family)
    for name, value in {**NATIVE_HEADS, **changed}.items():
        if hasattr(config, name):
            setattr(config, name, value)
    text = config.get_text_config()
    text.num_mtp_layers = 1
    if getattr(text, "layer_types", None) is not None:
        text.mtp_layer_types = ["full_attention"]
    if getattr(text, "mlp_layer_types", None) is not None:
        text.mtp_mlp_layer_types = ["sparse"]
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    head = modeling_layers.MtpModel(model, 1).eval()
    with torch.no_grad():
        for name, weight in [*model.named_parameters(), *head.layers.named_parameters()]:
            if "norm" not in name:
                weight.normal_(0, 0.15)
            elif weight.dim() == 1:
                weight.add_(0.2 * torch.randn_like(weight))
    model.save_pretrained(directory)
    tensors = load_file(directory / "model.safetensors")
    tensors.update(hub_names(head, family, text.num_hidden_layers))
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return model, head


def hub_names(head: Any, family: str, depth: int) -> dict[str, torch.Tensor]:
    """The weights of a head by their names on the hub."""
    found: dict[str, torch.Tensor] = {}
    for name, weight in head.layers.state_dict().items():
        rest = name.removeprefix("0.")
        part, _, kind = rest.rpartition(".")
        if rest.startswith("mtp_block."):
            inner = rest.removeprefix("mtp_block.")
            full = f"mtp.layers.0.{inner}" if family in QWEN else f"model.layers.{depth}.{inner}"
        elif family in QWEN:
            full = f"mtp.{_QWEN_NAMES[part]}.{kind}"
        else:
            full = f"model.layers.{depth}.{part.replace('post_norm', 'shared_head.norm')}.{kind}"
        for key, tensor in _split_experts(full, weight, fused=family in _FUSED):
            found[key] = tensor.clone().contiguous()
    return found


def _split_experts(name: str, weight: torch.Tensor, *, fused: bool) -> list[tuple[str, torch.Tensor]]:
    match = re.fullmatch(r"(.*experts)\.(gate_up_proj|down_proj)", name)
    if match is None or fused:
        return [(name, weight)]
    if match[2] == "down_proj":
        return [(f"{match[1]}.{expert}.down_proj.weight", each) for expert, each in enumerate(weight)]
    halves = [(f"{match[1]}.{expert}", *each.chunk(2)) for expert, each in enumerate(weight)]
    return [
        pair
        for where, gate, up in halves
        for pair in ((f"{where}.gate_proj.weight", gate), (f"{where}.up_proj.weight", up))
    ]
