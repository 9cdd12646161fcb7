"""The arguments of ``moechat simulate`` and ``moechat trace``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from moechat.chat.chat_options import require_setting
from moechat.cli.completion.completers import (
    complete_bits,
    complete_models,
    complete_plannable,
    complete_tiers,
)
from moechat.cli.options import MemoryOptions
from moechat.cli.parameters import Json, Plot, Quiet, ReplayedOn, Seed, Systems, argument, flag, option
from moechat.configurator.systems import SYSTEMS
from moechat.options import as_flag
from moechat.validation import require_whole

_ALL_SYSTEMS = ",".join(SYSTEMS)
_SIMULATE_HELP = """\
Replay recorded routing under every system, for this or another machine.

Runs the engine's cache, policies and transfers on a simulated clock. No weights are needed: sizes come \
from the model that matches the trace, or from --model; times come from --profile.

JSON: a list with one object for each system and fraction: system, fraction, hit_rate, top_hit_rate, \
tpot_ms, stall_ms, bytes_per_token, and more; each object also has its inputs: trace, model, profile, \
accuracy, tokens and costs.
"""
_SIMULATE_EXAMPLES = """\
moechat simulate trace.npz --profile rtx3060-12g

moechat simulate trace.npz --profile rtx4090-24g --systems moepic,auto,auto:lookahead=2 --fractions 1/8,1/4

moechat simulate trace.npz --profile ssd-only-16g --json --plot time.png | jq ".[] | {system, tpot_ms}"
"""
_TRACE_HELP = """\
Record the experts that a model's routers choose over many prompts.

The file holds the routing of all tokens of prompts and answers. `moechat bench --routing` replays it; \
`moechat simulate` computes its times under every system. Ctrl-C keeps the prompts recorded so far.
"""
_TRACE_EXAMPLES = """\
moechat trace demo --prompts prompts.txt --out demo.npz

head -50 questions.jsonl | moechat trace ./some-model --prompts - --max-tokens 300 --json
"""


@dataclass(frozen=True, kw_only=True)
class SimulateCommand:
    """The arguments of ``moechat simulate``."""

    HELP: ClassVar[str] = _SIMULATE_HELP
    EXAMPLES: ClassVar[str] = _SIMULATE_EXAMPLES

    trace: Annotated[Path, argument("TRACE", "An .npz file with recorded routing.")]
    systems: Systems = _ALL_SYSTEMS
    fractions: Annotated[str, option("F,F", "Shares of all experts that fit, such as 0.25 or 1/4.")] = (
        "0.125,0.25,0.5"
    )
    profile: ReplayedOn = None
    model: Annotated[
        str | None,
        option(
            "MODEL",
            "Model that the sizes come from: a known shape, or a config.json; if not given, the known "
            "model with the layers and experts of the trace. A trace of another shape is mapped to it.",
            complete_plannable,
        ),
    ] = None
    bits: Annotated[int, option("BITS", "Bits of an expert weight.", complete_bits)] = 4
    near: Annotated[
        str | None,
        option(
            "TIER",
            "Tier that computes: gpu (experts come from RAM) or ram (from the disk); gpu if there is one.",
            complete_tiers,
        ),
    ] = None
    link: Annotated[
        str | None, option("SIZE", "Bytes a second of the link, such as 12G, instead of the profile's.")
    ] = None
    accuracy: Annotated[float, option("P", "Share of correct predictions; lower in the first layers.")] = 0.7
    tokens: Annotated[int, option("N", "Tokens that are timed.")] = 2000
    warmup: Annotated[
        int | None,
        option(
            "N",
            "Untimed tokens before them, which fill the cache and give the statistics for plans; 1000, "
            "or a third of a short trace, if not given.",
        ),
    ] = None
    seed: Seed = 0
    wide: Annotated[bool, flag("Show all columns.", "--wide")] = False
    json: Annotated[bool, flag("Print the results as a JSON list.", "--json")] = False
    plot: Plot = None
    quiet: Quiet = False


@dataclass(frozen=True, kw_only=True)
class TraceCommand(MemoryOptions):
    """The arguments of ``moechat trace``.

    Raises:
        UsageError: A value is out of range.
    """

    HELP: ClassVar[str] = _TRACE_HELP
    EXAMPLES: ClassVar[str] = _TRACE_EXAMPLES

    model: Annotated[str, argument("MODEL", "As for run.", complete_models)]
    prompts: Annotated[
        str,
        option(
            "FILE",
            "One prompt a line, or JSON lines with messages, turns, prompt, question or text; '-' is stdin.",
            show_default=False,
        ),
    ]
    out: Annotated[
        Path | None, option("TRACE", "The .npz file to write; MODEL.trace.npz here if not given.")
    ] = None
    max_tokens: Annotated[int, option("N", "Most tokens of an answer.")] = 128
    limit: Annotated[int | None, option("N", "Use only the first prompts; all if not given.")] = None
    chat: Annotated[
        bool | None,
        flag(
            "Use the model's chat template, or continue the texts as they are; the default is --chat if "
            "the model has a template.",
            "--chat/--completion",
            show_default=False,
        ),
    ] = None
    gates: Annotated[
        bool,
        flag(
            "Also record the probabilities that the routers give all experts, and the embeddings of the "
            "tokens. A file with them is larger: 2 bytes for each expert, layer and token.",
            "--gates",
        ),
    ] = False
    temperature: Annotated[float | None, option("T", "As for run.")] = None
    seed: Annotated[int | None, option("N", "As for run.")] = None
    json: Json = False
    quiet: Quiet = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_causal_system()
        require_setting("max_tokens", self.max_tokens, as_flag)
        require_setting("temperature", self.temperature, as_flag)
        require_setting("seed", self.seed, as_flag)
        if self.limit is not None:
            require_whole("--limit", self.limit, 1, 1 << 62)
