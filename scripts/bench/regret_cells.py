"""Cells of bench/regret: first starts of auto with its watch, beside every fixed strategy in hindsight."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from row_processes import TableRow

from moechat.configurator.systems import SYSTEMS, CacheSettings
from moechat.configurator.warm_start import default_statistics
from moechat.hardware.profile import HardwareProfile
from moechat.hub.known_shapes import find_shape, shape_values
from moechat.routing.statistics import RoutingStatistics
from moechat.routing.trace import Trace
from moechat.simulate.choice import choose_by_statistics
from moechat.simulate.compare import Comparison, SimulateOptions
from moechat.simulate.run import Ints, Watched, simulate
from moechat.simulate.simulated_model import SimulatedModel
from moechat.simulate.strategy import (
    LOOKAHEAD,
    Chosen,
    loadings,
    loads_as,
    strategies,
    watched,
)

# Tokens after which regret is shown, as far as there are so many.
CHECKPOINTS = (50, 100, 200, 500, 1000, 2000)
PRESETS = ("on-demand", "mixtral-offloading", "fiddler")
AUTO = SYSTEMS["auto"]
Start = Literal["chosen", "worst"]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Inputs:
    """All that jobs refer to; every process gets it once.

    Attributes:
        traces: Names, traces and models.
        profiles: Machines.
        shares: Shares of the experts in memory.
        tokens: Tokens from the start on.
        start: The first way to load: ``chosen``, or the ``worst`` in hindsight.
        all_ways: On a GPU ways take turns that its recorded graphs do not serve, too.
    """

    traces: tuple[tuple[str, Trace, SimulatedModel], ...]
    profiles: tuple[HardwareProfile, ...]
    shares: tuple[float, ...]
    tokens: int
    start: Start = "chosen"
    all_ways: bool = False


@dataclass(frozen=True)
class Job:
    """What to simulate for one row: indices of trace and machine, accuracy and seed of the predictions."""

    trace: int
    profile: int
    accuracy: float
    seed: int


@dataclass(frozen=True)
class Cell:
    """A first start.

    Attributes:
        share: Share of all experts that fit in the near tier.
        chosen: Strategy that the plan has chosen.
        start: Way to load at first.
        end: Way to load at last.
        best: Fastest fixed strategy over all tokens.
        regret: Percent that the watched run took longer than the fastest fixed strategy, by tokens.
        unwatched: The same without a watch, over all tokens.
        switches: Changes: token, way before and after, measured gap in percent.
        lost: Percent of the time that trials have lost, as the watch estimates.
        ratios: Time of each fixed strategy over all tokens, divided by that of the best.
    """

    share: float
    chosen: str
    start: str
    end: str
    best: str
    regret: dict[int, float]
    unwatched: float
    switches: tuple[tuple[int, str, str, float], ...]
    lost: float
    ratios: dict[str, float]

    @property
    def last(self) -> float:
        """Regret over all tokens, in percent."""
        return self.regret[max(self.regret)]


@dataclass(frozen=True)
class Row(TableRow):
    """Cells of one trace and machine."""

    cells: tuple[Cell, ...]

    def to_json(self) -> dict[str, Any]:
        """The row with all figures."""
        return {**vars(self), "cells": [vars(cell) for cell in self.cells]}


class FirstStart(Comparison):
    """A model that has never run on a machine: plans are made from the defaults of its family alone."""

    def __init__(
        self, trace: Trace, model: SimulatedModel, profile: HardwareProfile, options: SimulateOptions
    ) -> None:
        self._family = family_of(model)
        self._defaults: dict[str, RoutingStatistics] = {}
        self._threads = profile.cores
        super().__init__(trace, model, profile, options)
        self.far_computes = self.timing.far_block is not None

    def statistics(self, settings: CacheSettings) -> RoutingStatistics:
        """The defaults of the family, ranked by the policy of a system."""
        shape, policy = self.model.shape, settings.policy
        if policy not in self._defaults:
            self._defaults[policy] = default_statistics(
                self._family, shape.layers, shape.experts, shape.top_k, policy=policy
            )
        return self._defaults[policy]

    def chosen(self, share: float) -> Chosen:
        """The strategy that a plan chooses before the first token."""
        return choose_by_statistics(
            AUTO,
            lambda settings: self.tier(settings, share),
            self.costs,
            self.statistics(AUTO),
            threads=self._threads,
            launch="card" if self.near == "gpu" else "host",
        )

    def play(
        self, settings: CacheSettings, share: float, watching: Watched | None = None, *, like: CacheSettings
    ) -> Floats:
        """Seconds of each token, beginning with an empty cache.

        Args:
            settings: Settings of the tier.
            share: Share of the experts that fit.
            watching: Watch over them.
            like: Settings that the targets are made for.
        """
        needs = settings.ranks or (watching is not None and any(way.ranks for way in watching.ways.values()))
        ahead: Ints | None = None
        if needs:
            depth = LOOKAHEAD if watching is not None else settings.lookahead
            ahead = self.rankings_for(replace(AUTO, lookahead=depth))
        tier = self.tier(like, share)
        return simulate(self.trace, settings, tier, self.timing, rankings=ahead, watched=watching).seconds

    def may_take_turns(self, at_work: CacheSettings, other: CacheSettings) -> bool:
        """As the engine: the requests of a GPU's recorded graphs have to serve both."""
        parts = {"predicts": True, "far_computes": self.far_computes}
        return self.near != "gpu" or at_work.request_form(**parts).serves(other.request_form(**parts))


