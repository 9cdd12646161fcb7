"""The expected speed of a model on a machine, without the other parts of a plan: in one to three seconds."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Unpack

from moechat.config import user_paths
from moechat.hardware.profile import HardwareProfile
from moechat.options import LoadKeywords, LoadOptions
from moechat.planning.cases import Cases
from moechat.planning.machine import find_machine
from moechat.planning.make import used_figures
from moechat.planning.place import place
from moechat.planning.routing_range import routing_range
from moechat.planning.source import find_model
from moechat.planning.words import by_origin
from moechat.simulate.kept_choices import kept_choices
from moechat.simulate.shared_draws import shared_draws

# ``measured``: every figure was measured on the machine. ``estimate``: some are published, or follow from a
# rule. ``assumed``: the machine was not measured, and figures of an ordinary desktop stand in.
SpeedBasis = Literal["measured", "estimate", "assumed"]
# Bytes of a weight in a store that belongs to no expert.
_STORED_DENSE = 2


@dataclass(frozen=True)
class Expected:
    """The expected speed of a model.

    Attributes:
        tokens_per_s: Decoded tokens a second.
        low: The same if the model routes more evenly than expected; ``None`` where its routing is known, or
            all experts are near, or the estimate is brief.
        high: The same if it routes less evenly.
        basis: See :data:`SpeedBasis`.
        parameters: Number of weights of the model.
        active_parameters: Number of weights that a token is computed with.
        bits: Bits of an expert weight.
        store_bytes: Bytes of a store, without tokenizer and other small files.
        expert_bytes: Bytes of all experts.
        resident_share: Share of all experts that the tier that computes keeps, in pages that are lent and in
            the page cache too.
        far: Place of the others: ``ram``, ``ram+disk``, ``disk``, or ``None`` if there are none.
        near_bytes: Bytes used of the tier that computes.
        near: That tier.
    """

    tokens_per_s: float
    low: float | None
    high: float | None
    basis: SpeedBasis
    parameters: int
    active_parameters: int
    bits: int
    store_bytes: int
    expert_bytes: int
    resident_share: float
    far: Literal["ram", "disk", "ram+disk"] | None
    near_bytes: int
    near: Literal["vram", "ram"]

    @property
    def reads_disk(self) -> bool:
        """Whether tokens wait for a disk."""
        return self.far is not None and self.far != "ram"

    def to_json(self) -> dict[str, Any]:
        """Plain values; sizes in bytes, shares from 0 to 1."""
        return asdict(self)


def _dense_weights(cases: Cases) -> int:
    geometry = cases.geometry
    experts = cases.shape.layers * geometry.num_experts * geometry.expert_weights
    return max(0, cases.outline.parameters - experts)


def expect(
    model: str | Path,
    *,
    profile: str | Path | HardwareProfile | None = None,
    brief: bool = False,
    **options: Unpack[LoadKeywords],
) -> Expected:
    """The expected speed of a model; arguments and errors as :func:`moechat.plan`.

    Args:
        model: See there.
        profile: See there.
        brief: Simulate the usual strategy alone, and no range: in about a sixth of the time, and with 17
            models on two machines within 3 % of the other.
        options: See there.
    """
    parsed = LoadOptions.parse(options)
    wants_gpu = None if parsed.device is None and parsed.vram is None else parsed.gpu is not None
    found = find_model(model, parsed.bits)
    machine = find_machine(profile, gpu=wants_gpu)
    with shared_draws(), kept_choices(user_paths().cache / "choices", write=False):
        cases = Cases(found, machine, parsed)
        placed = place(cases, parsed, brief=brief)
        ends = None if brief else routing_range(cases, placed.case, placed.ram_share)
    basis: SpeedBasis = "assumed"
    if machine.figures is not None:
        kinds = by_origin(used_figures(cases, machine.figures, placed.far))
        basis = "estimate" if kinds["published"] or kinds["assumed"] else "measured"
    memory = placed.case.memory
    return Expected(
        tokens_per_s=placed.case.decode.rate,
        low=None if ends is None else ends.low.tokens_per_s,
        high=None if ends is None else ends.high.tokens_per_s,
        basis=basis,
        parameters=cases.outline.parameters,
        active_parameters=cases.outline.active_parameters,
        bits=found.bits,
        store_bytes=cases.shape.all_expert_bytes + _STORED_DENSE * _dense_weights(cases),
        expert_bytes=cases.shape.all_expert_bytes,
        resident_share=cases.resident(memory),
        far=None if placed.far is None else placed.far.kind,
        near_bytes=placed.tiers[0].used,
        near="vram" if machine.near == "gpu" else "ram",
    )
