"""Kernels that a GPU runs for the dense part of a decoded token, which plans count the time of.

Counted in recorded passes of small models (``tests/offload/device/test_layer_kernels.py`` compares them). A
family that is not here is taken for one whose layers torch computes, but for norms, rotary embedding and
routers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

# What keys and values make of a layer, where a configuration names no kinds.
_ATTENTION = "full_attention"


@dataclass(frozen=True)
class FamilyKernels:
    """Kernels of the decoder layers of a family.

    Attributes:
        attention: From the norm of the hidden states to their sum with what attention adds.
        experts: From the norm behind it to the next layer, without those of the routed experts.
        dense: The same of a layer without routed experts.
        others: In place of ``attention``, by the kind of a layer in transformers' configuration.
    """

    attention: int
    experts: int
    dense: int = 3
    others: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))

    def mixing(self, kind: str) -> int:
        """Kernels of a kind of layer before its feed-forward part."""
        return self.others.get(kind, self.attention)


PLAIN = FamilyKernels(attention=6, experts=3)
_SHARED = FamilyKernels(attention=6, experts=5)
_LATENT = FamilyKernels(attention=16, experts=6, dense=4)
# Also of layers that torch computes alone: kinds of layers with states that families have.
OTHER = FamilyKernels(
    attention=14, experts=9, dense=4, others={"linear_attention": 58, "mamba": 32, "conv": 9}
)
FAMILIES: Mapping[str, FamilyKernels] = {
    "qwen3_moe": PLAIN,
    "mixtral": PLAIN,
    "gpt_oss": PLAIN,
    "glm4_moe": _SHARED,
    "qwen2_moe": _SHARED,
    "qwen3_next": _SHARED,
    "qwen3_5_moe": _SHARED,
    "dots1": _SHARED,
    "glm4v_moe": _SHARED,
    "qwen3_vl_moe": PLAIN,
    "mellum": PLAIN,
    "aria": _SHARED,
    "solar_open": _SHARED,
    "glm4_moe_lite": _LATENT,
    "deepseek_v3": _LATENT,
    "deepseek_v2": FamilyKernels(attention=17, experts=6, dense=4),
    "olmoe": FamilyKernels(attention=12, experts=5, dense=4),
    "minimax_m2": FamilyKernels(attention=12, experts=10, dense=4),
    "laguna": FamilyKernels(attention=15, experts=6, dense=4),
    "gemma4": FamilyKernels(attention=27, experts=28),
    "ernie4_5_moe": FamilyKernels(attention=21, experts=14, dense=4),
    "hunyuan_v1_moe": FamilyKernels(attention=12, experts=11, dense=4),
    "lfm2_moe": FamilyKernels(attention=6, experts=12, dense=4, others={"conv": 9}),
    "kimi_linear": FamilyKernels(attention=12, experts=23, dense=4, others={"linear_attention": 58}),
    "jamba": FamilyKernels(attention=9, experts=5, dense=4, others={"linear_attention": 29}),
    "granitemoehybrid": FamilyKernels(attention=10, experts=11, others={"linear_attention": 33}),
    # A layer is one of its parts alone.
    "nemotron_h": FamilyKernels(
        attention=9, experts=10, dense=0, others={"linear_attention": 32, "mlp": 6, "moe": 0}
    ),
}


def family_kernels(model_type: str) -> FamilyKernels:
    """Of a family, by transformers' name of a model or of its part for text."""
    return FAMILIES.get(model_type.removesuffix("_text"), OTHER)


def layer_kernels(
    family: FamilyKernels, layers: int, expert_layers: Sequence[int], kinds: Sequence[str] = ()
) -> float:
    """Mean number for a layer with routed experts, layers without them included.

    Args:
        family: Of its layers.
        layers: Number of decoder layers.
        expert_layers: Those with routed experts.
        kinds: Of the layers, by transformers' names; empty: all are alike.
    """
    routed = set(expert_layers)
    total = sum(
        family.mixing(kinds[layer] if layer < len(kinds) else _ATTENTION)
        + (family.experts if layer in routed else family.dense)
        for layer in range(layers)
    )
    return total / len(routed)
