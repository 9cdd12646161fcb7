"""The command line's grammar. Parsing and doing are apart: :func:`parse` returns what is to be done."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from moechat.cli.completion import complete_machines, complete_models, complete_systems
from moechat.cli.library_grammar import register_library
from moechat.cli.sessions_app import Action, sessions_app
from moechat.cli.settings_file import apply_settings, origins_of, read_settings
from moechat.configurator.systems import SYSTEMS
from moechat.errors import MoechatError, UsageError

_EPILOG = (
    "Exit status: 0 ok, 2 usage, 3 model not found or not allowed, 4 does not fit, 5 offline, "
    "6 store damaged, 7 graphics card lost, 130 interrupted."
)

_RUN_HELP = """\
Chat with a model; with a prompt or piped stdin: one answer, then exit.

The answer goes to stdout, all else to stderr. Stdin and a prompt make one prompt: stdin, a blank line, \
the prompt. A checkpoint directory is converted when it is first used, and kept; a model from the hub is \
downloaded once you have agreed to it.
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
    from moechat.config import user_paths

    try:
        defaults = apply_settings(command, read_settings(user_paths()))
    except MoechatError:
        # These are what helps to mend it.
        if not ({"-h", "--help", "--version"} & set(arguments) or arguments[:1] == ["doctor"]):
            raise
        defaults = {}
    # Not command.main(): it would turn interrupts and broken pipes into exit statuses of its own.
    try:
        with command.make_context("moechat", arguments, default_map=defaults) as context:
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
    context: typer.Context,
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            autocompletion=complete_models,
            help="'demo', an alias ('mixtral'), org/name[@revision], or a directory with a transformers "
            "checkpoint or a block store.",
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
        str | None,
        typer.Option(
            metavar="DEVICE",
            help="Where to compute: cpu, or cuda (cuda:1) for a graphics card; the card if a budget for it "
            "is given.",
        ),
    ] = None,
    vram: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Budget of graphics memory for everything, such as 12G; with --device cuda what is free if "
            "not given. Experts that do not fit are copied there when they are needed.",
        ),
    ] = None,
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
            autocompletion=complete_systems,
            help="How experts are kept and fetched ahead; the answer is the same for all. "
            f"One of: {', '.join(name for name in SYSTEMS if name != 'oracle')}.",
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
        typer.Option(
            metavar="TYPE", help="Type the dense part computes in: auto, float32, bfloat16 or float16."
        ),
    ] = "auto",
    dense_bits: Annotated[
        int,
        typer.Option(
            metavar="BITS",
            help="Bits of a dense weight: 16 as in the checkpoint; 8 or 4 are smaller, faster, less exact.",
        ),
    ] = 16,
    activation_bits: Annotated[
        int,
        typer.Option(
            metavar="BITS",
            help="How inputs meet quantised weights: integers of 16 or 8 bits, or 32: float32.",
        ),
    ] = 16,
    deterministic: Annotated[
        bool,
        typer.Option(
            "--deterministic",
            metavar="",
            help="On a graphics card: the same bits at every run; the CPU then computes no experts.",
        ),
    ] = False,
    tune: Annotated[
        bool | None,
        typer.Option(
            "--tune/--no-tune",
            metavar="",
            help="Time a few plans for experts that do not fit (some seconds), or take the computed one. If "
            "neither is given: once for each model and budget, on a terminal.",
            show_default=False,
        ),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--continue", "-c", metavar="", help="Go on with the last conversation: this model's, else any."
        ),
    ] = False,
    session: Annotated[
        int | None,
        typer.Option(metavar="ID", help="Go on with a conversation that `moechat sessions` lists."),
    ] = None,
    no_save: Annotated[
        bool,
        typer.Option(
            "--no-save",
            metavar="",
            help="Keep neither the conversation nor what is typed; so does MOECHAT_NO_SAVE=1.",
        ),
    ] = False,
    raw: Annotated[
        bool, typer.Option("--raw", metavar="", help="In a chat: answers as written, markdown not rendered.")
    ] = False,
    hide_thinking: Annotated[
        bool, typer.Option("--hide-thinking", metavar="", help="Do not show what the model thinks first.")
    ] = False,
    json: Annotated[
        bool,
        typer.Option(
            "--json", metavar="", help="Print one JSON object: text, tokens, finish reason, statistics."
        ),
    ] = False,
    jsonl: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Answer every prompt of a file (a text a line, or JSON lines; '-' is stdin), each with a "
            "JSON object on a line.",
        ),
    ] = None,
    stats: Annotated[
        bool, typer.Option("--stats", metavar="", help="Show statistics of each answer on stderr.")
    ] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", metavar="", help="Only the answer, and errors.")
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", metavar="", help="Say what is loaded, and how.")
    ] = False,
    yes: Annotated[
        bool,
        typer.Option("--yes", "-y", metavar="", help="Download the model without asking if it is not here."),
    ] = False,
) -> Action:
    from moechat.cli.options import RunOptions

    options = RunOptions(
        model=model,
        prompt=prompt,
        jsonl=jsonl,
        bits=bits,
        device=device,
        vram=vram,
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
        dense_bits=dense_bits,
        activation_bits=activation_bits,
        deterministic=deterministic,
        tune=tune,
        raw=raw,
        hide_thinking=hide_thinking,
        resume=resume,
        session=session,
        save=not no_save,
        json=json,
        stats=stats,
        quiet=quiet,
        verbose=verbose,
        yes=yes,
        origins=origins_of(context),
    )

    def action() -> int:
        from moechat.cli.run import run

        return run(options)

    return action


