"""The grammar of what records routing and replays it: simulate and trace."""

from __future__ import annotations

from pathlib import Path
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
    complete_system_list,
    complete_systems,
    complete_tiers,
)
from moechat.cli.sessions_app import Action
from moechat.configurator.systems import SYSTEMS

_SIMULATE_HELP = """\
Replay recorded routing under every system, on a machine that need not be here.

Cache, policies and transfers are the engine's own, on a simulated clock. No weights are needed: sizes come \
from the model that the trace fits, or from --model; times from --profile.

JSON: a list with one object for each system and fraction: system, fraction, hit_rate, top_hit_rate, \
tpot_ms, stall_ms, bytes_per_token, and more; trace, model, profile, accuracy, tokens and costs say what it \
was made from, in each object.
"""
_SIMULATE_EXAMPLES = """\
moechat simulate trace.npz --profile rtx3060-12g

moechat simulate trace.npz --profile rtx4090-24g --systems moepic,auto,auto:lookahead=2 --fractions 1/8,1/4

moechat simulate trace.npz --profile ssd-only-16g --json --plot time.png | jq ".[] | {system, tpot_ms}"
"""

_TRACE_HELP = """\
Record which experts a model's routers choose over many prompts.

The file holds the routing of all tokens of prompts and answers. bench --routing replays it, simulate \
computes what every system would make of it. Ctrl-C keeps what was recorded so far.
"""
_TRACE_EXAMPLES = """\
moechat trace demo --prompts prompts.txt --out demo.npz

head -50 questions.jsonl | moechat trace ./some-model --prompts - --max-tokens 300 --json
"""


def register_replay(app: typer.Typer) -> None:
    """Add the commands to the grammar."""
    app.command("simulate", help=_SIMULATE_HELP, epilog=_SIMULATE_EXAMPLES)(_simulate)
    app.command("trace", help=_TRACE_HELP, epilog=_TRACE_EXAMPLES)(_trace)


def _simulate(
    trace: Annotated[
        Path,
        typer.Argument(metavar="TRACE", help="An .npz file with recorded routing.", show_default=False),
    ],
    systems: Annotated[
        str,
        typer.Option(
            metavar="S,S",
            autocompletion=answering(complete_system_list),
            help="NAME or NAME:KEY=VALUE,KEY=VALUE; the first one is compared with.",
        ),
    ] = ",".join(SYSTEMS),
    fractions: Annotated[
        str, typer.Option(metavar="F,F", help="Shares of all experts that fit, such as 0.25 or 1/4.")
    ] = "0.125,0.25,0.5",
    profile: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            autocompletion=answering(complete_machines),
            help="A reference machine (moechat profile --list), a .toml file of that form, or, if not "
            "given, this machine as it was measured.",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            autocompletion=answering(complete_plannable),
            help="A known shape, or a config.json: whose sizes count. The known model that has the trace's "
            "layers and experts if not given; a trace of others is mapped.",
        ),
    ] = None,
    bits: Annotated[
        int,
        typer.Option(
            metavar="BITS", autocompletion=answering(complete_bits), help="Bits of an expert weight."
        ),
    ] = 4,
    near: Annotated[
        str | None,
        typer.Option(
            metavar="TIER",
            autocompletion=answering(complete_tiers),
            help="What computes: gpu (experts come from RAM) or ram (from the disk); gpu if there is one.",
        ),
    ] = None,
    link: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Bytes a second of the link, such as 12G, not the profile's."),
    ] = None,
    accuracy: Annotated[
        float,
        typer.Option(metavar="P", help="Share of the experts that is predicted; less in the first layers."),
    ] = 0.7,
    tokens: Annotated[int, typer.Option(metavar="N", help="Tokens that are timed.")] = 2000,
    warmup: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Tokens before them, which fill the cache and make the plans; 1000, or a third of a short "
            "trace, if not given.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", help="Of everything that is drawn.")] = 0,
    json: Annotated[
        bool, typer.Option("--json", metavar="", help="Print the results as a JSON list.")
    ] = False,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw time per token over memory: .png, .svg or .pdf."),
    ] = None,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", metavar="", help="Only the results, and errors.")
    ] = False,
) -> Action:
    from moechat.cli.simulate import SimulateCommand, simulate

    command = SimulateCommand(
        trace=trace,
        systems=systems,
        fractions=fractions,
        profile=profile,
        model=model,
        bits=bits,
        near=near,
        link=link,
        accuracy=accuracy,
        tokens=tokens,
        warmup=warmup,
        seed=seed,
        json=json,
        plot=plot,
        quiet=quiet,
    )
    return lambda: simulate(command)


def _trace(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", autocompletion=answering(complete_models), help="As for run.", show_default=False
        ),
    ],
    prompts: Annotated[
        str,
        typer.Option(
            metavar="FILE",
            help="One prompt a line, or JSON lines with messages, turns, prompt, question or text; "
            "'-' is stdin.",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(metavar="TRACE", help="The .npz file to write; MODEL.trace.npz here if not given."),
    ] = None,
    max_tokens: Annotated[int, typer.Option(metavar="N", help="Most tokens of an answer.")] = 128,
    limit: Annotated[
        int | None, typer.Option(metavar="N", help="The first prompts only; all if not given.")
    ] = None,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--completion",
            metavar="",
            help="Ask through the model's chat template, or continue the texts as they are; "
            "a chat where the model has a template.",
            show_default=False,
        ),
    ] = None,
    ram: Annotated[str | None, typer.Option(metavar="SIZE", help="As for run.")] = None,
    system: Annotated[
        str, typer.Option(metavar="NAME", autocompletion=answering(complete_systems), help="As for run.")
    ] = "auto",
    bits: Annotated[
        int | None, typer.Option(metavar="BITS", autocompletion=answering(complete_bits), help="As for run.")
    ] = None,
    ctx: Annotated[int | None, typer.Option(metavar="TOKENS", help="As for run.")] = None,
    temperature: Annotated[float | None, typer.Option(metavar="T", help="As for run.")] = None,
    seed: Annotated[int | None, typer.Option(metavar="N", help="As for run.")] = None,
    threads: Annotated[int | None, typer.Option(metavar="N", help="As for run.")] = None,
    dtype: Annotated[
        str, typer.Option(metavar="TYPE", autocompletion=answering(complete_dtypes), help="As for run.")
    ] = "auto",
    dense_bits: Annotated[
        int, typer.Option(metavar="BITS", autocompletion=answering(complete_dense_bits), help="As for run.")
    ] = 16,
    activation_bits: Annotated[
        int,
        typer.Option(metavar="BITS", autocompletion=answering(complete_activation_bits), help="As for run."),
    ] = 16,
    json: Annotated[
        bool, typer.Option("--json", metavar="", help="Print the result as one JSON object.")
    ] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", metavar="", help="Only the result, and errors.")
    ] = False,
) -> Action:
    from moechat.cli.trace import TraceCommand, trace

    command = TraceCommand(
        model=model,
        prompts=prompts,
        out=out,
        max_tokens=max_tokens,
        limit=limit,
        chat=chat,
        ram=ram,
        system=system,
        bits=bits,
        ctx=ctx,
        temperature=temperature,
        seed=seed,
        threads=threads,
        dtype=dtype,
        dense_bits=dense_bits,
        activation_bits=activation_bits,
        json=json,
        quiet=quiet,
    )
    return lambda: trace(command)
