"""The grammar of ``bench``."""

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
    complete_models,
    complete_shapes,
    complete_system_list,
)
from moechat.cli.sessions_app import Action

_BENCH_HELP = """\
Measure systems side by side on this machine.

Tokens are given instead of sampled, and the systems are measured in turns at each share of the experts \
that fits into memory. A synthetic shape has random weights; with --routing a recorded trace chooses its \
experts.

--json: format, model (name, source, type, expert_layers, experts, top_k, bits, expert_bytes, block_bytes, \
all_expert_bytes, vocabulary), machine (threads, isa, memory_bytes), tokens (prompt, fill, warmup, timed, \
runs), routing (source, trace; of a trace also mapping, locality_before, locality_after, locality_chance, \
filled), prediction (source; of the next router ahead, top_k, tokens, right_of_top_k, mean, chance; drawn \
ones accuracy, measured), link (kind, compute_rate, copy, bandwidth, compute_to_link, slows_computing), \
resident (ttft_s, tpot_s; null if it was not measured), cases (system, settings, fraction, pages, \
pages_bytes, filled, ttft_s, tpot_s, predicted_tpot_ms, predicted_ratio, hits, blocks_resident, \
blocks_prefetched, bytes_per_token, link_busy_share, stall_share, compute_share, dense_share, \
us_per_layer, floor_s), assumptions. Seconds have median, min and max; bytes, bytes a second, shares from \
0 to 1.
"""
_BENCH_EXAMPLES = """\
moechat bench demo --fractions 1/4,1/2

moechat bench --synthetic olmoe-1b-7b --layers 4 --systems "on-demand,auto,auto:split=0.5" --link sim:4x
"""


def register_bench(app: typer.Typer) -> None:
    """Add the command to the grammar."""
    app.command("bench", help=_BENCH_HELP, epilog=_BENCH_EXAMPLES)(_bench)


def _bench(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            autocompletion=answering(complete_models),
            help="As for run; or --synthetic.",
            show_default=False,
        ),
    ] = None,
    synthetic: Annotated[
        str | None,
        typer.Option(
            metavar="SHAPE",
            autocompletion=answering(complete_shapes),
            help="Random weights in a known model's shape: qwen3-30b-a3b, ...",
        ),
    ] = None,
    layers: Annotated[
        int | None, typer.Option(metavar="N", help="Decoder layers to keep of a shape; all if not given.")
    ] = None,
    vocabulary: Annotated[
        int | None, typer.Option(metavar="N", help="Vocabulary to keep of a shape; all if not given.")
    ] = None,
    directory: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Where synthetic stores are kept; else moechat's cache."),
    ] = None,
    bits: Annotated[
        int | None, typer.Option(metavar="BITS", autocompletion=answering(complete_bits), help="As for run.")
    ] = None,
    ram: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Memory for experts, such as 2G, instead of --fractions."),
    ] = None,
    fractions: Annotated[
        str | None,
        typer.Option(metavar="F,F", help="Shares of all experts that fit; 1/4,1/2 if not given."),
    ] = None,
    systems: Annotated[
        str,
        typer.Option(
            metavar="S,S",
            autocompletion=answering(complete_system_list),
            help="NAME or NAME:KEY=VALUE,KEY=VALUE; the first one is compared with.",
        ),
    ] = "mixtral-offloading,auto",
    routing: Annotated[
        Path | None, typer.Option(metavar="TRACE", help="An .npz file with recorded routing to replay.")
    ] = None,
    accuracy: Annotated[
        float, typer.Option(metavar="P", help="Share of a replay's experts that is predicted.")
    ] = 0.7,
    prompt_tokens: Annotated[int, typer.Option(metavar="N", help="Tokens of the prompt.")] = 128,
    tokens: Annotated[int, typer.Option(metavar="N", help="Tokens that are timed.")] = 64,
    warmup_tokens: Annotated[
        int, typer.Option(metavar="N", help="Tokens between the two, which are not timed.")
    ] = 32,
    fill_tokens: Annotated[
        int,
        typer.Option(
            metavar="N", help="Tokens of the trace before the prompt that run through the experts alone."
        ),
    ] = 0,
    runs: Annotated[int, typer.Option(metavar="N", help="Runs of each system.")] = 3,
    link: Annotated[
        str,
        typer.Option(
            metavar="LINK", help="file; sim:2G is 2 GiB/s; sim:16x is 16 times slower than computing."
        ),
    ] = "file",
    seed: Annotated[int, typer.Option(metavar="N", help="Of everything that is drawn.")] = 0,
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
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write that object to a file as well.")
    ] = None,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", metavar="", help="Only the result, and errors.")
    ] = False,
) -> Action:
    from moechat.cli.bench import BenchCommand, bench

    command = BenchCommand(
        model=model,
        synthetic=synthetic,
        layers=layers,
        vocabulary=vocabulary,
        directory=directory,
        bits=bits,
        ram=ram,
        fractions=fractions,
        systems=systems,
        routing=routing,
        accuracy=accuracy,
        prompt_tokens=prompt_tokens,
        tokens=tokens,
        warmup_tokens=warmup_tokens,
        fill_tokens=fill_tokens,
        runs=runs,
        link=link,
        seed=seed,
        threads=threads,
        dtype=dtype,
        dense_bits=dense_bits,
        activation_bits=activation_bits,
        json=json,
        out=out,
        quiet=quiet,
    )
    return lambda: bench(command)
