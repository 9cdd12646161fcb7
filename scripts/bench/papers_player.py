"""Simulates systems of papers with a paper's own times, or with those of a machine."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from moechat.configurator.costs import Costs
from moechat.configurator.systems import SYSTEMS, CacheSettings
from moechat.routing.counter import statistics_of_trace
from moechat.routing.drawn_predictions import accuracy_by_layer, draw_rankings
from moechat.routing.statistics import RoutingStatistics
from moechat.routing.trace import Trace
from moechat.simulate.choice import choose_strategy
from moechat.simulate.request_queues import request_queues
from moechat.simulate.run import SimulatedRun, Tier, simulate
from moechat.simulate.simulated_model import SimulatedModel
from moechat.simulate.strategy import LOOKAHEAD
from moechat.simulate.systems import pages_for, settings_for, tier_for
from moechat.simulate.timing import Launch, Timing, timing_of

Ints = npt.NDArray[np.int32]
_NOTE_WIDTH = 110
REQUEST_TOKENS = 100


@dataclass(frozen=True)
class Setting:
    """What a table of a paper was measured with.

    Attributes:
        model: Sizes of the model.
        trace: Routing; the tokens before the last ``timed`` ones fill the cache and make the plans.
        costs: Times of the machine.
        accuracy: Mean share of chosen experts in the top k of a prediction, one layer ahead.
        timed: Timed tokens.
        launch: ``card``: missing experts are computed behind all copies of a layer, as the engine does on a
            GPU; ``host``: each block as it arrives.
        ordered: Predictions are calibrated; ``False``: right and wrong ones in random order in the top k.
        seed: Seed of the predictions.
    """

    model: SimulatedModel
    trace: Trace
    costs: Costs
    accuracy: float = 0.8
    timed: int = 300
    launch: Launch = "card"
    ordered: bool = True
    seed: int = 0
    _shared: dict[object, object] = field(default_factory=dict, compare=False, repr=False)

    def absent(self, system: str) -> bool:
        """Whether this version has no such system."""
        return system.partition(":")[0] not in SYSTEMS

    def run(self, system: str, share: float) -> SimulatedRun:
        """Simulate a system with a share of all experts in the near tier.

        Raises:
            UsageError: The system is unknown or cannot be simulated.
        """
        settings = settings_for(system)
        if settings.choose:
            settings = self._chosen(settings, share)
        warmup = self.trace.tokens - self.timed
        return simulate(
            self.trace,
            settings,
            self.tier(settings, share),
            self._timing(),
            rankings=self._rankings(settings),
            queues=request_queues(self._in_requests(), settings),
            warmup=warmup,
            hurried=warmup // 2,
        )

    def _in_requests(self) -> Trace:
        """The trace, cut into requests where it is one: made routing is the same in all of them."""
        if self.trace.sequences > 1:
            return self.trace
        offsets = np.append(np.arange(0, self.trace.tokens, REQUEST_TOKENS), self.trace.tokens)
        return replace(self.trace, offsets=offsets.astype(np.int64))

    def tier(self, settings: CacheSettings, share: float) -> Tier:
        """The near tier of a system, planned from the tokens before timing."""
        shape, geometry = self.model.shape, self.model.geometry
        pages = pages_for(geometry, shape.layers, shape.top_k, settings, share)
        return tier_for(
            settings, self._statistics(settings), self.costs, geometry, pages=pages, top_k=shape.top_k
        )

    def _timing(self) -> Timing:
        shape = self.model.shape
        return timing_of(
            self.costs,
            top_k=shape.top_k,
            blocks=shape.blocks_per_expert,
            block_bytes=shape.block_bytes,
            far_threads=8,
            launch=self.launch,
        )

    def _known(self) -> Trace:
        return self.trace.head(self.trace.tokens - self.timed)

    def _chosen(self, settings: CacheSettings, share: float) -> CacheSettings:
        known = self._known()
        rankings = self._rankings(replace(settings, lookahead=max(settings.lookahead, LOOKAHEAD)))
        found = choose_strategy(
            settings,
            lambda candidate: self.tier(candidate, share),
            self._timing(),
            known,
            None if rankings is None else rankings[:, : known.tokens],
        )
        return found.strategy.settings

    def _rankings(self, settings: CacheSettings) -> Ints | None:
        if not settings.predicts:
            return None
        key = "rankings", settings.lookahead
        if key not in self._shared:
            shape = self.model.shape
            drawn = draw_rankings(
                self.trace,
                accuracy_by_layer(shape.layers, self.accuracy),
                width=shape.top_k,
                lookahead=settings.lookahead,
                seed=self.seed,
            )
            if not self.ordered:
                order = np.random.default_rng(self.seed).random(drawn.shape).argsort(axis=-1)
                drawn = np.take_along_axis(drawn, order, axis=-1)
            self._shared[key] = drawn
        return self._shared[key]  # type: ignore[return-value]

    def _statistics(self, settings: CacheSettings) -> RoutingStatistics:
        policy = "lcp" if settings.policy == "belady" else settings.policy
        key = "statistics", policy, settings.gamma
        if key not in self._shared:
            known = self._known()
            rankings = self._rankings(SYSTEMS["mixtral-offloading"])
            assert rankings is not None
            self._shared[key] = statistics_of_trace(
                known, replace(settings, policy=policy), predictions=rankings[0, : known.tokens]
            )
        return self._shared[key]  # type: ignore[return-value]


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], notes: str) -> None:
    """Print a table whose first column is left-aligned, and notes below."""
    widths = [max(len(row[at]) for row in (columns, *rows)) for at in range(len(columns))]
    print(f"\n{title}")
    for row in (columns, *rows):
        cells = [
            row[0].ljust(widths[0]),
            *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)),
        ]
        print("  " + "  ".join(cells).rstrip())
    print(textwrap.fill(notes, _NOTE_WIDTH, initial_indent="  ", subsequent_indent="  "), flush=True)


def shuffled(trace: Trace, seed: int) -> Trace:
    """The sequences of a trace in random order."""
    order = np.random.default_rng(seed).permutation(trace.sequences)
    rows = np.concatenate([np.arange(trace.offsets[at], trace.offsets[at + 1]) for at in order])
    sizes = np.diff(trace.offsets)[order]
    weights = None if trace.weights is None else np.ascontiguousarray(trace.weights[rows])
    return Trace(
        np.ascontiguousarray(trace.experts[rows]),
        np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
        trace.num_experts,
        weights,
    )