@app.command("bench", help=_BENCH_HELP, epilog=_BENCH_EXAMPLES)
def _bench(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            autocompletion=complete_models,
            help="As for run; or --synthetic.",
            show_default=False,
        ),
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
    dense_bits: Annotated[int, typer.Option(metavar="BITS", help="As for run.")] = 16,
    activation_bits: Annotated[int, typer.Option(metavar="BITS", help="As for run.")] = 16,
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


@app.command("plan", help=_PLAN_HELP, epilog=_PLAN_EXAMPLES)
def _plan(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            autocompletion=complete_models,
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
            autocompletion=complete_machines,
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
        int | None, typer.Option(metavar="BITS", help="Bits of an expert weight: 2, 3, 4, 8 or 16.")
    ] = None,
    dense_bits: Annotated[int, typer.Option(metavar="BITS", help="As for run.")] = 16,
    system: Annotated[
        str,
        typer.Option(
            metavar="NAME", autocompletion=complete_systems, help=f"As for run. One of: {', '.join(SYSTEMS)}."
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


@app.command("profile", help=_PROFILE_HELP, epilog=_PROFILE_EXAMPLES)
def _profile(
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            autocompletion=complete_models,
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
    bits: Annotated[int | None, typer.Option(metavar="BITS", help="As for run; with --model.")] = None,
    threads: Annotated[int | None, typer.Option(metavar="N", help="As for run; with --model.")] = None,
    dtype: Annotated[str, typer.Option(metavar="TYPE", help="As for run; with --model.")] = "auto",
    dense_bits: Annotated[int, typer.Option(metavar="BITS", help="As for run; with --model.")] = 16,
    activation_bits: Annotated[int, typer.Option(metavar="BITS", help="As for run; with --model.")] = 16,
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


@app.command("simulate", help=_SIMULATE_HELP, epilog=_SIMULATE_EXAMPLES)
def _simulate(
    trace: Annotated[
        Path,
        typer.Argument(metavar="TRACE", help="An .npz file with recorded routing.", show_default=False),
    ],
    systems: Annotated[
        str,
        typer.Option(metavar="S,S", help="NAME or NAME:KEY=VALUE,KEY=VALUE; the first one is compared with."),
    ] = ",".join(SYSTEMS),
    fractions: Annotated[
        str, typer.Option(metavar="F,F", help="Shares of all experts that fit, such as 0.25 or 1/4.")
    ] = "0.125,0.25,0.5",
    profile: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            autocompletion=complete_machines,
            help="A reference machine (moechat profile --list), a .toml file of that form, or, if not "
            "given, this machine as it was measured.",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            autocompletion=complete_models,
            help="A known shape, or a config.json: whose sizes count. The known model that has the trace's "
            "layers and experts if not given; a trace of others is mapped.",
        ),
    ] = None,
    bits: Annotated[int, typer.Option(metavar="BITS", help="Bits of an expert weight.")] = 4,
    near: Annotated[
        str | None,
        typer.Option(
            metavar="TIER",
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


@app.command("trace", help=_TRACE_HELP, epilog=_TRACE_EXAMPLES)
def _trace(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", autocompletion=complete_models, help="As for run.", show_default=False
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
        str, typer.Option(metavar="NAME", autocompletion=complete_systems, help="As for run.")
    ] = "auto",
    bits: Annotated[int | None, typer.Option(metavar="BITS", help="As for run.")] = None,
    ctx: Annotated[int | None, typer.Option(metavar="TOKENS", help="As for run.")] = None,
    temperature: Annotated[float | None, typer.Option(metavar="T", help="As for run.")] = None,
    seed: Annotated[int | None, typer.Option(metavar="N", help="As for run.")] = None,
    threads: Annotated[int | None, typer.Option(metavar="N", help="As for run.")] = None,
    dtype: Annotated[str, typer.Option(metavar="TYPE", help="As for run.")] = "auto",
    dense_bits: Annotated[int, typer.Option(metavar="BITS", help="As for run.")] = 16,
    activation_bits: Annotated[int, typer.Option(metavar="BITS", help="As for run.")] = 16,
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


app.add_typer(sessions_app, name="sessions")


@app.command(
    "doctor",
    help="Look for what is wrong or could be better here: one report to paste.\n\nThe home directory is "
    "written as ~, and what may be a secret is hidden. Nothing is measured or changed.\n\n--json: sections "
    "(names and values by title) and findings (level, fact, hint).",
)
def _doctor(
    json: Annotated[bool, typer.Option("--json", metavar="", help="Print JSON.")] = False,
) -> Action:
    def action() -> int:
        from moechat.cli.doctor import doctor

        return doctor(json=json)

    return action


register_library(app)
