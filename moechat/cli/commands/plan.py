"""``moechat plan``: shows a model's memory and expected speed as tables or JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from moechat.cli.commands.plan_arguments import PlanCommand
from moechat.cli.commands.plan_summary import TIERS, summary_rows
from moechat.cli.terminal.consoles import write_output
from moechat.cli.terminal.load_progress import format_bytes, format_seconds
from moechat.cli.terminal.page import Page
from moechat.options import LoadOptions

if TYPE_CHECKING:
    from rich.console import JustifyMethod
    from rich.table import Table

    from moechat.planning import Plan
    from moechat.planning.cpu_range import CpuEnd, CpuRange
    from moechat.planning.result import LayerTargets, Speed

_ORIGINS = {
    "datasheet": "data sheet",
    "published": "published",
    "measured": "measured",
    "estimate": "estimate",
}
_BAR = 16
# More groups of layers than this are drawn as bars instead of table rows.
_MOST_ROWS = 10
_HEIGHTS = "▁▂▃▄▅▆▇█"
_PLAIN_HEIGHTS = "._-=+*%#"
# Gain of another plan that is worth a word; the search for targets leaves less than that to chance.
_WORTH_NAMING = 0.01
_BUDGETS = {"half": "half", "all_experts": "all experts"}
_LENT = "more experts in the attention cache, while conversations are short"
_BEYOND = "experts beyond it, while no other program needs the memory"


def plan(command: PlanCommand) -> int:
    """Make the plan and show it; returns the exit status."""
    if command.list_gpus:
        return _list_gpus()
    if command.list_models:
        from moechat.cli.commands.plan_models import list_models

        return list_models(command)
    assert command.model is not None
    import moechat

    if command.json or command.verbose:
        made = moechat.plan(command.model, profile=command.gpu, **command.load_options.given)
    else:
        from moechat.planning.make import brief_plan

        made = brief_plan(command.model, profile=command.gpu, **command.load_options.given)
    if command.json:
        text = json.dumps(made.to_json(), indent=1, ensure_ascii=not _is_utf8()) + "\n"
    else:
        text = render_summary(made, whole=command.verbose)
        if command.verbose:
            text += "\n" + render(made)
    write_output(sys.stdout, text)
    return 0


def _list_gpus() -> int:
    """Show the machines that ``--gpu`` knows; returns the exit status."""
    from moechat.hardware.profile_file import reference_names, reference_profile

    table = _table(("name", "left"), ("VRAM", "right"), ("RAM", "right"), ("machine", "left"))
    table.columns[0].no_wrap = True  # so that names can be copied
    for name in reference_names():
        profile = reference_profile(name)
        vram = "-" if profile.gpu is None else format_bytes(profile.gpu.vram.value)
        table.add_row(name, vram, format_bytes(profile.ram.value), profile.title)
    page = Page()
    page.console.print(table)
    write_output(sys.stdout, page.text)
    return 0


def render_summary(made: Plan, *, whole: bool) -> str:
    """The plan in a few lines.

    Args:
        made: The plan.
        whole: The rest of it follows.
    """
    page = Page()
    page.line(f"{made.model} with {made.experts_form} on {made.machine_title}", "bold")
    page.pairs(summary_rows(made))
    if not whole:
        page.line("-v shows all of it: memory part by part, layers, figures, other budgets", "dim")
    return page.text


def render(made: Plan) -> str:
    """All of the plan as text for people."""
    page = Page()
    page.line(_headline(made))
    page.line()
    page.console.print(_memory(made))
    if made.layers:
        page.line()
        _print_layers(page, made)
    if made.speed is not None:
        page.line()
        page.line(f"expected speed: {_basis(made, made.speed)}", "bold")
        page.console.print(_speed(made, made.speed))
    if made.other_budgets:
        page.line()
        page.console.print(_budgets(made))
    if made.notes:
        page.line()
        for note in made.notes:
            page.line(f"note: {note}", "dim")
    return page.text


def _table(*columns: tuple[str, JustifyMethod]) -> Table:
    from rich.table import Table

    table = Table(
        box=None,
        pad_edge=False,
        padding=(0, 2, 0, 0),
        header_style="dim",
        show_header=any(name for name, _ in columns),
    )
    for name, justify in columns:
        table.add_column(name, justify=justify, overflow="fold")
    return table


def _headline(made: Plan) -> str:
    limited = " (memory allows no more)" if made.context_limited else ""
    source = f" (the checkpoint has {made.source_format})" if made.source_format else ""
    packed = "" if made.kv_bits == LoadOptions.kv_bits else f"; attention cache: {made.kv_bits} bits"
    return (
        f"{made.model}: {_billions(made.parameters)} parameters, "
        f"{_billions(made.active_parameters)} for a token; "
        f"{made.expert_layers} layers of {made.experts} experts, {made.top_k} a token; "
        f"{made.experts_form}{source}, {format_bytes(made.all_expert_bytes)} of experts\n"
        f"dense weights: {made.dense_weights}{packed}\n"
        f"{made.machine_title}: {made.context:,} tokens of context{limited}, system {made.system}"
    )


def _billions(count: int) -> str:
    return f"{count / 1e9:.1f} billion" if count >= 1e9 else f"{count / 1e6:.1f} million"


def _memory(made: Plan) -> Table:
    table = _table(("", "left"), ("", "right"), ("", "left"))
    for tier in made.tiers:
        given = "given" if tier.given else "available"
        table.add_row(TIERS[tier.name], format_bytes(tier.budget), given, style="bold")
        for part in tier.parts:
            words: str = part.basis
            if part.name == "experts":
                words = f"{100 * min(1.0, part.nbytes / made.all_expert_bytes):.1f} % of all"
            elif part.name.startswith("experts") and made.far is not None:
                words = f"{100 * made.far.share:.0f} % of all"
            table.add_row(f"  {part.name}", format_bytes(part.nbytes), words)
        if tier.lent:
            table.add_row("  lent", format_bytes(tier.lent), _LENT)
        if tier.beyond:
            table.add_row("  page cache", format_bytes(tier.beyond), _BEYOND)
        if tier.budget - tier.used >= 1 << 20:
            table.add_row("  left", format_bytes(tier.budget - tier.used), "", style="dim")
    if made.far is not None and made.far.kind == "disk":
        table.add_row("disk", format_bytes(made.all_expert_bytes), "all experts", style="bold")
    elif made.far is not None and made.far.kind == "ram+disk":
        rest = made.all_expert_bytes * (1 - made.far.share)
        table.add_row("disk", format_bytes(rest), "experts that RAM does not hold", style="bold")
    return table


def _print_layers(page: Page, made: Plan) -> None:
    near = TIERS[made.near]
    groups = _groups(made.layers)
    page.line(f"experts kept in {near}: C of {made.experts} a layer, θ of each", "bold")
    if len(groups) <= _MOST_ROWS:
        table = _table(
            ("layers", "left"),
            ("C", "right"),
            ("θ", "right"),
            ("hits", "right"),
            ("", "left"),
        )
        for group in groups:
            first, last = group[0], group[-1]
            name = f"{first.layer}" if first is last else f"{first.layer}-{last.layer}"
            hits = sum(entry.hit_rate for entry in group) / len(group)
            kept = first.experts * first.split / made.experts
            theta = f"{first.split:.2f}" if first.experts else "-"
            table.add_row(name, f"{first.experts}", theta, f"{100 * hits:.0f} %", _bar(kept))
        page.console.print(table)
        return
    table = _table(("", "left"), ("", "left"), ("", "right"))
    experts = [entry.experts for entry in made.layers]
    splits = [entry.split for entry in made.layers if entry.experts]
    table.add_row("C", _heights([count / made.experts for count in experts]), _range(experts))
    table.add_row("θ", _heights([entry.split for entry in made.layers]), _range(splits))
    rates = [entry.hit_rate for entry in made.layers]
    table.add_row("hits", _heights(rates), _range([100 * rate for rate in rates], " %"))
    page.console.print(table)
    numbers = (
        f"layers {made.layers[0].layer} to {made.layers[-1].layer}; a full block is all experts, 1, 100 %"
    )
    page.line(numbers, "dim")


def _groups(layers: Sequence[LayerTargets]) -> list[list[LayerTargets]]:
    """Groups of neighbouring layers with the same targets."""
    return [list(group) for _, group in groupby(layers, key=lambda entry: (entry.experts, entry.blocks))]


def _range(values: Sequence[float], unit: str = "") -> str:
    if not values:
        return "-"
    digits = 0 if isinstance(values[0], int) or unit else 2
    low, high = f"{min(values):.{digits}f}", f"{max(values):.{digits}f}"
    return f"{low}{unit}" if low == high else f"{low}-{high}{unit}"


def _is_utf8() -> bool:
    return (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"


def _bar(share: float) -> str:
    full = round(share * _BAR)
    return ("█" * full + "░" * (_BAR - full)) if _is_utf8() else ("#" * full + "." * (_BAR - full))


def _heights(shares: Sequence[float]) -> str:
    glyphs = _HEIGHTS if _is_utf8() else _PLAIN_HEIGHTS
    return "".join(
        " " if share <= 0 else glyphs[min(len(glyphs) - 1, int(share * len(glyphs)))] for share in shares
    )


def _speed(made: Plan, speed: Speed) -> Table:
    decode, near = speed.decode, TIERS[made.near]
    table = _table(("", "left"), ("", "left"))
    table.add_row(
        "tokens a second",
        f"{_rate(decode.rate)}{_routing_range(speed)} after {speed.context:,} tokens of context",
        style="bold",
    )
    parts = {
        "dense": decode.dense,
        "experts": decode.experts,
        "waiting": decode.waiting,
        "head": decode.head,
    }
    shown = ", ".join(f"{name} {_milliseconds(seconds)}" for name, seconds in parts.items() if seconds > 0)
    table.add_row("a token", f"{_milliseconds(decode.seconds)}: {shown}")
    if speed.ttft_s:
        times = ", ".join(f"{format_seconds(s)} for {tokens:,}" for tokens, s in speed.ttft_s.items())
        table.add_row("first token", f"{times} tokens of prompt")
    if made.far is not None:
        table.add_row(
            "hit rate",
            f"{100 * decode.hit_rate:.0f} % of activated experts are kept in {near}, "
            f"{100 * decode.ready_rate:.0f} % are there with those fetched ahead",
        )
        place = {"ram": "RAM", "disk": "the disk", "ram+disk": "RAM and the disk"}[made.far.kind]
        table.add_row(f"from {place}", f"{format_bytes(decode.far_bytes)} of experts a token")
    if speed.cpu_range is not None:
        table.add_row("CPU rate", _cpu_range(made, speed.cpu_range))
    table.add_row("bottleneck", speed.bottleneck)
    if made.strategy:
        table.add_row("strategy", f"{made.strategy}: the fastest in a simulation")
    table.add_row("routing", made.statistics_source)
    for number, figure in enumerate(speed.figures):
        name, _, unit = figure.name.partition(", ")
        if unit == "s":
            value = f"{figure.value * 1e6:.1f} us"
        elif figure.value >= 1e12:
            value = f"{figure.value / 1e12:.1f} T{unit}"
        else:
            value = f"{figure.value / 1e9:.1f} G{unit}"
        shown = value.replace("bytes/s", "B/s").replace("operations/s", "op/s")
        table.add_row(
            "figures" if number == 0 else "", f"{name} {shown}, {_ORIGINS[figure.origin]}", style="dim"
        )
    return table


def _routing_range(speed: Speed) -> str:
    if speed.routing_range is None:
        return ""
    low, high = speed.routing_range.low, speed.routing_range.high
    return f" ({_rate(low.tokens_per_s)} to {_rate(high.tokens_per_s)}, by how the model routes)"


def _cpu_range(made: Plan, found: CpuRange) -> str:
    low, high = found.low, found.high
    rates = [end.bytes_per_s / 1e9 for end in (low, high)]
    speeds = [_rate(end.tokens_per_s) for end in (low, high)]
    changes = [_change(made, end) for end in (low, high) if _gain(end) >= _WORTH_NAMING]
    if made.speed is not None:
        changes += [
            f"at {end.bytes_per_s / 1e9:.0f} GB/s the bottleneck is {end.bottleneck}"
            for end in (low, high)
            if end.bottleneck.partition(":")[0] != made.speed.bottleneck.partition(":")[0]
        ]
    rate = f"{found.bytes_per_s / 1e9:.0f} GB/s ({rates[0]:.0f} to {rates[1]:.0f})"
    if not changes:
        same = all(not end.changed_layers and end.strategy == made.strategy for end in (low, high))
        changes = ["the plan stays the same" if same else "this plan stays within 1 % of the best"]
    return f"{rate}: {' to '.join(speeds)} tokens a second; {'; '.join(changes)}"


def _change(made: Plan, end: CpuEnd) -> str:
    other = f"another C or θ in {end.changed_layers} of {made.expert_layers} layers"
    if end.strategy != made.strategy:
        other = f"another strategy ({end.strategy})"
    return f"at {end.bytes_per_s / 1e9:.0f} GB/s {other} would be {100 * _gain(end):.1f} % faster"


def _gain(end: CpuEnd) -> float:
    """Speed that the plan made for this end has over the plan as it is."""
    return end.tokens_per_s / end.same_plan_tokens_per_s - 1


def _basis(made: Plan, speed: Speed) -> str:
    if any(figure.origin != "measured" for figure in speed.figures):
        count = len(speed.origins["measured"])
        if not count:
            return "estimate, not measured"
        return f"estimate, {count} of {len(speed.figures)} figures measured on {made.machine}"
    measured = f"estimate from measurements of {made.machine}"
    return measured + (", including this model's layers" if speed.times == "measured" else "")


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms" if seconds < 0.1 else format_seconds(seconds)


def _rate(rate: float) -> str:
    return f"{rate:.2g}" if rate < 1 else f"{rate:.1f}"


def _budgets(made: Plan) -> Table:
    near = TIERS[made.near]
    table = _table((f"with {near}", "right"), ("tokens a second", "right"), ("", "left"))
    rows = [(entry.nbytes, entry.tokens_per_s, _BUDGETS.get(entry.name, "")) for entry in made.other_budgets]
    assert made.speed is not None
    rows.append((made.tiers[0].budget, made.speed.tokens_per_s, "this plan"))
    for nbytes, rate, name in sorted(rows, key=lambda row: row[0]):
        shown = "does not fit" if rate is None else _rate(rate)
        table.add_row(format_bytes(nbytes), shown, name, style="bold" if name == "this plan" else None)
    return table
