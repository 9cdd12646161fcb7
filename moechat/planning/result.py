"""A plan as it is handed out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from moechat.planning.memory import Far, Tier
from moechat.planning.speed import Decode


@dataclass(frozen=True)
class LayerPlan:
    """What is kept of one layer.

    Attributes:
        layer: Decoder layer.
        experts: C, experts kept.
        blocks: Blocks kept of each.
        split: θ, share of an expert that is.
        hit_rate: Share of the layer's activations, by bytes, that this serves.
        exposed_s: Seconds a token that nothing hides.
    """

    layer: int
    experts: int
    blocks: int
    split: float
    hit_rate: float
    exposed_s: float


@dataclass(frozen=True)
class OtherBudget:
    """What another budget would give.

    Attributes:
        name: ``half``, ``less``, ``more``, ``much_more`` or ``all_experts``.
        nbytes: The budget.
        tokens_per_s: ``None`` where it does not work.
    """

    name: str
    nbytes: int
    tokens_per_s: float | None


@dataclass(frozen=True)
class RatedFigure:
    """A figure that the speed rests on.

    Attributes:
        name: What it is, with its unit.
        value: In that unit.
        origin: See :class:`moechat.hardware.profile.Figure`.
        source: The same.
    """

    name: str
    value: float
    origin: str
    source: str


@dataclass(frozen=True)
class Speed:
    """How fast it would be.

    Attributes:
        basis: ``estimate``: computed from figures of the machine and the model's shape.
        times: ``measured`` if this model's own layers were timed on this machine, else ``estimate``.
        context: Tokens that a decoded token attends to.
        decode: A token, part by part.
        ttft_s: Seconds to the first token, by tokens of the prompt; ``None`` where the machine's profile says
            nothing about many tokens.
        bottleneck: What a token's time mostly is, for people.
        figures: Of the machine, with their origins.
        costs: What they come to for this model: seconds, by the names of
            :class:`moechat.configurator.costs.Costs`; where all experts are near, without those of others.
    """

    basis: Literal["estimate"]
    times: Literal["measured", "estimate"]
    context: int
    decode: Decode
    ttft_s: Mapping[int, float] | None
    bottleneck: str
    figures: tuple[RatedFigure, ...]
    costs: tuple[RatedFigure, ...]

    @property
    def tokens_per_s(self) -> float:
        """Decoded."""
        return self.decode.rate


@dataclass(frozen=True)
class Plan:
    """What a model would take on a machine, and how fast it would be.

    Attributes:
        model: Its name.
        model_type: Its family.
        parameters: Weights.
        active_parameters: Weights that a token is computed with.
        bits: Of an expert weight.
        dtype: Of the dense weights.
        dense_bits: Of a dense weight.
        weights: ``store``, ``checkpoint`` or ``none``: what of the model is here.
        expert_layers: Layers with routed experts.
        experts: Experts of such a layer.
        top_k: Of them, those that a token takes.
        blocks_per_expert: Blocks of 64 neurons.
        all_expert_bytes: Bytes of all experts.
        machine: Name of the profile, or ``this machine``.
        machine_title: For people.
        system: How experts are kept and fetched.
        near: Tier that computes: ``vram`` or ``ram``.
        context: Tokens of prompt and answer together.
        context_limited: Memory made it shorter than the model allows.
        tiers: Memories and what they are spent on, the near one first.
        far: Where the other experts lie; ``None`` if all are near.
        pages: Of the near tier; 0 if all experts are near.
        resident_share: Of all experts, what the near tier keeps.
        layers: By layer what is kept; empty where all is. Where nothing is known of the machine, it is
            chosen with assumed times.
        statistics_tokens: Recorded tokens of this model that the choice rests on; 0: the family's defaults.
        statistics_source: For people.
        speed: ``None`` where nothing is known of the machine.
        other_budgets: What less and more memory would give.
        notes: What the user may not expect.
    """

    model: str
    model_type: str
    parameters: int
    active_parameters: int
    bits: int
    dtype: str
    dense_bits: int
    weights: str
    expert_layers: int
    experts: int
    top_k: int
    blocks_per_expert: int
    all_expert_bytes: int
    machine: str
    machine_title: str
    system: str
    near: Literal["vram", "ram"]
    context: int
    context_limited: bool
    tiers: tuple[Tier, ...]
    far: Far | None
    pages: int
    resident_share: float
    layers: tuple[LayerPlan, ...]
    statistics_tokens: int
    statistics_source: str
    speed: Speed | None
    other_budgets: tuple[OtherBudget, ...]
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain values under stable keys; sizes in bytes, times in seconds, shares from 0 to 1."""
        return {
            "model": {
                "name": self.model,
                "type": self.model_type,
                "parameters": self.parameters,
                "active_parameters": self.active_parameters,
                "bits": self.bits,
                "dtype": self.dtype,
                "dense_bits": self.dense_bits,
                "weights": self.weights,
                "expert_layers": self.expert_layers,
                "experts": self.experts,
                "top_k": self.top_k,
                "blocks_per_expert": self.blocks_per_expert,
                "expert_bytes": self.all_expert_bytes,
            },
            "machine": {"name": self.machine, "title": self.machine_title},
            "system": self.system,
            "context": {"tokens": self.context, "limited_by_memory": self.context_limited},
            "memory": {
                "near": self.near,
                "tiers": [_tier(tier) for tier in self.tiers],
                "far": None
                if self.far is None
                else {
                    "kind": self.far.kind,
                    "share_in_ram": self.far.share,
                    "ram_for_all_bytes": self.far.needed,
                },
                "pages": self.pages,
                "resident_share": self.resident_share,
            },
            "layers": [
                {
                    "layer": entry.layer,
                    "experts": entry.experts,
                    "blocks": entry.blocks,
                    "split": entry.split,
                    "hit_rate": entry.hit_rate,
                    "exposed_s": entry.exposed_s,
                }
                for entry in self.layers
            ],
            "statistics": {"tokens": self.statistics_tokens, "source": self.statistics_source},
            "speed": None if self.speed is None else _speed(self.speed),
            "other_budgets": [
                {"name": entry.name, "bytes": entry.nbytes, "tokens_per_s": entry.tokens_per_s}
                for entry in self.other_budgets
            ],
            "notes": list(self.notes),
        }


def _tier(tier: Tier) -> dict[str, Any]:
    return {
        "tier": tier.name,
        "budget_bytes": tier.budget,
        "given": tier.given,
        "used_bytes": tier.used,
        "parts": [{"name": part.name, "bytes": part.nbytes, "basis": part.basis} for part in tier.parts],
    }


def _speed(speed: Speed) -> dict[str, Any]:
    decode = speed.decode
    return {
        "basis": speed.basis,
        "times": speed.times,
        "context": speed.context,
        "tokens_per_s": decode.rate,
        "tpot_s": decode.seconds,
        "parts_s": {
            "dense": decode.dense,
            "experts": decode.experts,
            "waiting": decode.waiting,
            "head": decode.head,
        },
        "hit_rate": decode.hit_rate,
        "ready_rate": decode.ready_rate,
        "far_bytes_per_token": decode.far_bytes,
        "ttft_s": None
        if speed.ttft_s is None
        else {str(tokens): seconds for tokens, seconds in speed.ttft_s.items()},
        "bottleneck": speed.bottleneck,
        "figures": [_figure(figure) for figure in speed.figures],
        "costs_s": [_figure(figure) for figure in speed.costs],
    }


def _figure(figure: RatedFigure) -> dict[str, Any]:
    return {
        "name": figure.name,
        "value": figure.value,
        "origin": figure.origin,
        "source": figure.source,
    }
