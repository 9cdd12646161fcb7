"""The grammar of ``run``."""

from __future__ import annotations

from typing import Annotated

import typer

from moechat.cli.completion import (
    answering,
    complete_activation_bits,
    complete_bits,
    complete_dense_bits,
    complete_devices,
    complete_dtypes,
    complete_models,
    complete_systems,
)
from moechat.cli.sessions_app import Action
from moechat.cli.setting_origins import origins_of
from moechat.configurator.systems import SYSTEMS

_RUN_HELP = """\
Chat with a model; with a prompt or piped stdin: one answer, then exit.

The answer goes to stdout, all else to stderr. Stdin and a prompt make one prompt: stdin, a blank line, \
the prompt. A checkpoint directory is converted when it is first used, and kept; a model from the hub is \
downloaded once you have agreed to it.

In a chat /help lists commands and keys; Ctrl-X Ctrl-E writes a message in your editor.
"""
_RUN_EXAMPLES = """\
moechat run demo

moechat run demo "Tell me a story about a fox" --max-tokens 200

moechat run ./some-model --ram 2G

git diff | moechat run ./some-model "Write a commit message for this change"
"""


def register_run(app: typer.Typer) -> None:
    """Add the command to the grammar."""
    app.command("run", help=_RUN_HELP, epilog=_RUN_EXAMPLES)(_run)


def _run(
    context: typer.Context,
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            autocompletion=answering(complete_models),
            help="'demo', an alias ('mixtral'), org/name\\[@revision], or a directory with a transformers "
            "checkpoint or a block store, or a GGUF file.",
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
            metavar="BITS",
            autocompletion=answering(complete_bits),
            help="Bits of an expert weight: 2, 3, 4, 8 or 16 (4 if it has to be converted).",
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            metavar="DEVICE",
            autocompletion=answering(complete_devices),
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
            autocompletion=answering(complete_systems),
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
            metavar="TYPE",
            autocompletion=answering(complete_dtypes),
            help="Type the dense part computes in: auto, float32, bfloat16 or float16.",
        ),
    ] = "auto",
    dense_bits: Annotated[
        int,
        typer.Option(
            metavar="BITS",
            autocompletion=answering(complete_dense_bits),
            help="Bits of a dense weight: 16 as in the checkpoint; 8 or 4 are smaller, faster, less exact.",
        ),
    ] = 16,
    activation_bits: Annotated[
        int,
        typer.Option(
            metavar="BITS",
            autocompletion=answering(complete_activation_bits),
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
        bool,
        typer.Option("--raw", metavar="", help="On a terminal: answers as written, markdown not rendered."),
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
            help="Answer every prompt of a file (a text a line, or JSON lines, which may have an id and "
            "settings; '-' is stdin), each with a JSON object on a line.",
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
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            metavar="",
            help="Only show how memory would be spent, as `moechat plan` does, or what would be downloaded.",
        ),
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
        dry_run=dry_run,
        origins=origins_of(context),
    )

    def action() -> int:
        from moechat.cli.run import run

        return run(options)

    return action
