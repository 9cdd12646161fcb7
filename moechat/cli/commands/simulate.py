"""``moechat simulate``: replays a recorded trace under several systems, for this or another machine."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moechat.cli.commands.replay_arguments import SimulateCommand
from moechat.cli.terminal.consoles import print_notice, require_output, write_output
from moechat.cli.terminal.load_progress import format_bytes
from moechat.cli.terminal.page import READY_REMARK, render_cases
from moechat.errors import UsageError

if TYPE_CHECKING:
    from moechat.hardware.profile import HardwareProfile
    from moechat.simulate.compare import SimulateOptions


def simulate(command: SimulateCommand) -> int:
    """Run the command.

    Returns:
        The exit status.

    Raises:
        MoechatError: See :mod:`moechat.errors`.
    """
    if command.near not in (None, "gpu", "ram"):
        raise UsageError(f"the near tier is {command.near!r}", hint="choose gpu or ram")
    if command.plot is not None:
        _check_plot(command.plot)

    require_output()
    from moechat.routing.trace import Trace

    options = _options(command)
    trace = Trace.read(command.trace)  # before the machine: a wrong file is the cheaper error
    profile = profile_of(command.profile)

    from moechat.simulate.compare import Comparison
    from moechat.simulate.simulated_model import model_for

    model = model_for(command.model, trace, command.bits)
    near: Any = command.near
    comparison = Comparison(trace, model, profile, options, near=near, name=command.trace.name)
    report = (lambda _: None) if command.quiet else print_notice
    cases = list(comparison.cases(report))
    text = (
        json.dumps(cases, indent=1) + "\n"
        if command.json
        else render(cases, profile.title, wide=command.wide)
    )
    try:
        write_output(sys.stdout, text)
    finally:
        if command.plot is not None:
            from moechat.simulate.plot import draw

            draw(cases, command.plot)
    return 0


def _check_plot(path: Path) -> None:
    from moechat.cli.output_file import require_writable
    from moechat.simulate.plot import check_plot

    check_plot(path)
    require_writable(path)


def _options(command: SimulateCommand) -> SimulateOptions:
    from moechat.bench.options import parse_fractions, parse_systems
    from moechat.config import parse_size
    from moechat.simulate.compare import SimulateOptions

    return SimulateOptions(
        systems=tuple(system.name for system in parse_systems(command.systems)),
        fractions=parse_fractions(command.fractions),
        accuracy=command.accuracy,
        tokens=command.tokens,
        warmup=command.warmup,
        bandwidth=None if command.link is None else float(parse_size(command.link)),
        seed=command.seed,
    )


def profile_of(name: str | None) -> HardwareProfile:
    """The profile of a machine; ``None``: this one.

    Raises:
        UsageError: It has not been measured, or there is no such profile.
    """
    from moechat.hardware.measured_file import load_measured
    from moechat.hardware.profile_file import read_profile, reference_names, reference_profile

    if name is None:
        measured = load_measured()
        if measured is None:
            raise UsageError(
                "this machine has not been measured",
                hint="`moechat profile` measures it once; or name another one with --profile: "
                f"{', '.join(reference_names())}",
            )
        return measured
    if name.endswith(".toml"):
        return read_profile(name)
    return reference_profile(name)


def render(cases: Sequence[Mapping[str, Any]], machine: str, *, wide: bool = False) -> str:
    """The results as text for people: a table for each fraction, and the assumptions.

    Args:
        cases: The results.
        machine: Name of the machine.
        wide: Show all columns.
    """
    return render_cases(
        _headline(cases[0], machine),
        cases,
        lambda case: round(case["fraction"] * case["experts_total_bytes"]),
        _COLUMNS,
        lambda group: [_row(case, group[0]) for case in group],
        [*([] if wide else [READY_REMARK]), *assumptions(cases[0])],
        few=None if wide else _FEW,
    )


_COLUMNS: Sequence[tuple[str, str]] = (
    ("system", "left"),
    ("ms/token", "right"),
    ("speed", "right"),
    ("tokens/s", "right"),
    ("ready", "right"),
    ("full/ahead/top/miss %", "right"),
    ("stall ms", "right"),
    ("MB/token demand+ahead (wasted)", "right"),
    ("link", "right"),
    ("far", "right"),
    ("experts a layer", "right"),
    ("split", "right"),
)


_FEW = ("system", "ms/token", "speed", "tokens/s", "ready")


def _row(case: Mapping[str, Any], first: Mapping[str, Any]) -> list[str]:
    hits = [case[f"{kind}_hit_rate"] for kind in ("full", "prefetch", "top")]
    rate = case["tokens_per_second"]
    demand, ahead = case["demand_bytes_per_token"], case["prefetch_bytes_per_token"]
    return [
        case["system"],
        f"{case['tpot_ms']:.1f}",
        f"{first['tpot_ms'] / case['tpot_ms']:.2f}x" if case["tpot_ms"] else "-",
        "-" if rate is None else f"{rate:.1f}",
        f"{hits[0] + hits[1]:.0%}",
        "/".join(f"{100 * share:.0f}" for share in (*hits, case["miss_rate"])),
        f"{case['stall_ms']:.1f}",
        f"{demand / 1e6:.1f}+{ahead / 1e6:.1f} ({case['wasted_bytes_per_token'] / 1e6:.1f})",
        f"{case['link_busy']:.0%}",
        f"{case['far_busy']:.0%}",
        f"{case['experts_kept']:.1f}",
        f"{case['split']:.2f}",
    ]


def _headline(case: Mapping[str, Any], machine: str) -> list[str]:
    costs = case["costs"]
    far = (
        "not computed in the far tier"
        if costs["compute_far"] is None
        else f"{1000 * costs['compute_far']:.2f} ms computed in the far tier"
    )
    return [
        f"{case['model']}, {case['bits']} bits, {format_bytes(case['experts_total_bytes'])} of experts, "
        f"on {machine}",
        f"one expert: {format_bytes(case['expert_bytes'])}, {1000 * costs['load']:.2f} ms over the link "
        f"({case['link_bandwidth'] / 1e9:.1f} GB/s), {far}; a layer: {1000 * costs['attention']:.3f} ms "
        f"without experts, {1000 * costs['moe']:.3f} ms for them",
    ]


def assumptions(case: Mapping[str, Any]) -> list[str]:
    """The assumptions behind the results, in sentences."""
    first = case["accuracy_by_layer"][0]
    sentences = [
        f"{case['tokens']} tokens of {case['trace']} are timed. The {case['warmup']} before them fill the "
        "cache; every system divides its memory and chooses its experts from these alone (the oracle uses "
        "the whole trace).",
        f"Predictions are simulated: on average {case['accuracy_measured']:.0%} of the experts are among the "
        f"predicted top k, {first:.0%} in the first layer. All systems use the same predictions.",
        "A system that keeps no experts between tokens uses only the pages for blocks in transit, for any "
        "budget.",
    ]
    if case["mapping"] is not None:
        sentences.insert(0, str(case["mapping"]))
    return sentences
