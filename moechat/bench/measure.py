"""Measures systems on one loaded model.

All systems of a fraction are measured in turns, A B C, A B C, so that changes of the machine's speed affect
all of them. Each run creates a near tier and computes the prompt, warm-up tokens, then the timed tokens.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import psutil

from moechat import _native
from moechat.bench.accuracy import prediction_accuracy
from moechat.bench.decode import Bench
from moechat.bench.expected import Expectations
from moechat.bench.figures import Run, case_figures, spread
from moechat.bench.options import BenchOptions, System
from moechat.bench.predicted import Recorded, tier_of
from moechat.bench.runs import Runs
from moechat.bench.speeds import compute_rate, link_bandwidth
from moechat.budget.gpu_sizes import MIN_PAGES
from moechat.config import active_isa
from moechat.configurator.systems import CacheSettings
from moechat.engine import Engine
from moechat.errors import DoesNotFitError, UsageError
from moechat.hardware.memory import available_bytes
from moechat.models.router_search import find_routers
from moechat.offload.settings import LinkSettings
from moechat.offload.tier import ExpertTier
from moechat.predict import NextRouterPredictor, Predictor, ReplayPredictor
from moechat.routing import MappedTrace, Replay, Trace, map_trace
from moechat.simulate.run import Tier
from moechat.simulate.strategy import LOOKAHEAD
from moechat.store.files import format_bytes

FORMAT = 1
Report = Callable[[str], None]
# Most of the free memory for measuring with all experts resident.
_RESIDENT_SHARE = 0.6


def run_bench(
    engine: Engine,
    options: BenchOptions,
    *,
    prompt: Sequence[int] | None = None,
    report: Report = lambda _: None,
) -> dict[str, Any]:
    """Run a measurement.

    Args:
        engine: The model; its state is restored at the end.
        options: Options of the measurement.
        prompt: First tokens of the prompt, repeated or cut to its length; ``None``: random tokens.
        report: Called with a short description of each step.

    Returns:
        The result, as JSON types; the keys are stable, see :mod:`moechat.bench.report`.

    Raises:
        UsageError: The trace cannot be mapped to the model, or the prompt is longer than the context.
        DoesNotFitError: The machine has too little memory for a near tier.
        MoechatError: Blocks cannot be read.
    """
    measurement = Measurement(Bench(engine), options, prompt, report)
    measurement.run()
    return measurement.result()


@dataclass(frozen=True)
class Trial:
    """One run before a measurement, to know how long it takes.

    Attributes:
        around: Seconds to make and remove the near tier.
        ttft: Seconds for the prompt.
        tpot: Seconds per token.
    """

    around: float
    ttft: float
    tpot: float


class _Fraction:
    """What was measured at one share of the experts.

    Args:
        fraction: The share.
        pages: Pages of the near tier.
        systems: The systems.
    """

    def __init__(self, fraction: float, pages: int, systems: Sequence[System]) -> None:
        self.fraction = fraction
        self.pages = pages
        self.runs: dict[str, list[Run]] = {system.name: [] for system in systems}
        self.floors: list[Run] = []  # with all experts in memory
        self.busy: list[Run] = []  # the same while the link is busy
        self.recorded: dict[str, tuple[Recorded, Tier]] = {}


class Measurement:
    """A measurement, which may be interrupted.

    Args:
        bench: The model; its state is restored at the end.
        options: Options of the measurement.
        prompt: As for :func:`run_bench`.
        report: As for :func:`run_bench`.

    Raises:
        UsageError: As :func:`run_bench`.
        DoesNotFitError: As :func:`run_bench`.
    """

    def __init__(
        self, bench: Bench, options: BenchOptions, prompt: Sequence[int] | None, report: Report
    ) -> None:
        self.bench = bench
        self.options = options
        self.report = report
        options.check_context(bench.engine.context_length)
        self._measured = [_Fraction(*size, options.systems) for size in self._sizes()]
        self.mapping = self._mapping()
        self.replay = None if self.mapping is None else Replay(self.mapping.trace)
        self.routers = NextRouterPredictor(find_routers(bench.model, bench.parts))
        self.predictor = self._predictor()
        self.runs = Runs(bench, options, prompt, self.replay, self.predictor)
        self.expectations = Expectations(bench, options, self.predictor)
        self._link_settings = LinkSettings()
        self._link_facts: dict[str, Any] = {}
        self._again = 0

    # ---- routing and predictions

    def _mapping(self) -> MappedTrace | None:
        options, bench = self.options, self.bench
        if options.routing is None:
            return None
        trace = Trace.read(options.routing)
        # One more, because the last token's prediction needs the next token.
        wanted = options.fill_tokens + options.all_tokens + 1
        lengths = np.diff(trace.offsets)
        # The first sequence that is long enough; else all sequences in order, repeated.
        first = int((lengths >= wanted).argmax())
        part = trace.head(wanted, first_sequence=first)
        if part.tokens < wanted:
            self.report(f"the trace has {part.tokens} tokens; they are repeated")
        experts = bench.store.geometry.num_experts
        return map_trace(part, bench.layers, experts, bench.top_k, seed=options.seed)

    def _predictor(self) -> Predictor:
        if self.replay is None:
            return self.routers
        lookahead = max(LOOKAHEAD, *(system.settings.lookahead for system in self.options.systems))
        return ReplayPredictor(
            self.replay,
            accuracy=self.options.accuracy,
            seed=self.options.seed,
            lookahead=lookahead,
            instead_of=self.routers,
        )

    # ---- measuring

    def try_out(self) -> Trial:
        """Run the first system once at the first fraction, to know how long the measurement takes."""
        started = time.perf_counter()
        done = self._run_system(self.options.systems[0], self._measured[0], LinkSettings())
        measured = done.ttft + sum(done.steps) * (1 + self.options.warmup_tokens / self.options.tokens)
        return Trial(max(0.0, time.perf_counter() - started - measured), done.ttft, done.tpot)

    def run(self) -> None:
        """Run everything; what an interrupt leaves is in :meth:`result`.

        Raises:
            MoechatError: Blocks cannot be read.
        """
        link = LinkSettings()
        if self.options.expect:
            link, self._link_facts = self._link()
        self._link_settings = link
        unhindered = LinkSettings(kind="sim", copy=self._bytes_matter)
        floor = self._resident_tier(max(at.pages for at in self._measured), unhindered)
        try:
            for at in self._measured:
                for turn in range(self.options.runs):
                    self._take_turn(at, turn, floor, unhindered, link)
        finally:
            if floor is not None:
                floor.close()

    def run_again(self, systems: Mapping[float, Collection[str]], turn: str) -> None:
        """Run some systems once more, after :meth:`run`.

        Args:
            systems: Their names, by fraction.
            turn: Words for the report.

        Raises:
            MoechatError: Blocks cannot be read.
        """
        self._again += 1
        # Another one is the first in every turn, because what ran before may matter.
        first = self._again % len(self.options.systems)
        order = (*self.options.systems[first:], *self.options.systems[:first])
        for at in self._measured:
            for system in order:
                if system.name in systems.get(at.fraction, ()):
                    done = self._run_system(system, at, self._link_settings)
                    at.runs[system.name].append(done)
                    self.report(
                        f"{at.fraction:.3g} of the experts, {turn}, {system.name}: "
                        f"{1000 * done.tpot:.1f} ms a token"
                    )

    def _take_turn(
        self, at: _Fraction, turn: int, floor: ExpertTier | None, unhindered: LinkSettings, link: LinkSettings
    ) -> None:
        """Run every system once at one fraction."""
        said = f"{at.fraction:.3g} of the experts, run {turn + 1} of {self.options.runs}"
        if floor is not None:
            at.floors.append(self.runs.run(floor, unhindered))
            self.report(f"{said}, everything in memory: {1000 * at.floors[-1].tpot:.1f} ms a token")
            if link.kind == "file" and self.options.expect:
                at.busy.append(self.runs.run_under_load(floor, unhindered, link, at.floors[-1]))
                shown = f"{1000 * at.busy[-1].tpot:.1f} ms a token"
                self.report(f"{said}, everything in memory, the link kept busy: {shown}")
        for system in self.options.systems:
            done = self._run_system(system, at, link)
            at.runs[system.name].append(done)
            self.report(f"{said}, {system.name}: {1000 * done.tpot:.1f} ms a token")

    # ---- the result

    def result(self) -> dict[str, Any]:
        """The result of all runs so far, as JSON types; at least one must have ended."""
        options, link_facts = self.options, self._link_facts
        floors = self.floors
        busy = [at for at in self._measured if at.busy]
        slow = [_slower(at.floors, at.busy) for at in busy]
        return {
            "format": FORMAT,
            "model": self._model_facts(),
            "machine": {
                "threads": _native.num_threads(),
                "isa": active_isa(),
                "memory_bytes": psutil.virtual_memory().total,
            },
            "tokens": {
                "prompt": options.prompt_tokens,
                "fill": options.fill_tokens,
                "warmup": options.warmup_tokens,
                "timed": options.tokens,
                "runs": options.runs,
            },
            "routing": self._routing_facts(),
            "prediction": self._prediction_facts() if options.expect else {"source": "next-router"},
            "link": {**link_facts, "slows_computing": statistics.median(slow) if slow else None},
            "resident": {
                "ttft_s": spread([run.ttft for run in floors]),
                "tpot_s": spread([run.tpot for run in floors]),
            }
            if floors
            else None,
            "cases": [case for at in self._measured for case in self._cases(at)],
        }

    def _cases(self, at: _Fraction) -> list[dict[str, Any]]:
        """Figures of the systems that were run at one fraction."""
        bandwidth = self._link_facts.get("bandwidth")
        least = statistics.median(run.tpot for run in at.floors) if at.floors else None
        timing = None
        if bandwidth is not None:
            timing = self.expectations.timing(at.floors, self._link_settings, bandwidth)
        slower = _slower(at.floors, at.busy)
        return [
            case_figures(
                system,
                at.runs[system.name],
                fraction=at.fraction,
                pages=at.pages,
                page_bytes=self.bench.store.geometry.record_bytes,
                bandwidth=bandwidth,
                floor=least,
                predicted=None
                if timing is None
                else self.expectations.seconds(system, *at.recorded[system.name], timing, slower),
            )
            for system in self.options.systems
            if at.runs[system.name]
        ]

    def _sizes(self) -> list[tuple[float, int]]:
        record_bytes = self.bench.store.geometry.record_bytes
        everything = self._all_blocks
        if self.options.ram is not None:
            pages = self.options.ram // record_bytes
            if pages < MIN_PAGES:
                raise UsageError(
                    f"{self.options.ram} bytes hold {pages} blocks of {record_bytes} bytes; "
                    f"at least {MIN_PAGES} are needed"
                )
            # More pages than that change nothing.
            pages = min(pages, self._enough)
            sizes = [(min(1.0, pages / everything), pages)]
        else:
            sizes = [(share, max(MIN_PAGES, round(share * everything))) for share in self.options.fractions]
        needed, free = max(pages for _, pages in sizes) * record_bytes, available_bytes()
        if needed > free:
            raise DoesNotFitError(
                f"{format_bytes(needed)} are to hold experts; {format_bytes(free)} of memory are free",
                hint="give a smaller --ram, or smaller --fractions",
            )
        return sizes

    @property
    def _enough(self) -> int:
        """Pages for all experts, and for one token's experts in transit."""
        return self._all_blocks + self.bench.top_k * self.bench.store.geometry.blocks_per_expert

    @property
    def _all_blocks(self) -> int:
        geometry = self.bench.store.geometry
        return self.bench.layers * geometry.num_experts * geometry.blocks_per_expert

    def _link(self) -> tuple[LinkSettings, dict[str, Any]]:
        choice = self.options.link
        rate = compute_rate(self.bench.store, self.bench.top_k, seed=self.options.seed)
        facts: dict[str, Any] = {"kind": choice.kind, "compute_rate": rate, "copy": True}
        if choice.kind == "file":
            settings = LinkSettings()
            facts["bandwidth"] = link_bandwidth(self.bench.store, settings, seed=self.options.seed)
        else:
            bandwidth = rate / choice.ratio if choice.ratio else choice.bandwidth
            assert bandwidth is not None
            settings = LinkSettings(kind="sim", bandwidth=bandwidth, copy=self._bytes_matter)
            facts |= {"bandwidth": bandwidth, "copy": settings.copy}
        facts["compute_to_link"] = rate / facts["bandwidth"]
        self.report(
            f"expert blocks: {rate / 1e9:.2f} GB/s computed, "
            f"{facts['bandwidth'] / 1e9:.3f} GB/s over the link"
        )
        return settings, facts

    @property
    def _bytes_matter(self) -> bool:
        """Whether transfers must copy; with a replayed trace the results do not matter."""
        return self.replay is None

    def _resident_tier(self, largest: int, link: LinkSettings) -> ExpertTier | None:
        """A near tier with all experts, the lower bound of all systems; ``None`` if there is too little
        memory for it besides the largest measured tier.
        """
        needed = (self._enough + largest) * self.bench.store.geometry.record_bytes
        if needed > _RESIDENT_SHARE * available_bytes():
            self.report("there is not enough memory to measure with all experts in it")
            return None
        near = self.runs.near_tier(CacheSettings(policy="lru", prefetch="none"), self._enough, link)
        self.runs.run(near, link)
        return near

    @property
    def floors(self) -> list[Run]:
        """All runs so far with all experts in memory."""
        return [run for at in self._measured for run in at.floors]

    @property
    def done(self) -> int:
        """Number of runs so far."""
        runs = [run for at in self._measured for each in at.runs.values() for run in each]
        return len(self.floors) + len(runs)

    def _run_system(self, system: System, at: _Fraction, link: LinkSettings) -> Run:
        near = self.runs.near_tier(system.settings, at.pages, link)
        try:
            run = self.runs.run(near, link, fill=True)
            if self.options.expect and system.name not in at.recorded:
                recorder: Any = near.runner
                at.recorded[system.name] = recorder.routing(near.geometry.num_experts), tier_of(near)
            return run
        finally:
            near.close()

    # ---- figures

    def _model_facts(self) -> dict[str, Any]:
        store = self.bench.store
        geometry = store.geometry
        return {
            "name": self.bench.engine.name,
            "source": store.manifest.source.name,
            "type": store.manifest.model_type,
            "expert_layers": self.bench.layers,
            "experts": geometry.num_experts,
            "top_k": self.bench.top_k,
            "bits": geometry.bits,
            "expert_bytes": geometry.expert_bytes,
            "block_bytes": geometry.record_bytes,
            "all_expert_bytes": self.bench.layers * geometry.layer_bytes,
            "vocabulary": self.bench.vocabulary,
        }

    def _routing_facts(self) -> dict[str, Any]:
        if self.mapping is None:
            return {"source": "model", "trace": None}
        mapping = self.mapping
        return {
            "source": "trace",
            "trace": str(self.options.routing),
            "mapping": mapping.how,
            "locality_before": _known(mapping.locality_before),
            "locality_after": _known(mapping.locality_after),
            "locality_chance": mapping.chance_after,
            "filled": mapping.filled,
        }

    def _prediction_facts(self) -> dict[str, Any]:
        if isinstance(self.predictor, ReplayPredictor):
            ahead = range(1, self.predictor.lookahead + 1)
            return {
                "source": "drawn",
                "accuracy": self.predictor.accuracy,
                "measured": [self.predictor.measured(a) for a in ahead],
            }
        prompt = self.runs.tokens[: self.options.prompt_tokens]
        rest = self.runs.tokens[self.options.prompt_tokens :]
        with self.bench.experts(self.bench.mapped()):
            figures = prediction_accuracy(self.bench, self.predictor, prompt, rest)
        return {"source": "next-router", **figures}


def _slower(alone: Sequence[Run], busy: Sequence[Run]) -> float:
    """Relative increase of the time per token while the link is busy; 0 if not measured."""
    if not busy:
        return 0.0
    pairs = [late.tpot / usual.tpot for usual, late in zip(alone, busy, strict=True)]
    return max(0.0, statistics.median(pairs) - 1.0)


def _known(share: float) -> float | None:
    """``None`` for NaN (sequences of one token have no locality), which JSON does not have."""
    return None if math.isnan(share) else share
