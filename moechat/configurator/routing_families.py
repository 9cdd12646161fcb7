"""Routing of model families: what the default statistics rest on, and how far they may be from a model.

Every number has its source. Routing was recorded token by token of two models only. For every other one the
parameters are published figures of few models or estimates, so :func:`family_bounds` gives a range.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

Origin = Literal["fitted", "published", "estimate"]

# How many times more or less skewed than its default a model may route, if its routing was not recorded.
# Three models are known: gpt-oss-20b (3.55) and DeepSeek-V2-Lite (2.3) by recordings, Qwen1.5-MoE (1.1) by
# published hit rates. 1.8 is the square root of 3.55 / 1.1, so a family in the middle of them has a range
# that covers all three. Between texts of one model the spread is smaller. Under `blend`, fits to eight parts
# of gpt-oss-20b's recording give 4.2 to 4.6; those to four domains of DeepSeek-V2-Lite's 2.5, 2.9, 2.9 and
# 4.3, which is 1.3 times more or less. A quarter of a layer's experts serves 66 to 69 % and 50 to 66 % of
# these activations, half of them 90 to 91 % and 75 to 87 %.
SKEW_SPREAD = 1.8
# The same for the accuracy of predictions: the difference of the two published ones (0.80 and 0.88).
ACCURACY_SPREAD = 0.08
# No published accuracy of a model, mean of its layers, is higher.
_MOST_ACCURATE = 0.94


@dataclass(frozen=True)
class RecordedModel:
    """A model whose routing was recorded token by token.

    Attributes:
        name: Its name, for people.
        layers: Layers with routed experts.
        experts: Experts of a layer.
        top_k: Experts of a token.
        tokens: Tokens that the defaults were fitted to.
    """

    name: str
    layers: int
    experts: int
    top_k: int
    tokens: int


@dataclass(frozen=True)
class Family:
    """Routing of a family, in the middle of the model.

    Attributes:
        skew: a in ``H(C) = (1 − exp(−a·C/N)) / (1 − exp(−a))`` under ``lcp``; 0 is random routing.
        accuracy: Share of the activated experts in the top K of the next layer's router.
        origin: Origin of ``skew``, then of ``accuracy``.
        source: Source of the data.
        trace: The model whose recorded routing the skew was fitted to; ``None`` if there is no recording.
    """

    skew: float
    accuracy: float
    origin: tuple[Origin, Origin]
    source: str
    trace: RecordedModel | None = None


_NO_PREDICTIONS = "accuracy: between the published ones of Mixtral and Qwen1.5-MoE"
_GENERIC = Family(2.0, 0.8, ("estimate", "estimate"), "middle of the families below")

# Largest error of H(C) of the fits, mean of the layers, over all C: gpt-oss 0.025, DeepSeek-V2-Lite 0.019,
# Qwen1.5-MoE 0.008.
FAMILIES: Mapping[str, Family] = {
    "gpt_oss": Family(
        3.55,
        0.8,
        ("fitted", "estimate"),
        "12,000 decoded tokens of gpt-oss-20b (AmanPriyanshu/GPT-OSS-MoE-ExpertFingerprinting); "
        + _NO_PREDICTIONS,
        RecordedModel("gpt-oss-20b", layers=24, experts=32, top_k=4, tokens=12_000),
    ),
    "deepseek_v2": Family(
        2.3,
        0.78,
        ("fitted", "estimate"),
        "12,000 tokens of DeepSeek-V2-Lite (deepseek-ai/ESFT, expert_scores); " + _NO_PREDICTIONS,
        RecordedModel("DeepSeek-V2-Lite", layers=26, experts=64, top_k=6, tokens=12_000),
    ),
    "qwen2_moe": Family(
        1.1,
        0.8,
        ("published", "published"),
        "Qwen1.5-MoE on MMLU: hit rates of LCP by cache size, MoEpic, table 1; accuracy: MoEpic, figure 2c "
        "(2.07 to 3.39 of 4 by layer)",
    ),
    "mixtral": Family(
        0.9,
        0.88,
        ("estimate", "published"),
        "popularity of experts in layers 0, 7, 15 over six domains (allenai/OLMoE, routing_output: a quarter "
        "of the experts serves 26 to 31 %), and more for repeated experts (Jiang et al., 2024, section 5); "
        "accuracy: AdapMoE's published table by layer (0.57, 0.72, 0.79, then 0.80 to 0.94)",
    ),
    "olmoe": Family(
        2.6,
        0.8,
        ("estimate", "estimate"),
        "popularity of experts in layers 0, 7, 15 (allenai/OLMoE, routing_output: a quarter of the experts "
        "serves 34 to 76 % within a domain, 36 to 45 % over all), and a third more for repeated experts, as "
        "with gpt-oss and DeepSeek; " + _NO_PREDICTIONS,
    ),
    "qwen3_moe": Family(2.6, 0.8, ("estimate", "estimate"), "as OLMoE: many small experts, no shared one"),
    "deepseek_v3": Family(
        1.8, 0.78, ("estimate", "estimate"), "as DeepSeek-V2-Lite, less for balancing by a bias"
    ),
    "phimoe": Family(1.4, 0.85, ("estimate", "estimate"), "between Mixtral and the generic family"),
}
_ALIKE = {
    "deepseek": "deepseek_v2",
    "kimi_k2": "deepseek_v3",
    "glm4_moe": "deepseek_v3",
    "qwen3_next": "qwen3_moe",
    "qwen3_5_moe": "qwen3_moe",
    "qwen3_5_moe_text": "qwen3_moe",
    "glm4_moe_lite": "deepseek_v3",
    "grinmoe": "phimoe",
}


def family_of(model_type: str) -> Family:
    """Parameters of a transformers ``model_type``; those of the generic family if it is unknown."""
    return FAMILIES.get(_ALIKE.get(model_type, model_type), _GENERIC)


def recorded_model(model_type: str, layers: int, experts: int, top_k: int) -> RecordedModel | None:
    """The model of this type and shape whose recorded routing the defaults were fitted to; ``None`` if there
    is none. A larger model of the same family is another model.
    """
    family = FAMILIES.get(model_type)
    found = None if family is None else family.trace
    return (
        found
        if found is not None and (found.layers, found.experts, found.top_k) == (layers, experts, top_k)
        else None
    )


def recorded_names() -> list[str]:
    """Names of all models whose routing was recorded, for people."""
    return [family.trace.name for family in FAMILIES.values() if family.trace is not None]


def family_bounds(model_type: str) -> tuple[Family, Family]:
    """The family as it is if its routing is hardest to predict and least skewed, and the opposite: the range
    for models whose routing was not recorded. See :data:`SKEW_SPREAD` and :data:`ACCURACY_SPREAD`.
    """
    family = family_of(model_type)
    low = replace(
        family, skew=family.skew / SKEW_SPREAD, accuracy=max(0.0, family.accuracy - ACCURACY_SPREAD)
    )
    most = max(family.accuracy, _MOST_ACCURATE)
    high = replace(
        family, skew=family.skew * SKEW_SPREAD, accuracy=min(most, family.accuracy + ACCURACY_SPREAD)
    )
    return low, high
