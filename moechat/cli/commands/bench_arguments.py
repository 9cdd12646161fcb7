"""The arguments of ``moechat bench``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from moechat.cli.completion.completers import complete_models, complete_shapes
from moechat.cli.options import ModelOptions
from moechat.cli.parameters import Json, Out, Quiet, Seed, Systems, argument, flag, option
from moechat.errors import UsageError

_HELP = """\
Measure systems side by side on this machine.

All systems decode the same given tokens; nothing is sampled. They run in turns, at each share of the \
experts that fits into memory. A synthetic shape has random weights; with --routing, a recorded trace \
chooses the experts.

--json: format, model (name, source, type, expert_layers, experts, top_k, bits, expert_bytes, block_bytes, \
all_expert_bytes, vocabulary), machine (threads, isa, memory_bytes), tokens (prompt, fill, warmup, timed, \
runs), routing (source, trace; for a trace also mapping, locality_before, locality_after, locality_chance, \
filled), prediction (source; for the next router's ahead, top_k, tokens, right_of_top_k, mean, chance; for \
random ones accuracy, measured), link (kind, compute_rate, copy, bandwidth, compute_to_link, \
slows_computing), resident (ttft_s, tpot_s; null if it was not measured), cases (system, settings, \
fraction, pages, pages_bytes, filled, ttft_s, tpot_s, predicted_tpot_ms, predicted_ratio, hits, \
blocks_resident, blocks_prefetched, bytes_per_token, link_busy_share, stall_share, compute_share, \
dense_share, us_per_layer, floor_s), assumptions. Times have median, min and max. Units: seconds, bytes, \
bytes a second; shares are from 0 to 1.
"""
_EXAMPLES = """\
moechat bench demo --fractions 1/4,1/2

moechat bench --synthetic olmoe-1b-7b --layers 4 --systems "on-demand,auto,auto:split=0.5" --link sim:4x
"""


@dataclass(frozen=True, kw_only=True)
class BenchCommand(ModelOptions):
    """The arguments of ``moechat bench``.

    Raises:
        UsageError: A value is out of range, or two options exclude each other.
    """

    HELP: ClassVar[str] = _HELP
    EXAMPLES: ClassVar[str] = _EXAMPLES

    model: Annotated[
        str | None, argument("MODEL", "A model, as for run, unless --synthetic is given.", complete_models)
    ] = None
    synthetic: Annotated[
        str | None,
        option(
            "SHAPE", "Use random weights in the shape of a known model: qwen3-30b-a3b, ...", complete_shapes
        ),
    ] = None
    layers: Annotated[int | None, option("N", "Number of decoder layers of the shape; all if not given.")] = (
        None
    )
    vocabulary: Annotated[
        int | None, option("N", "Use a smaller vocabulary; the whole one if not given.")
    ] = None
    directory: Annotated[
        Path | None, option("DIR", "Directory for synthetic stores; moechat's cache if not given.")
    ] = None
    ram: Annotated[str | None, option("SIZE", "Memory for experts, such as 2G, instead of --fractions.")] = (
        None
    )
    fractions: Annotated[
        str | None, option("F,F", "Shares of all experts that fit; 1/4,1/2 if not given.")
    ] = None
    systems: Systems = "mixtral-offloading,auto"
    routing: Annotated[Path | None, option("TRACE", "An .npz file with recorded routing to replay.")] = None
    accuracy: Annotated[float, option("P", "Share of correct predictions when a trace is replayed.")] = 0.7
    prompt_tokens: Annotated[int, option("N", "Tokens of the prompt.")] = 128
    tokens: Annotated[int, option("N", "Tokens that are timed.")] = 64
    warmup_tokens: Annotated[int, option("N", "Untimed tokens between prompt and timed tokens.")] = 32
    fill_tokens: Annotated[
        int, option("N", "Tokens of the trace that run before the prompt, through the experts only.")
    ] = 0
    runs: Annotated[int, option("N", "Runs of each system.")] = 3
    link: Annotated[
        str, option("LINK", "file; sim:2G is 2 GiB/s; sim:16x is 16 times slower than computing.")
    ] = "file"
    seed: Seed = 0
    wide: Annotated[bool, flag("Show all columns.", "--wide")] = False
    json: Json = False
    out: Out = None
    quiet: Quiet = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.model is None) == (self.synthetic is None):
            raise UsageError("name either a model or, with --synthetic, a shape")
        if self.synthetic is None and (self.layers is not None or self.vocabulary is not None):
            raise UsageError("--layers and --vocabulary cut a shape down; they need --synthetic")
        if self.ram is not None and self.fractions is not None:
            raise UsageError("--ram and --fractions exclude each other: both set how much fits")
