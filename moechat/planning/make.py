"""The plan of a model on a machine: memory, targets and speed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Unpack

from moechat.budget.memory_plan import Budget, least_budget
from moechat.budget.needs import SPEED_CONTEXT
from moechat.config import user_paths
from moechat.errors import DoesNotFitError
from moechat.hardware.profile import Figure, HardwareProfile
from moechat.options import LoadKeywords, LoadOptions
from moechat.planning.cases import Case, Cases
from moechat.planning.cpu_range import cpu_range, cpu_rates
from moechat.planning.machine import find_machine
from moechat.planning.memory import Far, other_budgets
from moechat.planning.place import place
from moechat.planning.result import LayerTargets, OtherBudget, Plan, RatedFigure, Speed
from moechat.planning.routing_range import routing_range
from moechat.planning.source import PlannedModel, find_model
from moechat.planning.speed import figures_used, kept_share
from moechat.planning.words import bottleneck, by_origin, notes
from moechat.simulate.kept_choices import kept_choices
from moechat.simulate.shared_draws import in_threads, shared_draws
from moechat.validation import require_model

# Bookkeeping and margin beside the experts where all of them are near.
_RESIDENT_SHARE = 1.02
# Costs of a token where all experts are near.
_NEAR_COSTS = ("attention", "moe", "head")


def plan(
    model: str | Path,
    *,
    profile: str | Path | HardwareProfile | None = None,
    **options: Unpack[LoadKeywords],
) -> Plan:
    """Plan the memory of a model on a machine and estimate its speed; loads no weights, uses no network.

    With ``vram``, ``device="cuda"`` or a profile that has a GPU, the GPU computes; its memory
    keeps experts, RAM the others. Else RAM keeps experts and the disk the others.

    Args:
        model: ``demo``, an alias, a hub repository, a known shape, a checkpoint or a store, a directory with
            a ``config.json``, or such a file.
        profile: Name of a reference profile, a file of that form, or a profile; ``None``: this machine.
        options: As for :func:`moechat.load`: see :class:`moechat.LoadOptions`. ``tune`` and
            ``replan_tokens`` change nothing in a plan.

    Raises:
        UsageError: A value is wrong, or the machine lacks the GPU or the memory of the options.
        ModelNotFoundError: There is no such model.
        UnsupportedModelError: moechat cannot run it.
        DoesNotFitError: The memory is too small; the message has every part and the least that works.
    """
    return _plan(model, profile, LoadOptions.parse(options), brief=False, keep=True)


def brief_plan(
    model: str | Path,
    *,
    profile: str | Path | HardwareProfile | None = None,
    keep: bool = True,
    **options: Unpack[LoadKeywords],
) -> Plan:
    """Like :func:`plan`, in half the time: without other budgets, and without the plans that would be made at
    the ends of the range of the CPU's rate; ``speed.cpu_rates`` are those of this plan.

    Args:
        model: As for :func:`plan`.
        profile: As for :func:`plan`.
        keep: Keep what is computed in the user's cache, as :func:`plan` does.
        options: As for :func:`plan`.
    """
    return _plan(model, profile, LoadOptions.parse(options), brief=True, keep=keep)


def _plan(
    model: str | Path,
    profile: str | Path | HardwareProfile | None,
    options: LoadOptions,
    *,
    brief: bool,
    keep: bool,
) -> Plan:
    require_model(model)
    wants_gpu = None if options.device is None and options.vram is None else options.gpu is not None
    found = find_model(model, options.bits)  # before the machine: a wrong name is the cheaper error
    machine = find_machine(profile, gpu=wants_gpu)
    with shared_draws(), kept_choices(user_paths().cache / "choices", write=keep):
        return _made(Cases(found, machine, options, keep=keep), found, options, brief=brief)


def _made(cases: Cases, found: PlannedModel, options: LoadOptions, *, brief: bool) -> Plan:
    machine, outline, shape = cases.machine, cases.outline, cases.shape
    placed = place(cases, options)
    case, far, ram_share = placed.case, placed.far, placed.ram_share
    memory = case.memory
    in_one_pass = outline.cache.note_of_one_pass(memory.context)
    remarks = [placed.short, found.note, cases.remark, in_one_pass, *cases.routing.remarks, *case.remarks]
    used = {} if machine.figures is None else used_figures(cases, machine.figures, far)
    return Plan(
        model=found.name,
        model_type=outline.model_type,
        parameters=outline.parameters,
        active_parameters=outline.active_parameters,
        bits=cases.geometry.bits,
        experts_form=cases.geometry.title,
        dtype=cases.dtype,
        dense_bits=outline.form.bits,
        dense_weights=outline.form.title,
        kv_bits=outline.cache.bits,
        weights=found.weights,
        source_format=found.source_format or "",
        expert_layers=shape.layers,
        experts=shape.experts,
        top_k=shape.top_k,
        blocks_per_expert=shape.blocks_per_expert,
        all_expert_bytes=shape.all_expert_bytes,
        machine=machine.name,
        machine_title=machine.title,
        system=options.system,
        strategy="" if case.strategy is None else case.strategy.title,
        near=placed.tiers[0].name,
        context=memory.context,
        context_limited=memory.context_limited,
        tiers=placed.tiers,
        far=far,
        pages=memory.pages,
        resident_share=cases.resident(memory),
        wave_tokens=memory.wave,
        layers=_layers(cases, case),
        statistics_tokens=cases.routing.tokens,
        statistics_source=cases.routing.source,
        statistics_basis=cases.routing.basis,
        speed=None
        if machine.figures is None
        else _speed(cases, case, machine.figures, far, ram_share, used, brief=brief),
        other_budgets=() if brief or machine.figures is None else _others(cases, case, ram_share),
        notes=notes(machine, far, options.ram, remarks, used, pinned=placed.pinned),
    )


def _layers(cases: Cases, case: Case) -> tuple[LayerTargets, ...]:
    allocation, waits = case.allocation, case.exposed
    if allocation is None or waits is None:
        return ()
    blocks = cases.shape.blocks_per_expert
    shares = kept_share(allocation, cases.routing.statistics, blocks)
    rows = zip(cases.outline.expert_layers, allocation.targets.tolist(), shares, waits, strict=True)
    return tuple(
        LayerTargets(
            layer=layer,
            experts=experts,
            blocks=kept if experts else 0,
            split=kept / blocks if experts else 0.0,
            hit_rate=float(share),
            exposed_s=float(wait),
        )
        for layer, (experts, kept), share, wait in rows
    )


def used_figures(cases: Cases, profile: HardwareProfile, far: Far | None) -> Mapping[str, Figure]:
    """The figures of the machine that a speed rests on, by name."""
    disk = far is not None and far.kind != "ram"
    in_ram = 1.0 if far is None else far.share
    return figures_used(
        profile, cases.shape, cases.machine.near, far=far is not None, disk=disk, in_ram=in_ram
    )


def _speed(
    cases: Cases,
    case: Case,
    profile: HardwareProfile,
    far: Far | None,
    ram_share: float,
    used: Mapping[str, Figure],
    *,
    brief: bool,
) -> Speed:
    ahead = cases.runs_ahead(case.memory)
    costs = cases.cost_figures(profile, case.memory, ahead=ahead, ram_share=ram_share).figures
    if far is None:  # nothing is moved, or computed elsewhere
        costs = {name: figure for name, figure in costs.items() if name in _NEAR_COSTS}
    ends = None if brief else cpu_range(cases, case, far, ram_share)

    def rates() -> tuple[float, float] | None:
        return cpu_rates(cases, case, far, ram_share) if ends is None else ends.same_plan_rates

    calls: tuple[Callable[[], Any], ...] = (rates, lambda: routing_range(cases, case, ram_share))
    at_ends, by_routing = in_threads(lambda call: call(), calls)
    return Speed(
        basis="estimate",
        times="estimate" if cases.times is None else "measured",
        context=min(SPEED_CONTEXT, case.memory.context),
        decode=case.decode,
        ttft_s=cases.prompts(case, profile),
        bottleneck=bottleneck(case.decode, far, cases.settings),
        figures=_rated(used),
        origins=by_origin(used),
        costs=_rated(costs),
        cpu_range=ends,
        cpu_rates=at_ends,
        routing_range=by_routing,
    )


def _rated(figures: Mapping[str, Figure]) -> tuple[RatedFigure, ...]:
    return tuple(
        RatedFigure(name, figure.value, figure.origin, figure.source, figure.low, figure.high)
        for name, figure in figures.items()
    )


def _others(cases: Cases, case: Case, ram_share: float) -> tuple[OtherBudget, ...]:
    memory = case.memory
    fixed = memory.total - memory.expert_bytes
    resident = fixed + int(cases.shape.all_expert_bytes * _RESIDENT_SHARE)
    if memory.mapped:
        resident = memory.budget  # the memory beside the experts is used for a longer context

    def rate(budget: int) -> float | None:
        other_budget = Budget(budget, True, memory.spare)
        try:
            other = cases.case(other_budget, ctx=memory.context, ram_share=ram_share, strategy=case.strategy)
        except DoesNotFitError:
            return None
        return other.decode.rate

    budgets = other_budgets(memory.budget, resident, least_budget(cases.needs, memory.context), rate)
    return tuple(OtherBudget(name, size, tokens) for name, size, tokens in budgets)
