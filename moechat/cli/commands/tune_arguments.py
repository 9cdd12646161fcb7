"""The arguments of ``moechat tune``."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar

from moechat.cli.completion.completers import complete_models
from moechat.cli.parameters import Json, Quiet, Seed, argument, flag, option
from moechat.tune.settings import BASE_ROUTERS, INITIAL_COUNTS, TuneSettings
from moechat.validation import require_number, require_whole

_HELP = """\
Fine-tune a model so that each sequence uses few experts (MELINOE).

The tuned checkpoint misses its cache less often, under every system, and answers differently from the \
original. Routers are trained in full, and adapters on the experts' up and down projections, which are \
merged at the end. Ctrl-C keeps the state: the same command goes on.

The file has one JSON object a line: messages (a chat), prompt with answer, or text. See moechat help tune. \
Needs the packages of pip install "moechat[tune]". Several GPUs: \
accelerate launch --multi_gpu -m moechat tune MODEL --data FILE.

--json: settings, and before and after on held-out data: perplexity, misses for each token and layer by \
capacity, entropies in bits.
"""
_EXAMPLES = """\
moechat tune demo --data chats.jsonl --learning-rate 3e-4

moechat tune ./OLMoE-1B-7B --data dolly.jsonl --out olmoe-tuned && moechat run ./olmoe-tuned
"""


@dataclass(frozen=True, kw_only=True)
class TuneCommand:
    """The arguments of ``moechat tune``.

    Raises:
        UsageError: A value is out of range.
    """

    HELP: ClassVar[str] = _HELP
    EXAMPLES: ClassVar[str] = _EXAMPLES

    model: Annotated[
        str,
        argument(
            "MODEL",
            "A checkpoint directory, or a model as for run; the weights of a store are dequantised.",
            complete_models,
        ),
    ]
    data: Annotated[
        Path, option("FILE", "JSON lines with messages, prompt and answer, or text.", show_default=False)
    ]
    out: Annotated[
        Path | None, option("DIR", "Directory of the tuned checkpoint; MODEL-tuned here if not given.")
    ] = None
    epochs: Annotated[int, option("N", "Passes over the data.")] = TuneSettings.epochs
    learning_rate: Annotated[float, option("RATE", "Peak rate of AdamW.")] = TuneSettings.learning_rate
    warmup: Annotated[float, option("SHARE", "Share of the steps in which the rate rises.")] = (
        TuneSettings.warmup
    )
    weight_decay: Annotated[float, option("X", "Of AdamW.")] = TuneSettings.weight_decay
    clip: Annotated[float, option("X", "Largest norm of the gradient; 0: any.")] = TuneSettings.clip
    batch: Annotated[int, option("N", "Sequences of a step, over all processes.")] = TuneSettings.batch
    micro_batch: Annotated[
        int, option("N", "Sequences that are computed together; lower takes less memory.")
    ] = 4
    max_tokens: Annotated[int, option("N", "Longest sequence; longer ones are cut.")] = (
        TuneSettings.max_tokens
    )
    cache_weight: Annotated[
        float, option("X", "Weight of the cache simulation loss; 0.05 for long reasoning.")
    ] = TuneSettings.cache_weight
    rank_weight: Annotated[
        float, option("X", "Weight of the rank matching loss, which keeps the order of the base router.")
    ] = TuneSettings.rank_weight
    gamma: Annotated[float, option("X", "Decay of the simulated cache's counts; 1 is LFU.")] = (
        TuneSettings.gamma
    )
    margin: Annotated[float, option("X", "Margin of the rank matching loss.")] = TuneSettings.margin
    capacity: Annotated[
        int | None, option("C", "Experts that the simulated cache holds in a layer; a quarter if not given.")
    ] = None
    initial: Annotated[
        str, option("WAY", f"Counts before the first token: {' or '.join(INITIAL_COUNTS)}.")
    ] = TuneSettings.initial
    base_router: Annotated[
        str,
        option(
            "WAY",
            "Base probabilities of a pass of the base model, or of its router alone: "
            f"{' or '.join(BASE_ROUTERS)}.",
        ),
    ] = TuneSettings.base_router
    lora_rank: Annotated[int, option("R", "Rank of the adapters.")] = TuneSettings.lora_rank
    lora_alpha: Annotated[float, option("A", "Adapters count A/R.")] = TuneSettings.lora_alpha
    tune_gate: Annotated[bool, flag("Adapt the experts' gate projections too.", "--tune-gate")] = False
    held_out: Annotated[float, option("SHARE", "Share of the lines that is measured, not trained.")] = (
        TuneSettings.held_out
    )
    preload: Annotated[
        bool,
        flag("Train the predictor that ranks experts by the prompt.", "--preload/--no-preload"),
    ] = TuneSettings.preload
    preload_hidden: Annotated[int, option("N", "Its hidden neurons.")] = TuneSettings.preload_hidden
    preload_rate: Annotated[float, option("RATE", "Its rate of SGD.")] = TuneSettings.preload_rate
    preload_batch: Annotated[int, option("N", "Its prompts of a step.")] = TuneSettings.preload_batch
    preload_epochs: Annotated[int, option("N", "Its passes over the prompts.")] = TuneSettings.preload_epochs
    seed: Seed = 0
    cpu: Annotated[bool, flag("Compute on the CPU even if there is a GPU.", "--cpu")] = False
    save_every: Annotated[float, option("SECONDS", "Time between two states to go on from.")] = 60.0
    json: Json = False
    quiet: Quiet = False

    def __post_init__(self) -> None:
        self.settings()
        require_whole("--micro-batch", self.micro_batch, 1, 1 << 20)
        require_number("--save-every", self.save_every, 0, 1e9)

    def settings(self) -> TuneSettings:
        """What changes the result.

        Raises:
            UsageError: A value is out of range.
        """
        values: dict[str, Any] = {entry.name: getattr(self, entry.name) for entry in fields(TuneSettings)}
        return TuneSettings(**values)
