"""Measures systems on one loaded model.

All systems of a fraction are measured in turns, A B C, A B C, so that changes of the machine's speed affect
all of them. Each run creates a near tier and computes the prompt, warm-up tokens, then the timed tokens.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil

from moechat import _native
from moechat.bench.accuracy import prediction_accuracy
from moechat.bench.decode import Bench
from moechat.bench.figures import Run, case_figures, spread
from moechat.bench.options import BenchOptions, System
from moechat.bench.predicted import (
    Recorded,
    busy_share,
    floor_timing,
    kernel_curve,
    link_times,
    predict,
    predictor_seconds,
    slowed,
    tier_of,
)
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
from moechat.simulate import Timing
from moechat.simulate.run import Tier
from moechat.simulate.strategy import LOOKAHEAD
from moechat.store.files import format_bytes

FORMAT = 1
Report = Callable[[str], None]
# Most of the free memory for measuring with all experts resident.
_RESIDENT_SHARE = 0.6
# Iterations to determine how busy a link is, which depends on itself; the third changes hardly anything.
_ROUNDS = 3


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
    return _Measurement(Bench(engine), options, prompt, report).run()


class _Measurement:
    """State of one measurement."""

    def __init__(
        self, bench: Bench, options: BenchOptions, prompt: Sequence[int] | None, report: Report
    ) -> None:
        self.bench = bench
        self.options = options
        self.report = report
        options.check_context(bench.engine.context_length)
        self.sizes = self._sizes()
        self.mapping = self._mapping()
        self.replay = None if self.mapping is None else Replay(self.mapping.trace)
        self.routers = NextRouterPredictor(find_routers(bench.model, bench.parts))
        self.predictor = self._predictor()
        self.runs = Runs(bench, options, prompt, self.replay, self.predictor)
        self.recorded: dict[str, tuple[Recorded, Tier]] = {}  # by system, at the current fraction
        self.curve: npt.NDArray[np.float64] | None = None

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

    def run(self) -> dict[str, Any]:
        options = self.options
        link, link_facts = self._link()
        sizes = self.sizes
        unhindered = LinkSettings(kind="sim", copy=self._bytes_matter)
        floor = self._resident_tier(max(pages for _, pages in sizes), unhindered)
        cases, floors, slow = [], [], []
        try:
            for fraction, pages in sizes:
                runs: dict[str, list[Run]] = {system.name: [] for system in options.systems}
                self.recorded = {}
                here, busy = [], []
                for turn in range(options.runs):
                    said = f"{fraction:.3g} of the experts, run {turn + 1} of {options.runs}"
                    if floor is not None:
                        here.append(self.runs.run(floor, unhindered))
                        self.report(f"{said}, everything in memory: {1000 * here[-1].tpot:.1f} ms a token")
                        if link.kind == "file":
                            busy.append(self.runs.run_under_load(floor, unhindered, link, here[-1]))
                            shown = f"{1000 * busy[-1].tpot:.1f} ms a token"
                            self.report(f"{said}, everything in memory, the link kept busy: {shown}")
                    for system in options.systems:
                        done = self._run_system(system, pages, link)
                        runs[system.name].append(done)
                        self.report(f"{said}, {system.name}: {1000 * done.tpot:.1f} ms a token")
                floors += here
                least = statistics.median(run.tpot for run in here) if here else None
                timing = self._timing(here, link, link_facts["bandwidth"])
                slower = _slower(here, busy)
                slow += [slower] if busy else []
                cases += [
                    case_figures(
                        system,
                        runs[system.name],
                        fraction=fraction,
                        pages=pages,
                        page_bytes=self.bench.store.geometry.record_bytes,
                        bandwidth=link_facts["bandwidth"],
                        floor=least,
                        predicted=self._predicted(system, timing, slower),
                    )
                    for system in options.systems
                ]
        finally:
            if floor is not None:
                floor.close()
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
            "prediction": self._prediction_facts(),
            "link": {**link_facts, "slows_computing": statistics.median(slow) if slow else None},
            "resident": {
                "ttft_s": spread([run.ttft for run in floors]),
                "tpot_s": spread([run.tpot for run in floors]),
            }
            if floors
            else None,
            "cases": cases,
        }

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

    def _run_system(self, system: System, pages: int, link: LinkSettings) -> Run:
        near = self.runs.near_tier(system.settings, pages, link)
        try:
            run = self.runs.run(near, link, fill=True)
            if system.name not in self.recorded:
                recorder: Any = near.runner
                self.recorded[system.name] = recorder.routing(near.geometry.num_experts), tier_of(near)
            return run
        finally:
            near.close()

    # ---- predictions of the simulator

    def _timing(self, floors: Sequence[Run], link: LinkSettings, bandwidth: float) -> Timing | None:
        """Times for the simulator; ``None`` if not all experts fit in memory."""
        if not floors:
            return None
        store, bench = self.bench.store, self.bench
        if self.curve is None:
            self.curve = kernel_curve(
                store,
                bench.top_k * store.geometry.blocks_per_expert,
                activation_bits=bench.activation_bits,
                seed=self.options.seed,
            )
        times = link_times(store, link, bandwidth)
        return floor_timing(floors, bench.layers, self.curve, times)

    def _predicted(self, system: System, timing: Timing | None, slower: float) -> float | None:
        """Median seconds per token by the simulator, comparable to the measured median.

        Args:
            system: The measured system.
            timing: Times with an idle link.
            slower: Relative increase of times while the link is busy.
        """
        if timing is None:
            return None
        recorded, tier = self.recorded[system.name]
        if recorded.rankings is not None:
            hidden_size = self.bench.store.geometry.hidden_size
            more = predictor_seconds(self.predictor, self.bench.layers, hidden_size)
            timing = replace(timing, attention=timing.attention + more)
        done, share = None, 0.0
        # Fixed-point iteration: the load of the link depends on the time per token, and vice versa.
        for _ in range(_ROUNDS if slower else 1):
            done = predict(
                recorded,
                system.settings,
                tier,
                slowed(timing, slower * share),
                fill=self.options.fill_tokens,
                timed=self.options.tokens,
                hidden_size=self.bench.store.geometry.hidden_size,
            )
            share = 0.0 if done is None else busy_share(done)
        return None if done is None else float(np.median(done.seconds))

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
