"""The time of a decoded token by `plan`, by `simulate` and by the engine over a GPU that only takes time.

All three have the same targets, strategy, routing and predictions. RAM is taken to hold all experts: those in
files come through threads that read them, which the model of the GPU does not have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import numpy.typing as npt
from cards_engine import Subject, Timed, TimedEngine
from cards_gpu import Clock

from moechat.budget.knowledge import Knowledge
from moechat.budget.needs import SPEED_CONTEXT
from moechat.config import run_ahead_wanted
from moechat.configurator.gpu_pattern import LAYER_HOST
from moechat.hardware.profile import HardwareProfile
from moechat.hardware.profile_file import reference_profile
from moechat.options import LoadOptions
from moechat.planning.cases import Case, Cases
from moechat.planning.machine import find_machine
from moechat.planning.source import find_model
from moechat.routing.trace import Trace
from moechat.routing.trace_mapping import map_trace
from moechat.simulate.drawn_routing import draw_routing
from moechat.simulate.predictions import draw_rankings
from moechat.simulate.run import SimulatedRun, Tier, simulate
from moechat.simulate.strategy import strategies
from moechat.simulate.timing import timing_of

Ints = npt.NDArray[np.int32]
_RAM = 256 << 30
_SEED = 11  # not that of plans


@dataclass(frozen=True)
class CaseName:
    """Machine, model, and the GPU's memory that may be used, such as ``8G``; empty: all."""

    machine: str
    model: str
    vram: str = ""

    @classmethod
    def parse(cls, text: str) -> CaseName:
        """``MACHINE:MODEL`` or ``MACHINE:MODEL:SIZE``."""
        machine, model, *size = text.split(":")
        return cls(machine, model, size[0] if size else "")


@dataclass(frozen=True)
class CardRow:
    """One case.

    Attributes:
        case: Machine, model and memory.
        resident: Share of the experts in the GPU's memory.
        planned: Seconds of a token, as planned.
        simulated: The same, as simulated.
        timed: The engine's run.
        tokens: Timed tokens.
        layers: Layers of the model.
        strategy: Of the plan.
    """

    case: CaseName
    resident: float
    planned: float
    simulated: SimulatedRun
    timed: Timed
    tokens: int
    layers: int
    strategy: str

    @property
    def spread(self) -> float:
        """Percent between the largest and the smallest of the three times."""
        times = (self.planned, self.simulated.tpot, self.timed.tpot)
        return 100 * (max(times) / min(times) - 1)

    def share(self, name: str) -> float:
        """Share of the time of a count of seconds."""
        return self.timed.counts[name] / float(self.timed.seconds.sum())

    def each(self, name: str) -> float:
        """A count for each token."""
        return self.timed.counts[name] / self.tokens


@cache
def _planned(
    name: CaseName, strategy: str | None, run_ahead: bool | None
) -> tuple[Cases, Case, HardwareProfile]:
    """The plan of a case, and the machine with enough RAM."""
    profile = reference_profile(name.machine)
    profile = replace(profile, ram=replace(profile.ram, value=max(profile.ram.value, _RAM)))
    assert run_ahead_wanted() == run_ahead
    options = LoadOptions.parse({"vram": name.vram} if name.vram else {})
    cases = Cases(find_model(name.model, None), find_machine(profile, gpu=True), options)
    budget, _ = cases.machine.vram_budget(options.vram)
    known = {one.name: one for one in strategies(cases.settings, far_computes=True)}
    chosen = None if strategy is None else known[strategy]
    case = cases.case(budget, ctx=cases.ctx, ram_share=1.0, strategy=chosen)
    return cases, case, profile


