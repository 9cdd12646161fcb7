"""The grammar of the commands that look before a model runs: plan and profile."""

from __future__ import annotations

from typing import Annotated

import typer

from moechat.cli.completion import (
    answering,
    complete_activation_bits,
    complete_bits,
    complete_dense_bits,
    complete_dtypes,
    complete_machines,
    complete_models,
    complete_plannable,
    complete_systems,
)
from moechat.cli.sessions_app import Action
from moechat.configurator.systems import SYSTEMS
from moechat.errors import UsageError

_PLAN_HELP = """\
Show what a model would take and how fast it would be, without loading it.

With --vram or --gpu for a graphics card, else for this machine as `moechat run` uses it. Nothing of the \
model has to be here: the shapes of known models are built in, and a config.json is enough for others.

--json: model (name, type, parameters, active_parameters, bits, dtype, dense_bits, weights, expert_layers, \
experts, top_k, blocks_per_expert, expert_bytes), machine (name, title), system, context (tokens, \
limited_by_memory), memory (near, tiers, far, pages, resident_share), layers (layer, experts, blocks, \
split, hit_rate, exposed_s), statistics (tokens, source), speed (basis, times, context, tokens_per_s, \
tpot_s, parts_s, hit_rate, ready_rate, far_bytes_per_token, ttft_s, bottleneck, figures, costs_s), \
other_budgets (name, bytes, tokens_per_s), notes. Bytes, seconds, shares from 0 to 1; speed is null where \
the machine is not known.
"""
_PLAN_EXAMPLES = """\
moechat plan mixtral --vram 12G --gpu rtx3060-12g

moechat plan qwen3 --ram 8G

moechat plan ./config.json --gpu rtx4090-24g --ctx 8192 --json

moechat plan --list-gpus
"""

_PROFILE_HELP = """\
Measure this machine, once, and show what it can do.

Disk, memory and expert kernels, alone and together, in about 20 seconds; the figures are kept for plans and \
choices, and shown again without measuring. With --model also what a layer of that model takes.

--json: format, kind, key, profile (name, title, cpu, cores, isa, ram, ram_bandwidth, expert_rate, \
expert_rate_together, expert_flops, links, gpu, created, key), missing, remarks, facts, seconds, age_s, \
fresh, model_times; with --list: format, kind, saved, reference. A link has kind, bandwidth and latencies by \
bytes asked for at once, latency (of the fewest) and together (its rate while the CPU computes). Figures are \
objects of value, origin and source, in bytes, seconds, bytes and operations a second.
"""
_PROFILE_EXAMPLES = """\
moechat profile

moechat profile --refresh --json

moechat profile --model demo
"""


def register_plan(app: typer.Typer) -> None:
    """Add the commands to the grammar."""
    app.command("plan", help=_PLAN_HELP, epilog=_PLAN_EXAMPLES)(_plan)
    app.command("profile", help=_PROFILE_HELP, epilog=_PROFILE_EXAMPLES)(_profile)


def _plan(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            autocompletion=answering(complete_plannable),
            help="As for run; or a known shape, a directory with a config.json, or such a file.",
            show_default=False,
        ),
    ] = None,
    vram: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="Graphics memory to use, such as 12G; what the card has free if not given."
        ),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            autocompletion=answering(complete_machines),
            help="Plan for a reference machine, or for one in a .toml file of that form, "
            "instead of this one.",
        ),
    ] = None,
    ram: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="RAM of the whole process; what there is if not given."),
    ] = None,
    ctx: Annotated[
        int | None,
        typer.Option(metavar="TOKENS", help="Context length; the model's own, or what memory allows."),
    ] = None,
    bits: Annotated[
        int | None,
        typer.Option(
            metavar="BITS",
            autocompletion=answering(complete_bits),
            help="Bits of an expert weight: 2, 3, 4, 8 or 16.",
        ),
    ] = None,
    dense_bits: Annotated[
        int, typer.Option(metavar="BITS", autocompletion=answering(complete_dense_bits), help="As for run.")
    ] = 16,
    system: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            autocompletion=answering(complete_systems),
            help=f"As for run. One of: {', '.join(SYSTEMS)}.",
        ),
    ] = "auto",
    json: Annotated[
        bool, typer.Option("--json", metavar="", help="Print the plan as one JSON object.")
    ] = False,
    list_gpus: Annotated[
        bool, typer.Option("--list-gpus", metavar="", help="Show the reference machines and exit.")
    ] = False,
) -> Action:
    from moechat.cli.plan import PlanCommand, plan
    from moechat.cli.plan import list_gpus as show_gpus

    if list_gpus:
        return show_gpus
    if model is None:
        raise UsageError(
            "there is no MODEL to plan for",
            hint="moechat plan mixtral; moechat plan --help lists the options",
        )
    command = PlanCommand(
        model=model,
        vram=vram,
        gpu=gpu,
        ram=ram,
        ctx=ctx,
        bits=bits,
        dense_bits=dense_bits,
        system=system,
        json=json,
    )
    return lambda: plan(command)


def _profile(
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            autocompletion=answering(complete_models),
            help="Time the layers of a model as well; named as for run.",
        ),
    ] = None,
    refresh: Annotated[
        bool, typer.Option("--refresh", metavar="", help="Measure again, even if figures are kept.")
    ] = False,
    list_: Annotated[
        bool,
        typer.Option("--list", metavar="", help="List kept profiles, and those of machines to plan for."),
    ] = False,
    bits: Annotated[
        int | None,
        typer.Option(
            metavar="BITS", autocompletion=answering(complete_bits), help="As for run; with --model."
        ),
    ] = None,
    threads: Annotated[int | None, typer.Option(metavar="N", help="As for run; with --model.")] = None,
    dtype: Annotated[
        str,
        typer.Option(
            metavar="TYPE", autocompletion=answering(complete_dtypes), help="As for run; with --model."
        ),
    ] = "auto",
    dense_bits: Annotated[
        int,
        typer.Option(
            metavar="BITS", autocompletion=answering(complete_dense_bits), help="As for run; with --model."
        ),
    ] = 16,
    activation_bits: Annotated[
        int,
        typer.Option(
            metavar="BITS",
            autocompletion=answering(complete_activation_bits),
            help="As for run; with --model.",
        ),
    ] = 16,
    json: Annotated[
        bool, typer.Option("--json", metavar="", help="Print the result as one JSON object.")
    ] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", metavar="", help="Only the result, and errors.")
    ] = False,
) -> Action:
    from moechat.cli.profile import ProfileCommand, profile

    command = ProfileCommand(
        model=model,
        refresh=refresh,
        list=list_,
        bits=bits,
        threads=threads,
        dtype=dtype,
        dense_bits=dense_bits,
        activation_bits=activation_bits,
        json=json,
        quiet=quiet,
    )
    return lambda: profile(command)
