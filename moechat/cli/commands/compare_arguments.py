"""The arguments of ``moechat compare``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from moechat.cli.completion.completers import complete_models, complete_system_list
from moechat.cli.options import ModelOptions
from moechat.cli.parameters import Json, Out, Plot, Quiet, ReplayedOn, Seed, argument, flag, option
from moechat.errors import UsageError

_HELP = """\
Run a model with every system on this machine, draw their times, and say which to use.

All systems decode the same given tokens, in turns, with 1/8, 1/4 and 1/2 of the experts in memory. Ctrl-C \
shows what has been measured so far.

--simulate computes the times instead, for this machine's profile or another machine, without weights: for a \
model whose routing is drawn as its family routes, or for a recorded trace.

--json: format, kind, complete, model (name, bits, expert_layers, experts, top_k, all_expert_bytes; if \
measured also source, type, expert_bytes, block_bytes, vocabulary), machine (name; if measured also threads, \
isa, memory_bytes; if simulated also title, near), tokens (prompt, warmup, timed, runs), floor (ms, runs), \
systems (system, also), cases (system, fraction, bytes, ms, low, high, runs, first_token_s, ready), advice \
(fraction, use, ms, equal, next, faster_by, over_floor), assumptions. Times of tokens are in milliseconds, \
shares from 0 to 1. kind is measured or simulated; complete is false after Ctrl-C; floor is with all experts \
in memory; also has other systems with the same effect here; unknown values are null.
"""
_EXAMPLES = """\
moechat compare demo

moechat compare ./some-model --ram 8G --plot systems.png

moechat compare mixtral-8x7b --simulate --profile rtx3060-12g
"""


@dataclass(frozen=True, kw_only=True)
class CompareCommand(ModelOptions):
    """The arguments of ``moechat compare``.

    Raises:
        UsageError: A value is out of range, or two options exclude each other.
    """

    HELP: ClassVar[str] = _HELP
    EXAMPLES: ClassVar[str] = _EXAMPLES

    model: Annotated[
        str | None,
        argument(
            "MODEL", "As for run; with --simulate as for plan, or not needed with --trace.", complete_models
        ),
    ] = None
    systems: Annotated[
        str | None,
        option(
            "S,S",
            "NAME or NAME:KEY=VALUE,KEY=VALUE; all that can run here if not given.",
            complete_system_list,
        ),
    ] = None
    fractions: Annotated[
        str | None, option("F,F", "Shares of all experts that fit; 1/8,1/4,1/2 if not given.")
    ] = None
    ram: Annotated[
        str | None,
        option("SIZE", "Budget of the whole process as for run, such as 8G, instead of --fractions."),
    ] = None
    runs: Annotated[
        int | None,
        option("N", "Runs of each system; 3 if not given, and 2 more of those that are close; slow ones 1."),
    ] = None
    tokens: Annotated[
        int | None,
        option("N", "Tokens that are timed in a run; 16 to 128 by the model's speed if not given."),
    ] = None
    simulate: Annotated[bool, flag("Simulate instead of running.", "--simulate")] = False
    profile: ReplayedOn = None
    trace: Annotated[
        Path | None,
        option("TRACE", "With --simulate: an .npz file with recorded routing; drawn if not given."),
    ] = None
    seed: Seed = 0
    json: Json = False
    out: Out = None
    plot: Plot = None
    quiet: Quiet = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.simulate and (self.profile is not None or self.trace is not None):
            given = "--trace" if self.profile is None else "--profile"
            raise UsageError(
                f"{given} is for simulations", hint="add --simulate; without it, MODEL runs here"
            )
        if self.model is None and self.trace is None:
            raise UsageError(
                "there is no model to compare the systems with",
                hint="moechat compare demo, or with --simulate a model or a --trace",
            )
        if self.ram is not None and self.fractions is not None:
            raise UsageError("--ram and --fractions exclude each other: both set how much fits")
        if self.simulate and self.ram is not None:
            raise UsageError(
                "--ram is for runs on this machine", hint="give --simulate shares with --fractions"
            )
        if self.simulate and self.runs is not None:
            raise UsageError(
                "--runs is for runs on this machine", hint="every simulation gives the same times"
            )
