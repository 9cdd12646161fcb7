"""Rows of bench/choice: times of auto, presets and fixed strategies, by share of the experts in memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from row_processes import TableRow

from moechat.configurator.systems import SYSTEMS
from moechat.errors import UsageError
from moechat.hardware.profile import HardwareProfile
from moechat.routing.trace import Trace
from moechat.simulate.compare import Comparison, SimulateOptions
from moechat.simulate.simulated_model import SimulatedModel

AUTO, ORACLE = "auto", "oracle"
# All systems that an engine can run: the others need the future.
PRESETS = tuple(name for name, settings in SYSTEMS.items() if name != AUTO and not settings.needs_future)
# One strategy for all machines; auto has to be as fast as the best of them on each.
FIXED = (
    "auto:prefetch=none",
    "auto:miss=compute",
    "auto:miss=compute,prefetch=none",
    "auto:miss=fetch",
    "auto:miss=fetch,prefetch=none",
    "auto:allocation=uniform,split=1",
    "auto:allocation=uniform,split=1,prefetch=none",
    "moepic:miss=both",
)
EVERYTHING = (AUTO, ORACLE, *PRESETS, *FIXED)
# A system counts as faster than the oracle from this ratio on; below it the difference is rounding.
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Cell:
    """Simulated times at one share of the experts.

    Attributes:
        share: Share of all experts that fit in the near tier.
        times: Milliseconds a token of each system.
    """

    share: float
    times: dict[str, float]

    @property
    def best_preset(self) -> str:
        """Name of the fastest preset."""
        return min(PRESETS, key=self.times.__getitem__)

    @property
    def best_fixed(self) -> str:
        """Name of the fastest fixed strategy."""
        return min(FIXED, key=self.times.__getitem__)

    @property
    def best(self) -> str:
        """Name of the fastest of presets and fixed strategies."""
        return min((self.best_preset, self.best_fixed), key=self.times.__getitem__)

    @property
    def fastest(self) -> str:
        """Name of the fastest of all but the oracle."""
        return min((AUTO, self.best), key=self.times.__getitem__)

    def against(self, system: str) -> float:
        """Time of auto divided by that of a system."""
        return self.times[AUTO] / self.times[system]

    @property
    def oracle_beaten(self) -> bool:
        """Whether something is faster than the oracle."""
        return self.times[self.fastest] < self.times[ORACLE] * (1 - _ROUNDING)

    def to_json(self) -> dict[str, Any]:
        """The figures, with the names of the best."""
        return {
            "share": self.share,
            "against_presets": self.against(self.best_preset),
            "best_preset": self.best_preset,
            "against_fixed": self.against(self.best_fixed),
            "best_fixed": self.best_fixed,
            "against_oracle": self.against(ORACLE),
            "oracle_beaten_by": self.fastest if self.oracle_beaten else None,
            "tpot_ms": self.times,
        }


@dataclass(frozen=True)
class Length:
    """Length of the simulations: timed tokens, and tokens before them (``None``: as ``moechat simulate``)."""

    tokens: int
    warmup: int | None = None


@dataclass(frozen=True)
class Job:
    """What to simulate for one row.

    Attributes:
        trace: Index of the trace in the inputs.
        model: Index of the model in the inputs.
        profile: Index of the machine in the inputs.
        accuracy: Mean accuracy of the predictions.
        seed: Random seed of predictions and of the mapping of the trace.
    """

    trace: int
    model: int
    profile: int
    accuracy: float
    seed: int


@dataclass(frozen=True)
class Row(TableRow):
    """Cells of one trace, model and machine; none if ``problem`` says why it cannot be simulated."""

    cells: tuple[Cell, ...]
    problem: str = ""

    def to_json(self) -> dict[str, Any]:
        """The row with all figures."""
        cells = [cell.to_json() for cell in self.cells]
        return {**vars(self), "cells": cells, "problem": self.problem or None}


@dataclass(frozen=True)
class Inputs:
    """All that jobs refer to; every process gets it once.

    Attributes:
        traces: Names and traces.
        models: Sizes of models.
        profiles: Machines.
        shares: Shares of the experts.
        length: Length of the simulations.
    """

    traces: tuple[tuple[str, Trace], ...]
    models: tuple[SimulatedModel, ...]
    profiles: tuple[HardwareProfile, ...]
    shares: tuple[float, ...]
    length: Length


def row_of(inputs: Inputs, job: Job) -> Row:
    """Simulate everything for one row.

    One :class:`Comparison` serves all shares and systems, so predictions and statistics are drawn once.
    """
    name, trace = inputs.traces[job.trace]
    model, profile = inputs.models[job.model], inputs.profiles[job.profile]
    cells: tuple[Cell, ...] = ()
    problem = ""
    try:
        options = SimulateOptions(
            systems=EVERYTHING,
            fractions=inputs.shares,
            accuracy=job.accuracy,
            tokens=inputs.length.tokens,
            warmup=inputs.length.warmup,
            seed=job.seed,
        )
        comparison = Comparison(trace, model, profile, options, name=name)
        cells = tuple(cell_of(comparison, share) for share in inputs.shares)
    except UsageError as error:
        problem = str(error)
    return Row(name, model.name, profile.name, job.accuracy, job.seed, cells, problem)


def cell_of(comparison: Comparison, share: float) -> Cell:
    """Simulate auto, the oracle, the presets and the fixed strategies at one share."""
    return Cell(share, {name: comparison.case(name, share)["tpot_ms"] for name in EVERYTHING})
