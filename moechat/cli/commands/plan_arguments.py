"""The arguments of ``moechat plan`` and ``moechat profile``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from moechat.cli.completion.completers import complete_machines, complete_models, complete_plannable
from moechat.cli.options import ModelOptions, ServingOptions
from moechat.cli.parameters import Json, Quiet, argument, flag, option
from moechat.errors import UsageError
from moechat.options import as_flag

_PLAN_HELP = """\
Show whether a model fits, its expected speed and what limits that, without loading it.

With --vram or --gpu, plans for a GPU, otherwise for this machine as `moechat run` uses it. The \
model need not be downloaded: the shapes of known models are built in; others need only a config.json.

--list-models shows which of the known models fit, and how fast each is: the largest that gives at least \
10 tokens a second first, then those with 5, then slower ones. --gpu, --vram, --ram and the other options \
hold for it too. It simulates one strategy, so its speeds can differ by some percent from those of the plan.

--json: model (name, type, parameters, active_parameters, bits, experts_form, dtype, dense_bits, \
dense_weights, kv_bits, weights, source_format, expert_layers, experts, top_k, blocks_per_expert, \
expert_bytes), machine (name, \
title), system, strategy, context (tokens, limited_by_memory), memory (near, tiers, far, pages, \
resident_share, wave_tokens), layers (layer, experts, blocks, split, hit_rate, exposed_s), statistics \
(tokens, source, basis), speed (basis, times, context, tokens_per_s, tpot_s, parts_s, hit_rate, \
ready_rate, far_bytes_per_token, ttft_s, bottleneck, figures, figure_origins, costs_s, cpu_range, \
routing_range), other_budgets (name, bytes, tokens_per_s), notes. Units: bytes, seconds, shares from 0 to \
1. speed is null if the machine's speed is unknown. figure_origins has the names of its figures that are \
measured on the machine, published, or assumed. cpu_range is null unless the rate of experts on the CPU is \
an estimate with a range; it has bytes_per_s, and low and high: the same plan made with the ends of the \
range (bytes_per_s, tokens_per_s, same_plan_tokens_per_s, changed_layers, bottleneck, strategy). \
routing_range is null where the routing of the model was recorded or all experts are near; else low and \
high (tokens_per_s, hit_rate) are the speed if it routes more and less evenly than expected. With \
--list-models: a list of name, repository, speed (as of search; low and high are null), refused (why it \
does not run there, or null), least_bytes (the smallest memory that it needs, where it does not fit).
"""
_PLAN_EXAMPLES = """\
moechat plan mixtral --vram 12G --gpu rtx3060-12g

moechat plan qwen3 --ram 8G

moechat plan ./config.json --gpu rtx4090-24g --ctx 8192 --json

moechat plan --list-models --vram 12G --gpu rtx3060-12g

moechat plan --list-gpus
"""
_PROFILE_HELP = """\
Measure this machine once, and show the figures.

Measures disk, memory and expert kernels, alone and together, in about 20 seconds, and a GPU in about 20 \
more; the first time its kernels are built, which can take a minute. The figures are saved for plans and \
tuning, and shown without measuring the next time. With --model, also times that model's layers.

--json: format, kind, key, profile (name, title, cpu, cores, isa, ram, ram_bandwidth, expert_rate, \
expert_rate_together, expert_flops, links, gpu, created, key, clock), missing, remarks, facts, seconds, \
age_s, fresh, model_times; with --list: format, kind, saved, reference. A link has kind, bandwidth and \
latencies by request size, latency (of the smallest request), together (its rate while the CPU computes) \
and experts (the CPU's rate meanwhile, by bits); to a GPU also by_depth (bandwidth by size and requests in \
flight), back and back_together (to the host), staged (from memory that is not pinned), pinned and \
pins_more (pinned memory, and whether it is a lower bound). A GPU has name, vram, vram_free, bandwidth, \
copy, flops, dense_rate and dense_flops by bits, expert_rate and expert_flops by bits and tokens, launch, \
call, graph_launch, graph_node, sync, round_trip, context, capability, sms, l2_bytes, pcie_generation, \
pcie_lanes; a figure without a measurement is null or empty, or its origin is not "measured". Figures are \
objects with value, origin, source and, where there is a range, low and high, in bytes, seconds, bytes a \
second or operations a second.
"""
_PROFILE_EXAMPLES = """\
moechat profile

moechat profile --refresh --json

moechat profile --model demo
"""


@dataclass(frozen=True, kw_only=True)
class PlanCommand(ServingOptions):
    """The arguments of ``moechat plan``.

    Raises:
        UsageError: A value is out of range, or there is no model.
    """

    HELP: ClassVar[str] = _PLAN_HELP
    EXAMPLES: ClassVar[str] = _PLAN_EXAMPLES

    model: Annotated[
        str | None,
        argument(
            "MODEL",
            "A model, as for run; or a known shape, a config.json, or a directory with one.",
            complete_plannable,
        ),
    ] = None
    gpu: Annotated[
        str | None,
        option(
            "NAME",
            "Plan for a reference machine, or for a machine in a .toml file of the same format, "
            "instead of this one.",
            complete_machines,
        ),
    ] = None
    verbose: Annotated[
        bool,
        flag("Also memory part by part, layers, figures, other budgets and notes.", "--verbose", "-v"),
    ] = False
    json: Annotated[bool, flag("Print the plan as one JSON object.", "--json")] = False
    list_models: Annotated[
        bool, flag("Show which known models fit, how fast and how large they are, and exit.", "--list-models")
    ] = False
    list_gpus: Annotated[bool, flag("Show the reference machines and exit.", "--list-gpus")] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.list_models and self.model is not None:
            raise UsageError("--list-models shows all known models; leave out MODEL or the option")
        if self.model is None and not (self.list_models or self.list_gpus):
            raise UsageError(
                "MODEL is missing", hint="moechat plan mixtral; moechat plan --list-models shows what fits"
            )


@dataclass(frozen=True, kw_only=True)
class ProfileCommand(ModelOptions):
    """The arguments of ``moechat profile``.

    Raises:
        UsageError: A value is out of range, or two options exclude each other.
    """

    HELP: ClassVar[str] = _PROFILE_HELP
    EXAMPLES: ClassVar[str] = _PROFILE_EXAMPLES

    model: Annotated[
        str | None, option("MODEL", "Also time the layers of a model, named as for run.", complete_models)
    ] = None
    refresh: Annotated[bool, flag("Measure again, even if there are saved figures.", "--refresh")] = False
    list: Annotated[bool, flag("List saved profiles and reference machines.", "--list")] = False
    json: Json = False
    quiet: Quiet = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.list and (self.refresh or self.model is not None):
            raise UsageError("--list measures nothing; leave out --refresh and --model")
        if self.model is None and self.load_options.given:
            raise UsageError(
                f"{', '.join(map(as_flag, self.shared))} are options for loading a model; they need --model"
            )
