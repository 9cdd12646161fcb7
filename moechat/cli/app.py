"""The command line's grammar. Parsing and doing are apart: :func:`parse` returns what is to be done."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from moechat.configurator.systems import SYSTEMS

Action = Callable[[], int]

_EPILOG = (
    "Exit status: 0 ok, 2 usage, 3 model not found or not allowed, 4 does not fit, 5 offline, "
    "6 store damaged, 130 interrupted."
)

_RUN_HELP = """\
Chat with a model; with a prompt or piped stdin: one answer, then exit.

The answer goes to stdout, all else to stderr. Stdin and a prompt make one prompt: stdin, a blank line, \
the prompt. A checkpoint directory is converted when it is first used, and kept.
"""
_RUN_EXAMPLES = """\
moechat run demo

moechat run demo "Tell me a story about a fox" --max-tokens 200

moechat run ./some-model --ram 2G

git diff | moechat run ./some-model "Write a commit message for this change"
"""

_BENCH_HELP = """\
Measure systems side by side on this machine.

Tokens are given instead of sampled, and the systems are measured in turns at each share of the experts \
that fits into memory. A synthetic shape has random weights; with --routing a recorded trace chooses its \
experts.
"""
_BENCH_EXAMPLES = """\
moechat bench demo --fractions 1/4,1/2

moechat bench --synthetic olmoe-1b-7b --layers 4 --systems "on-demand,auto,auto:split=0.5" --link sim:4x
"""

app = typer.Typer(
    name="moechat",
    help="Chat with Mixture-of-Experts models that are far larger than the GPU's memory.",
    epilog=_EPILOG,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def parse(arguments: list[str]) -> Action:
    """Understand the arguments.

    Returns:
        What is to be done; call it to get the exit status. For ``--help`` and ``--version`` it is done
        already.

    Raises:
        Exception: A usage error, with ``exit_code`` and ``format_message()``.
    """
    command = typer.main.get_command(app)
    if "_MOECHAT_COMPLETE" in os.environ:  # a shell asks for completions: typer answers that itself
        command.main(args=arguments, prog_name="moechat")
    # Not command.main(): it would turn interrupts and broken pipes into exit statuses of its own.
    try:
        with command.make_context("moechat", arguments) as context:
            action: Action = command.invoke(context)
            return action
    except typer.Exit as done:
        status = done.exit_code
        return lambda: status


def _show_version(wanted: bool) -> None:
    if wanted:
        from moechat import __version__

        typer.echo(f"moechat {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", metavar="", callback=_show_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    pass


@app.command("run", help=_RUN_HELP, epilog=_RUN_EXAMPLES)
def _run(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="'demo', or a directory with a transformers checkpoint or a block store.",
            show_default=False,
        ),
    ],
    prompt: Annotated[
        str | None,
        typer.Argument(
            metavar="PROMPT",
            help="One question; '-' reads it from stdin. Without it: a chat.",
            show_default=False,
        ),
    ] = None,
    bits: Annotated[
        int | None,
        typer.Option(
            metavar="BITS", help="Bits of an expert weight: 2, 3, 4, 8 or 16 (4 if it has to be converted)."
        ),
    ] = None,
    device: Annotated[
        str, typer.Option(metavar="DEVICE", help="Where to compute; this version knows 'cpu'.")
    ] = "cpu",
    ram: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Memory budget of the whole process, such as 2G or 800M; what is available if not given. "
            "Experts that do not fit are read from disk when they are needed.",
        ),
    ] = None,
    system: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="How experts are kept and fetched ahead; the answer is the same for all. "
            f"One of: {', '.join(SYSTEMS)}.",
        ),
    ] = "auto",
    ctx: Annotated[
        int | None,
        typer.Option(metavar="TOKENS", help="Context length; the model's own, or what memory allows."),
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(metavar="N", help="Most tokens of an answer.")] = None,
    temperature: Annotated[
        float | None,
        typer.Option(metavar="T", help="0 is greedy; the model's own if not given, as for the next four."),
    ] = None,
    top_p: Annotated[
        float | None, typer.Option(metavar="P", help="Nucleus probability, above 0 to 1.")
    ] = None,
    top_k: Annotated[int | None, typer.Option(metavar="K", help="Candidates kept; 0 keeps all.")] = None,
    min_p: Annotated[
        float | None,
        typer.Option(metavar="P", help="Least probability relative to the likeliest token, 0 to 1."),
    ] = None,
    repetition_penalty: Annotated[
        float | None, typer.Option(metavar="R", help="Above 1 discourages what was said before.")
    ] = None,
    seed: Annotated[int | None, typer.Option(metavar="N", help="Repeats a draw.")] = None,
    system_prompt: Annotated[
        str | None, typer.Option(metavar="TEXT", help="What the model is told before the conversation.")
    ] = None,
    completion: Annotated[
        bool,
        typer.Option(
            "--completion", metavar="", help="Continue the prompt as it is, without the chat template."
        ),
    ] = False,
    threads: Annotated[
        int | None, typer.Option(metavar="N", help="CPU threads; the physical cores if not given.")
    ] = None,
    dtype: Annotated[
        str,
        typer.Option(metavar="TYPE", help="Type of the dense weights: auto, float32, bfloat16 or float16."),
    ] = "auto",
    json: Annotated[
        bool,
        typer.Option(
            "--json", metavar="", help="Print one JSON object: text, tokens, finish reason, statistics."
        ),
    ] = False,
    stats: Annotated[
        bool, typer.Option("--stats", metavar="", help="Show statistics of each answer on stderr.")
    ] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", metavar="", help="Only the answer, and errors.")
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", metavar="", help="Say what is loaded, and how.")
    ] = False,
) -> Action:
    from moechat.cli.options import RunOptions

    options = RunOptions(
        model=model,
        prompt=prompt,
        bits=bits,
        device=device,
        ram=ram,
        system=system,
        ctx=ctx,
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        system_prompt=system_prompt,
        completion=completion,
        threads=threads,
        dtype=dtype,
        json=json,
        stats=stats,
        quiet=quiet,
        verbose=verbose,
    )

    def action() -> int:
        from moechat.cli.run import run

        return run(options)

    return action


@app.command("bench", help=_BENCH_HELP, epilog=_BENCH_EXAMPLES)
def _bench(
    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="As for run; or --synthetic.", show_default=False),
    ] = None,
    synthetic: Annotated[
        str | None,
        typer.Option(metavar="SHAPE", help="Random weights in a known model's shape: qwen3-30b-a3b, ..."),
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
    bits: Annotated[int | None, typer.Option(metavar="BITS", help="As for run.")] = None,
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
        typer.Option(metavar="S,S", help="NAME or NAME:KEY=VALUE,KEY=VALUE; the first one is compared with."),
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
    dtype: Annotated[str, typer.Option(metavar="TYPE", help="As for run.")] = "auto",
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
        json=json,
        out=out,
        quiet=quiet,
    )
    return lambda: bench(command)
