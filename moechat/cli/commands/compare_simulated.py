"""``moechat compare --simulate``: the same comparison on a simulated clock, for any machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from moechat.cli.commands.compare_arguments import CompareCommand
from moechat.cli.commands.simulate import profile_of
from moechat.cli.terminal.consoles import print_notice
from moechat.cli.terminal.load_progress import LoadProgress, about_seconds, format_bytes
from moechat.errors import UsageError

if TYPE_CHECKING:
    from moechat.bench.advice import Cell
    from moechat.bench.compared import Compared
    from moechat.configurator.estimate import Near
    from moechat.hardware.profile import HardwareProfile
    from moechat.planning.cases import Cases
    from moechat.planning.source import PlannedModel
    from moechat.routing.trace import Trace
    from moechat.simulate.compare import Comparison, SimulateOptions

# Tokens that are timed if their number is not given, and those of drawn routing before them.
_TOKENS, _WARMUP = 400, 200
# A case takes about so many seconds for each layer and token; only the notice rests on it.
_LAYER_SECONDS = 4e-5


def simulated(command: CompareCommand) -> Compared:
    """Simulate all systems.

    Raises:
        MoechatError: See :mod:`moechat.errors`.
    """
    from moechat.bench.compared import Compared
    from moechat.bench.entries import entries_of, shares_to_compare, systems_to_compare
    from moechat.routing.trace import Trace
    from moechat.simulate.compare import SimulateOptions

    names = systems_to_compare(command.systems)
    tokens = _TOKENS if command.tokens is None else command.tokens
    options = SimulateOptions(names, shares_to_compare(command.fractions), tokens=tokens, seed=command.seed)
    # Before the machine: a wrong file is the cheaper error.
    trace = None if command.trace is None else Trace.read(command.trace)
    profile = profile_of(command.profile)
    found = _model(command, trace)
    cases = _cases(command, found, profile)
    if command.fractions is None:
        options = replace(options, fractions=_fitting(options.fractions, cases, profile, quiet=command.quiet))
    comparison = _comparison(command, options, trace, profile, found, cases)
    entries = entries_of(names, far_computes=comparison.costs.far_computes)
    cells = _played(comparison, [entry.system for entry in entries], quiet=command.quiet)
    facts, shape = comparison.facts, cases.shape
    return Compared(
        "simulated",
        True,
        {
            "name": facts["model"],
            "bits": facts["bits"],
            "expert_layers": shape.layers,
            "experts": shape.experts,
            "top_k": shape.top_k,
            "all_expert_bytes": facts["experts_total_bytes"],
        },
        {"name": profile.name, "title": profile.title, "near": comparison.near},
        {"prompt": 0, "warmup": comparison.warmup, "timed": comparison.tokens, "runs": 1},
        entries,
        cells,
        (comparison.floor_ms,),
        tuple(_sentences(comparison, cases, profile, drawn=trace is None)),
    )


def _model(command: CompareCommand, trace: Trace | None) -> PlannedModel:
    """The model that was named, or the known one with the shape of the trace.

    Raises:
        UsageError: No known model has that shape, or more than one.
        ModelNotFoundError: There is no such model.
    """
    from moechat.planning.source import find_model
    from moechat.simulate.simulated_model import shape_of_trace

    name = command.model
    if name is None:
        assert trace is not None
        name = shape_of_trace(trace)
    return find_model(name, command.bits)


def _cases(command: CompareCommand, found: PlannedModel, profile: HardwareProfile) -> Cases:
    """The model on the machine, as plans count it.

    Raises:
        UsageError: The profile lacks the speed of the link.
    """
    from moechat.planning.cases import Cases
    from moechat.planning.machine import Machine

    near: Near = "ram" if profile.gpu is None else "gpu"
    if ("gpu" if near == "gpu" else "file") not in profile.links:
        raise UsageError(f"the profile of {profile.title} has no speed of the link to its experts")
    machine = Machine(profile, False, near)
    return Cases(found, machine, command.load_options, keep=True)


def _comparison(
    command: CompareCommand,
    options: SimulateOptions,
    trace: Trace | None,
    profile: HardwareProfile,
    found: PlannedModel,
    cases: Cases,
) -> Comparison:
    """The simulations; without a trace over drawn routing, with predictions as good as the family's."""
    from moechat.simulate.compare import Comparison
    from moechat.simulate.drawn_routing import draw_routing
    from moechat.simulate.simulated_model import SimulatedModel

    statistics = cases.routing.statistics
    accuracy = float(statistics.prediction_accuracy[:, : cases.shape.top_k].mean())
    options = replace(options, accuracy=accuracy)
    name = "drawn routing"
    if trace is None:
        options = replace(options, warmup=_WARMUP)
        trace = draw_routing(statistics, _WARMUP + options.tokens, seed=options.seed)
    else:
        assert command.trace is not None
        name = command.trace.name
    model = SimulatedModel(found.name, cases.shape, cases.geometry)
    return Comparison(trace, model, profile, options, near=cases.machine.near, name=name)


