"""``moechat plan --list-models``: the known models on a machine as a table, best first."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from moechat.cli.commands.download_text import ASSUMED, short_rate
from moechat.cli.commands.library_list import write_json
from moechat.cli.commands.plan_arguments import PlanCommand
from moechat.cli.commands.plan_summary import TIERS
from moechat.cli.terminal.consoles import write_output
from moechat.cli.terminal.load_progress import LoadProgress, format_bytes
from moechat.cli.terminal.page import Page

if TYPE_CHECKING:
    from moechat.fetch.known_models import KnownModel
    from moechat.planning.machine import Machine

_FAR: Mapping[str | None, str] = {None: "", "ram": ", RAM", "ram+disk": ", RAM, disk", "disk": ", disk"}
_COLUMNS = (
    ("name", "left"),
    ("weights", "right"),
    ("a token", "right"),
    ("on disk", "right"),
    ("bits", "right"),
    ("tokens/s", "right"),
    ("experts in", "left"),
)
# What a second command has to repeat of this one.
_REPEATED = ("gpu", "ram", "vram", "device", "bits", "ctx")


def list_models(command: PlanCommand) -> int:
    """Show the models; returns the exit status.

    Raises:
        UsageError: There is no such machine, or it lacks the GPU of the options.
    """
    with LoadProgress(quiet=command.json) as progress:
        progress.say("estimating the speed of known models")
        from moechat.fetch.known_models import known_models
        from moechat.planning.machine import find_machine

        options = command.load_options
        wants_gpu = None if options.device is None and options.vram is None else options.gpu is not None
        machine = find_machine(command.gpu, gpu=wants_gpu)
        profile = None if machine.here else machine.profile
        models = known_models(profile=profile, load=options.given)
    if command.json:
        write_json([_json(model) for model in models])
        return 0
    write_output(sys.stdout, _text(models, machine, command))
    return 0


def _text(models: Sequence[KnownModel], machine: Machine, command: PlanCommand) -> str:
    page = Page()
    runs = [model for model in models if model.expected is not None]
    refused = [model for model in models if model.expected is None]
    near = TIERS["vram" if machine.near == "gpu" else "ram"]
    budgets = [f"{name} {size}" for name, size in (("VRAM", command.vram), ("RAM", command.ram)) if size]
    page.paragraph(f"known models on {', '.join([machine.title, *budgets])}; the best choices first", "bold")
    if runs:
        page.table("", _COLUMNS, [_row(model) for model in runs], no_wrap=True)
        if refused:
            page.line()
            page.paragraph("not here: " + ", ".join(_refusal(model, near) for model in refused))
    elif least := [model for model in refused if model.least_bytes is not None]:
        smallest = min(least, key=lambda model: model.least_bytes or 0)
        page.paragraph(
            f"none of the {len(refused)} known models fits; the smallest is {smallest.name}: it needs "
            f"{format_bytes(smallest.least_bytes or 0)} of {near} at least"
        )
    else:
        page.paragraph(f"none of the {len(refused)} known models runs: {refused[0].refused}")
    page.line()
    for sentence in _remarks(runs, machine, command):
        page.paragraph(sentence, style="dim")
    return page.text


def _row(model: KnownModel) -> tuple[str, ...]:
    found = model.expected
    assert found is not None
    return (
        model.name,
        _count(found.parameters),
        _count(found.active_parameters),
        format_bytes(found.store_bytes),
        str(found.bits),
        short_rate(found.tokens_per_s),
        TIERS[found.near] + _FAR[found.far],
    )


def _refusal(model: KnownModel, near: str) -> str:
    if model.least_bytes is None:
        return f"{model.name} ({model.refused})"
    return f"{model.name} ({format_bytes(model.least_bytes)} of {near} at least)"


def _remarks(runs: Sequence[KnownModel], machine: Machine, command: PlanCommand) -> list[str]:
    if not runs:
        return ["`moechat run demo` needs hardly any memory; `moechat search WORDS` finds other models"]
    first = runs[0].name
    repeated = _options(command)
    remarks = [
        "tokens/s are estimates; a download is about as large as the model is on disk where the hub has "
        "files of 4 bits, and up to four times as large from the maker's files",
        f"next: `moechat plan {first}{repeated}` shows what limits the speed",
    ]
    if machine.here:
        remarks[-1] += f", `moechat run {first}{repeated}` shows the download, asks, and begins a chat"
    else:
        remarks[-1] += f", on that machine `moechat run {first}` shows the download, asks, and begins a chat"
    if any(model.expected is not None and model.expected.basis == "assumed" for model in runs):
        remarks.append(ASSUMED)
    return remarks


def _options(command: PlanCommand) -> str:
    words = []
    for name in _REPEATED:
        value: Any = getattr(command, name)
        if value is not None:
            words += [f"--{name}", shlex.quote(str(value))]
    return "".join(f" {word}" for word in words)


def _count(parameters: int) -> str:
    billions = parameters / 1e9
    return f"{billions:.0f} B" if billions >= 100 else f"{billions:.1f} B"


def _json(model: KnownModel) -> dict[str, Any]:
    return {
        "name": model.name,
        "repository": model.repository,
        "speed": None if model.expected is None else model.expected.to_json(),
        "refused": model.refused or None,
        "least_bytes": model.least_bytes,
    }
