"""Memory, targets and speed put together."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from moechat.config import parse_size
from moechat.configurator.systems import parse_settings
from moechat.errors import DoesNotFitError, UsageError
from moechat.geometry import DENSE_BITS, SUPPORTED_BITS
from moechat.hardware.profile import Figure, HardwareProfile
from moechat.offload.budget import Needs, least_budget
from moechat.planning.cases import SPEED_CONTEXT, Case, Cases
from moechat.planning.machine import find_machine
from moechat.planning.memory import Far, Part, Tier, far_in_ram, near_tier, other_budgets
from moechat.planning.result import LayerPlan, OtherBudget, Plan, RatedFigure, Speed
from moechat.planning.source import PlannedModel, find_model
from moechat.planning.speed import figures_used, kept_share
from moechat.planning.words import bottleneck, notes

# Bookkeeping and margin beside the experts where all of them are near.
_RESIDENT_SHARE = 1.02
# Costs of a token where all experts are near.
_NEAR_COSTS = ("attention", "moe", "head")


def plan(
    model: str | Path,
    vram: str | int | None = None,
    ram: str | int | None = None,
    profile: str | Path | HardwareProfile | None = None,
    ctx: int | None = None,
    bits: int | None = None,
    system: str = "auto",
    dense_bits: int = 16,
) -> Plan:
    """What a model would take on a machine and how fast it would be; loads no weights and uses no network.

    With ``vram``, or a profile that has a graphics card, the card computes; its memory keeps experts, RAM
    the others. Else RAM keeps experts and the disk the others, as ``moechat run`` does today.

    Args:
        model: ``demo``, an alias, a hub repository, a known shape, a checkpoint or a store, a directory with
            a ``config.json``, or such a file.
        vram: Graphics memory to use, in bytes or as ``"12G"``; ``None``: what the card has free.
        ram: RAM that the whole process may take; ``None``: what the machine has, less a reserve.
        profile: Name of a reference profile, a file of that form, or a profile; ``None``: this machine.
        ctx: Tokens of context; ``None``: as ``moechat run`` chooses.
        bits: Of an expert weight; ``None``: the store's, else 4.
        system: As for ``moechat run``.
        dense_bits: Of a dense weight: 16, 8 or 4.

    Raises:
        UsageError: A value is wrong, or the machine lacks what is asked for.
        ModelNotFoundError: There is no such model.
        UnsupportedModelError: moechat cannot run it.
        DoesNotFitError: The memory is too small; the message has every part and the least that works.
    """
    wanted_vram, wanted_ram = _size("vram", vram), _size("ram", ram)
    settings = parse_settings(system)
    if bits is not None and bits not in SUPPORTED_BITS:
        raise UsageError(f"{bits} bits are not supported", hint=f"choose one of {SUPPORTED_BITS}")
    if isinstance(dense_bits, bool) or dense_bits not in DENSE_BITS:
        raise UsageError(f"dense_bits is {dense_bits!r}", hint="choose one of 4, 8, 16")
    machine = find_machine(profile, vram=wanted_vram is not None)
    found = find_model(model, bits)
    return _made(Cases(found, machine, settings, ctx, dense_bits), found, system, wanted_vram, wanted_ram)


def _size(name: str, value: str | int | None) -> int | None:
    if value is None:
        return None
    size = parse_size(value) if isinstance(value, str) else value
    if isinstance(size, bool) or not isinstance(size, int) or not 0 < size < 1 << 63:
        raise UsageError(f"{name} is {value!r}", hint="give a size such as '12G', or a number of bytes")
    return size


def _made(cases: Cases, found: PlannedModel, system: str, vram: int | None, ram: int | None) -> Plan:
    machine, outline, shape = cases.machine, cases.outline, cases.shape
    near: Literal["vram", "ram"] = "vram" if machine.near == "gpu" else "ram"
    ram_budget = machine.ram_budget(ram)
    behind: tuple[Tier, Far] | None = None
    if near == "vram":
        budget, given = machine.vram_budget(vram), vram is not None
        behind = far_in_ram(shape.all_expert_bytes, ram_budget, ram is not None)
    else:
        budget, given = ram_budget, ram is not None
    needs = cases.needs()
    ram_share = 0.0 if behind is None else behind[1].share
    case = cases.case(needs, budget, given=given, ctx=cases.ctx, ram_share=ram_share)
    memory = case.memory
    base = Part("CUDA context", needs.base, "estimate")
    if near == "ram":
        base = Part("process", needs.base, machine.process.basis)
    tiers = [near_tier(memory, near, base)]
    far: Far | None = None
    if behind is not None and not memory.mapped:
        tiers.append(behind[0])
        far = behind[1]
    elif not memory.mapped:
        far = Far("disk", 0.0, memory.total - memory.expert_bytes + shape.all_expert_bytes)
    return Plan(
        model=found.name,
        model_type=outline.model_type,
        parameters=outline.parameters,
        active_parameters=outline.active_parameters,
        bits=found.bits,
        dtype=cases.dtype,
        dense_bits=outline.form.bits,
        weights=found.weights,
        expert_layers=shape.layers,
        experts=shape.experts,
        top_k=shape.top_k,
        blocks_per_expert=shape.blocks_per_expert,
        all_expert_bytes=shape.all_expert_bytes,
        machine=machine.name,
        machine_title=machine.title,
        system=system,
        near=near,
        context=memory.context,
        context_limited=memory.context_limited,
        tiers=tuple(tiers),
        far=far,
        pages=memory.pages,
        resident_share=cases.resident(memory),
        layers=_layers(cases, case),
        statistics_tokens=cases.routing.tokens,
        statistics_source=cases.routing.source,
        speed=None if machine.figures is None else _speed(cases, case, machine.figures, far),
        other_budgets=() if machine.figures is None else _others(cases, case, needs, ram_share),
        notes=notes(machine, far, ram, [found.note, *cases.routing.remarks, *case.remarks]),
    )


def _layers(cases: Cases, case: Case) -> tuple[LayerPlan, ...]:
    allocation, waits = case.allocation, case.exposed
    if allocation is None or waits is None:
        return ()
    blocks = cases.shape.blocks_per_expert
    shares = kept_share(allocation, cases.routing.statistics, blocks)
    rows = zip(cases.outline.expert_layers, allocation.targets.tolist(), shares, waits, strict=True)
    return tuple(
        LayerPlan(
            layer=layer,
            experts=experts,
            blocks=kept if experts else 0,
            split=kept / blocks if experts else 0.0,
            hit_rate=float(share),
            exposed_s=float(wait),
        )
        for layer, (experts, kept), share, wait in rows
    )


def _speed(cases: Cases, case: Case, profile: HardwareProfile, far: Far | None) -> Speed:
    near = cases.machine.near
    disk = far is not None and far.kind != "ram"
    costs = cases.cost_figures(profile, case.memory).figures
    if far is None:  # nothing is moved, or computed elsewhere
        costs = {name: figure for name, figure in costs.items() if name in _NEAR_COSTS}
    return Speed(
        basis="estimate",
        times="estimate" if cases.times is None else "measured",
        context=min(SPEED_CONTEXT, case.memory.context),
        decode=case.decode,
        ttft_s=cases.prompts(case, profile),
        bottleneck=bottleneck(case.decode, far, cases.settings),
        figures=_rated(figures_used(profile, cases.shape, near, far=far is not None, disk=disk)),
        costs=_rated(costs),
    )


def _rated(figures: Mapping[str, Figure]) -> tuple[RatedFigure, ...]:
    return tuple(
        RatedFigure(name, figure.value, figure.origin, figure.source) for name, figure in figures.items()
    )


def _others(cases: Cases, case: Case, needs: Needs, ram_share: float) -> tuple[OtherBudget, ...]:
    memory = case.memory
    fixed = memory.total - memory.expert_bytes
    resident = fixed + int(cases.shape.all_expert_bytes * _RESIDENT_SHARE)
    if memory.mapped:
        resident = memory.budget  # what is left went into a longer context

    def rate(budget: int) -> float | None:
        try:
            other = cases.case(needs, budget, given=True, ctx=memory.context, ram_share=ram_share)
        except DoesNotFitError:
            return None
        return other.decode.rate

    budgets = other_budgets(memory.budget, resident, least_budget(needs, memory.context), rate)
    return tuple(OtherBudget(name, size, tokens) for name, size, tokens in budgets)