def run_case(
    clock: Clock,
    name: CaseName,
    *,
    trace: Trace | None = None,
    fill: int,
    warm: int,
    tokens: int,
    ordered: bool = False,
    strategy: str | None = None,
    figures: Mapping[str, float] | None = None,
    layer_host: float = LAYER_HOST,
) -> CardRow:
    """Plan, simulate and run one case.

    Args:
        clock: The driver.
        name: The case.
        trace: Recorded routing; ``None``: drawn from the statistics of the model's family, as plans do.
        fill: Tokens that fill the cache.
        warm: Tokens before timing.
        tokens: Timed tokens.
        ordered: Copies of all streams are made in the order of the calls; else streams take turns.
        strategy: Name of the strategy of the plan; ``None``: the fastest.
        figures: Other figures of the GPU, by their names in ``native/tests/timed_cuda.cc``.
        layer_host: Host seconds of the engine for a layer.
    """
    ahead = run_ahead_wanted()
    cases, case, profile = _planned(name, strategy, ahead)
    shape, statistics = cases.shape, cases.routing.statistics
    made = case.made
    settings = cases.settings if made is None else made.settings_for(cases.settings)
    # As loading.
    everything = cases.needs.blocks + cases.needs.spare_pages
    pages = everything if made is None else case.memory.pages
    knowledge = Knowledge(
        statistics, case.costs, cases.routing.source, name.machine, near="gpu", threads=profile.cores
    )
    subject = Subject(
        profile,
        shape,
        cases.geometry,
        pages,
        made,
        replace(settings, choose=False),
        knowledge,
        min(SPEED_CONTEXT, case.memory.context),
    )
    count = fill + warm + tokens + 4
    if trace is None:
        routing = draw_routing(statistics, count, seed=_SEED)
    else:
        routing = map_trace(trace.head(count), shape.layers, shape.experts, shape.top_k, seed=_SEED).trace
    rankings: Ints | None = None
    if settings.predicts:
        accuracy = statistics.prediction_accuracy[:, : shape.top_k].mean(axis=1)
        rankings = draw_rankings(
            routing,
            accuracy,
            width=settings.ranked_experts(shape.top_k),
            lookahead=settings.lookahead,
            seed=_SEED,
        )
    changes = {"turns": float(not ordered), **(figures or {})}
    engine = TimedEngine(
        clock, subject, routing, rankings, figures=changes, layer_host=layer_host, run_ahead=ahead
    )
    try:
        engine.fill(fill)
        timed = engine.decode(warm, tokens)
        targets, reserve = engine.tier.targets, engine.tier.reserve
    finally:
        engine.close()
    tier = Tier(
        experts=shape.experts,
        top_k=shape.top_k,
        blocks=shape.blocks_per_expert,
        block_bytes=shape.block_bytes,
        pages=pages,
        targets=np.ascontiguousarray(targets),
        reserve=reserve,
    )
    timing = timing_of(
        case.costs,
        top_k=shape.top_k,
        blocks=shape.blocks_per_expert,
        block_bytes=shape.block_bytes,
        link=profile.links["gpu"],
        far_threads=profile.cores,
        launch="card",
    )
    simulated = simulate(
        routing,
        subject.settings,
        tier,
        timing,
        rankings=rankings,
        warmup=fill + warm,
        hurried=fill,
        timed=tokens,
    )
    title = "all near" if made is None or case.strategy is None else case.strategy.title
    return CardRow(
        name,
        cases.resident(case.memory),
        case.decode.seconds,
        simulated,
        timed,
        tokens,
        shape.layers,
        title,
    )


def ten_cases() -> Sequence[CaseName]:
    """Three machines with three models each, and one that fits a small GPU better."""
    machines = ("rtx3060-12g", "laptop-rtx4060-8g", "rtx4090-24g")
    models = ("mixtral-8x7b", "qwen3-30b-a3b", "gpt-oss-120b")
    return (
        *(CaseName(machine, model) for machine in machines for model in models),
        CaseName("laptop-rtx4060-8g", "gpt-oss-20b"),
    )


def case_header() -> str:
    """Titles of the columns of :func:`case_line`."""
    return (
        f"{'machine':18} {'model':14} {'near':>6} {'plan':>8} {'simulate':>8} {'engine':>8} {'spread':>7}"
        f" | {'link':>5} {'drain':>5} {'GPU':>5} {'held':>5} {'starv':>5} {'CPU':>5}"
        f" | {'launch':>6} {'graphs':>6} {'copies':>6} {'batch':>6} {'MB':>6}  strategy"
    )


def case_line(row: CardRow) -> str:
    """One row, aligned; times in milliseconds."""
    shares = "".join(
        f" {row.share(name):5.0%}"
        for name in ("h2d_busy", "drained", "gpu_busy", "gpu_held", "gpu_starved", "cpu_busy")
    )
    each = "".join(f" {row.each(name):6.0f}" for name in ("launches", "graphs", "copies", "batches"))
    return (
        f"{row.case.machine:18} {row.case.model:14} {row.resident:6.1%} {1e3 * row.planned:8.2f}"
        f" {1e3 * row.simulated.tpot:8.2f} {1e3 * row.timed.tpot:8.2f} {row.spread:6.1f}% |{shares} |{each}"
        f" {row.each('bytes') / 1e6:6.0f}  {row.strategy}"
    )