def _fitting(
    shares: tuple[float, ...], cases: Cases, profile: HardwareProfile, *, quiet: bool
) -> tuple[float, ...]:
    """The usual shares that fit in memory with the rest of the model; all of them if none fits."""
    memory = profile.ram if profile.gpu is None else profile.gpu.vram
    room = memory.value - cases.shape.dense_bytes - cases.shape.head_bytes
    fitting = tuple(share for share in shares if share * cases.shape.all_expert_bytes <= room)
    if not fitting or fitting == shares:
        return shares
    if not quiet:
        left = " and ".join(f"{share:g}" for share in shares if share not in fitting)
        print_notice(
            f"{left} of the experts: left out, of {format_bytes(memory.value)} the rest of the model leaves "
            f"{format_bytes(max(0, room))} for experts"
        )
    return fitting


def _played(comparison: Comparison, systems: Sequence[str], *, quiet: bool) -> tuple[Cell, ...]:
    """The times of all systems at all shares."""
    import moechat
    from moechat.bench.advice import Cell

    shares = comparison.options.fractions
    tokens = comparison.warmup + comparison.tokens
    total = len(systems) * len(shares)
    if not quiet:
        seconds = total * comparison.model.shape.layers * tokens * _LAYER_SECONDS
        print_notice(
            f"simulating {len(systems)} systems at {len(shares)} shares of the experts, {comparison.tokens} "
            f"tokens each: about {about_seconds(seconds)}"
        )
    cells: list[Cell] = []
    with LoadProgress(quiet=quiet) as progress:
        for share in shares:
            for name in systems:
                case = comparison.case(name, share)
                said = f"{share:.3g} of the experts, {name}: {case['tpot_ms']:.1f} ms a token, simulated"
                nbytes = round(share * case["experts_total_bytes"])
                cells.append(Cell(name, share, nbytes, (case["tpot_ms"],), None, case["hit_rate"]))
                progress(moechat.Progress("compare", len(cells), total, said))
    return tuple(cells)


def _sentences(comparison: Comparison, cases: Cases, profile: HardwareProfile, *, drawn: bool) -> list[str]:
    """What the times rest on."""
    from moechat.bench.advice import LEAST_GAP_OF_SIMULATIONS

    near = "The GPU computes, and experts that are not in its memory come from RAM"
    if comparison.near == "ram":
        near = "The CPU computes, and experts that are not in RAM come from the disk"
    routing = (
        f"The routing is drawn: {cases.routing.source}."
        if drawn
        else f"The routing is that of {comparison.facts['trace']}."
    )
    if comparison.how is not None:
        routing += f" {comparison.how}"
    return [
        f"Simulated, with the figures of {profile.title}: {comparison.tokens} tokens are timed, "
        f"{comparison.warmup} before them fill the cache and are all that a system knows of the routing.",
        f"{near}.",
        routing,
        f"Predictions are drawn too, {comparison.facts['accuracy_measured']:.0%} of them right, the same for "
        "all systems.",
        f"Differences below {LEAST_GAP_OF_SIMULATIONS:.0%} count as none. The floor is the time with all "
        "experts in memory. Without --simulate, the systems are measured on this machine.",
    ]