def family_of(model: SimulatedModel) -> str:
    """Family of a known model as transformers calls it; of others an empty name, which has usual figures."""
    name = find_shape(model.name)
    return "" if name is None else str(shape_values(name)["model_type"])


def cell_of(case: FirstStart, share: float, start: Start, *, all_ways: bool) -> Cell:
    """Play one first start, and everything that it is judged by."""
    chosen = case.chosen(share)
    at_work = chosen.strategy.settings
    fixed: dict[str, Floats] = {}
    for each in strategies(AUTO, far_computes=case.far_computes):
        fixed[each.name] = case.play(each.settings, share, like=each.settings)
    for name in PRESETS:
        fixed[name] = case.play(SYSTEMS[name], share, like=SYSTEMS[name])

    first, unwatched = at_work, fixed[chosen.strategy.name]
    if start == "worst":
        ways = [loads_as(at_work, each.settings) for each in loadings(AUTO, far_computes=case.far_computes)]
        played = [case.play(way, share, like=at_work) for way in ways]
        slowest = max(range(len(ways)), key=lambda at: float(played[at].sum()))
        first, unwatched = ways[slowest], played[slowest]
    watching = watched(
        AUTO,
        chosen,
        first,
        far_computes=case.far_computes,
        may_take_turns=(lambda one, other: True) if all_ways else case.may_take_turns,
    )
    if watching is None:
        seconds, begun, ended = unwatched, "alone", "alone"
    else:
        begun = watching.watch.at_work
        seconds = case.play(first, share, watching, like=at_work)
        ended = watching.watch.at_work
    totals = {name: float(each.sum()) for name, each in fixed.items()}
    best = min(totals, key=totals.__getitem__)
    sums = np.cumsum(seconds)
    least = np.min([np.cumsum(each) for each in fixed.values()], axis=0)
    marks = sorted({*(mark for mark in CHECKPOINTS if mark < len(sums)), len(sums)})
    watch = None if watching is None else watching.watch
    return Cell(
        share=share,
        chosen=chosen.strategy.name,
        start=begun,
        end=ended,
        best=best,
        regret={mark: 100 * float(sums[mark - 1] / least[mark - 1] - 1) for mark in marks},
        unwatched=100 * (float(unwatched.sum()) / totals[best] - 1),
        switches=()
        if watch is None
        else tuple((each.token, each.before, each.after, 100 * each.gap.share) for each in watch.switches),
        lost=0.0 if watch is None else 100 * watch.lost_share,
        ratios={name: total / totals[best] for name, total in totals.items()},
    )


def row_of(inputs: Inputs, job: Job) -> Row:
    """Play the first starts of one row.

    Raises:
        UsageError: The trace cannot be simulated.
    """
    name, trace, model = inputs.traces[job.trace]
    profile = inputs.profiles[job.profile]
    options = SimulateOptions(
        systems=("auto",), accuracy=job.accuracy, tokens=inputs.tokens, warmup=0, seed=job.seed
    )
    case = FirstStart(trace, model, profile, options)
    cells = tuple(cell_of(case, share, inputs.start, all_ways=inputs.all_ways) for share in inputs.shares)
    return Row(name, model.name, profile.name, job.accuracy, job.seed, cells)
