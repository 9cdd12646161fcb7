"""The plan that :func:`moechat.plan` returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from moechat.geometry import DenseBits
from moechat.planning.cpu_range import CpuRange
from moechat.planning.memory import Far, Tier
from moechat.planning.routing import Basis
from moechat.planning.routing_range import RoutingRange
from moechat.planning.speed import Decode


@dataclass(frozen=True)
class LayerTargets:
    """The experts that are kept of one layer.

    Attributes:
        layer: Index of the decoder layer.
        experts: C, experts kept.
        blocks: Blocks kept of each.
        split: θ, share of an expert that is kept.
        hit_rate: Share of the layer's activations, by bytes, that these blocks serve.
        exposed_s: Load time of a token that nothing hides, in seconds.
    """

    layer: int
    experts: int
    blocks: int
    split: float
    hit_rate: float
    exposed_s: float


@dataclass(frozen=True)
class OtherBudget:
    """The speed with another budget.

    Attributes:
        name: ``half``, ``less``, ``more``, ``much_more`` or ``all_experts``.
        nbytes: The budget in bytes.
        tokens_per_s: Expected speed with the strategy of this plan; ``None`` if the model does not run with
            it.
    """

    name: str
    nbytes: int
    tokens_per_s: float | None


@dataclass(frozen=True)
class RatedFigure:
    """A figure that the speed rests on.

    Attributes:
        name: Name, with its unit.
        value: Value in that unit.
        origin: See :class:`moechat.hardware.profile.Figure`.
        source: See there.
        low: The least that it may be; ``None``: no range is known.
        high: The most that it may be.
    """

    name: str
    value: float
    origin: str
    source: str
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Speed:
    """The expected speed.

    Attributes:
        basis: ``estimate``: computed from figures of the machine and the model's shape.
        times: ``measured`` if this model's layers were timed on this machine, else ``estimate``.
        context: Tokens that a decoded token attends to.
        decode: Time of a decoded token, part by part.
        ttft_s: Seconds to the first token, by tokens of the prompt; ``None`` where the machine's profile has
            no figures for many tokens.
        bottleneck: Largest part of a token's time, for people.
        figures: Figures of the machine, with their origins.
        origins: Names of these figures that are ``measured`` on the machine, ``published`` by maker or
            others, and ``assumed``: by a rule or from another machine.
        costs: Costs of this model that follow from them, in seconds, by the names of
            :class:`moechat.configurator.costs.Costs`; only those of near experts where all are near.
        cpu_range: Speed and choice at the ends of the range of the CPU's experts; ``None`` where their rate
            has no range, or where the CPU computes none.
        cpu_rates: Tokens a second of this plan at the ends of that range, if there is one.
        routing_range: Speed where the model routes less or more evenly than expected; ``None`` where its
            routing was recorded, or where all experts are near.
    """

    basis: Literal["estimate"]
    times: Literal["measured", "estimate"]
    context: int
    decode: Decode
    ttft_s: Mapping[int, float] | None
    bottleneck: str
    figures: tuple[RatedFigure, ...]
    costs: tuple[RatedFigure, ...]
    origins: Mapping[str, list[str]]
    cpu_range: CpuRange | None = None
    cpu_rates: tuple[float, float] | None = None
    routing_range: RoutingRange | None = None

    @property
    def tokens_per_s(self) -> float:
        """Decoded tokens a second."""
        return self.decode.rate


@dataclass(frozen=True)
class Plan:
    """The memory that a model takes on a machine, and its expected speed.

    Attributes:
        model: Name of the model.
        model_type: Its family.
        parameters: Number of weights.
        active_parameters: Number of weights that a token is computed with.
        bits: Bits of an expert weight; of kept encodings those of :class:`moechat.geometry.ExpertGeometry`.
        experts_form: The form of expert weights for people: ``4 bits``, or ``Q4_K and Q6_K``.
        dtype: Type that the dense part computes in.
        dense_bits: Bits of a dense weight.
        dense_weights: Bits of the dense weights by the kind of their layer.
        kv_bits: Bits of a key or value in the attention cache: 16 as in ``dtype``, or 8.
        weights: ``store``, ``checkpoint`` or ``none``: the form in which the weights are here.
        source_format: The format of the checkpoint's weights, for people, if they are quantised; else empty.
        expert_layers: Layers with routed experts.
        experts: Experts of such a layer.
        top_k: Experts of a token.
        blocks_per_expert: Blocks of 64 neurons of an expert.
        all_expert_bytes: Bytes of all experts.
        machine: Name of the profile, or ``this machine``.
        machine_title: Name of the machine for people.
        system: Name of the system that keeps and fetches experts.
        strategy: The strategy that ``auto`` chooses by simulation, for people; empty where nothing is chosen.
        near: Tier that computes: ``vram`` or ``ram``.
        context: Tokens of prompt and answer together.
        context_limited: Whether memory made it shorter than the model allows.
        tiers: Memories and their parts, the near one first.
        far: Place of the other experts; ``None`` if all are near.
        pages: Pages of the near tier; 0 if all experts are near.
        resident_share: Share of all experts that the near tier keeps, in pages that are lent and in the page
            cache too.
        wave_tokens: Tokens of a prompt for which missing experts are moved once; 0: those of one pass.
        layers: Targets of each layer; empty if all experts are near. They rest on assumed times if the
            machine was not measured.
        statistics_tokens: Recorded tokens of this model that the choice rests on; 0: the family's defaults.
        statistics_source: Origin of the statistics, for people.
        statistics_basis: ``recorded``: while this model was used here; ``trace``: a published recording of
            this model; ``assumed``: the routing of other models.
        speed: Expected speed; ``None`` without figures of the machine.
        other_budgets: Speed with less and with more memory.
        notes: Remarks for the user.
    """

    model: str
    model_type: str
    parameters: int
    active_parameters: int
    bits: int
    experts_form: str
    dtype: str
    dense_bits: DenseBits
    dense_weights: str
    kv_bits: int
    weights: str
    source_format: str
    expert_layers: int
    experts: int
    top_k: int
    blocks_per_expert: int
    all_expert_bytes: int
    machine: str
    machine_title: str
    system: str
    strategy: str
    near: Literal["vram", "ram"]
    context: int
    context_limited: bool
    tiers: tuple[Tier, ...]
    far: Far | None
    pages: int
    resident_share: float
    wave_tokens: int
    layers: tuple[LayerTargets, ...]
    statistics_tokens: int
    statistics_source: str
    statistics_basis: Basis
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
                "experts_form": self.experts_form,
                "dtype": self.dtype,
                "dense_bits": self.dense_bits,
                "dense_weights": self.dense_weights,
                "kv_bits": self.kv_bits,
                "weights": self.weights,
                "source_format": self.source_format or None,
                "expert_layers": self.expert_layers,
                "experts": self.experts,
                "top_k": self.top_k,
                "blocks_per_expert": self.blocks_per_expert,
                "expert_bytes": self.all_expert_bytes,
            },
            "machine": {"name": self.machine, "title": self.machine_title},
            "system": self.system,
            "strategy": self.strategy or None,
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
                "wave_tokens": self.wave_tokens,
            },
            "layers": [asdict(entry) for entry in self.layers],
            "statistics": {
                "tokens": self.statistics_tokens,
                "source": self.statistics_source,
                "basis": self.statistics_basis,
            },
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
        "beyond_bytes": tier.beyond,
        "lent_bytes": tier.lent,
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
        "figure_origins": {kind: list(names) for kind, names in speed.origins.items()},
        "costs_s": [_figure(figure) for figure in speed.costs],
        "cpu_range": None if speed.cpu_range is None else asdict(speed.cpu_range),
        "routing_range": None if speed.routing_range is None else asdict(speed.routing_range),
    }


def _figure(figure: RatedFigure) -> dict[str, Any]:
    without = ("low", "high") if figure.low is None else ()
    return {key: value for key, value in asdict(figure).items() if key not in without}
