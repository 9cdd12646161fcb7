"""Systems measured side by side on one loaded model.

All systems of a fraction are measured in turns, A B C, A B C, so that a machine that becomes slower or faster
meanwhile does so for all of them. Each turn makes a new near tier, computes the prompt, then tokens that are
not timed, then those that are.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil
import torch

from moechat import _native
from moechat.bench.accuracy import prediction_accuracy
from moechat.bench.decode import Bench
from moechat.bench.figures import Run, case_figures, spread
from moechat.bench.options import BenchOptions, System
from moechat.bench.predicted import (
    Recorded,
    Recorder,
    busy_share,
    floor_timing,
    kernel_curve,
    link_times,
    predict,
    predictor_seconds,
    slowed,
    tier_of,
)
from moechat.bench.speeds import busy_link, compute_rate, link_bandwidth
from moechat.bench.timing import TimedCalls, TimedPredictor
from moechat.config import active_isa
from moechat.configurator.systems import CacheSettings
from moechat.engine import Engine
from moechat.errors import DoesNotFitError, MoechatError, UsageError
from moechat.hardware.memory import available_bytes
from moechat.models.routers import find_routers
from moechat.offload.cached import MIN_PAGES, NearTier
from moechat.offload.experts import RunsExperts
from moechat.offload.settings import LinkSettings
from moechat.predict import NextRouterPredictor, Predictor, ReplayPredictor
from moechat.routing import MappedTrace, Replay, Trace, map_trace
from moechat.simulate import Timing
from moechat.simulate.run import Tier
from moechat.store.files import format_bytes

FORMAT = 1
Report = Callable[[str], None]
# Share of the free memory that may be taken for measuring with everything in it.
_RESIDENT_SHARE = 0.6
# A link is kept busy for so many times what the pass beside it takes without it.
_BESIDE = 1.5
# Of finding out how busy a link is that slows what makes it busy; the third changes hardly anything.
_ROUNDS = 3


def run_bench(
    engine: Engine,
    options: BenchOptions,
    *,
    prompt: Sequence[int] | None = None,
    report: Report = lambda _: None,
) -> dict[str, Any]:
    """Measure.

    Args:
        engine: The model; it is as before afterwards.
        options: What to measure.
        prompt: Tokens to begin the prompt with; repeated or cut to the length asked for. ``None`` draws some.
        report: Told in a few words what was measured, now and then.

    Returns:
        The result, as plain values; the keys are stable, see :mod:`moechat.bench.report`.

    Raises:
        UsageError: The trace cannot stand for the model, or the prompt is longer than the context.
        DoesNotFitError: The machine has not the memory that a near tier is to have.
        MoechatError: Blocks cannot be read.
    """
    return _Measurement(Bench(engine), options, prompt, report).run()


class _Measurement:
    """One measurement under way."""

    def __init__(
        self, bench: Bench, options: BenchOptions, prompt: Sequence[int] | None, report: Report
    ) -> None:
        self.bench = bench
        self.options = options
        self.report = report
        options.check_context(bench.engine.context_length)
        self.sizes = self._sizes()
        self.tokens = self._forced_tokens(prompt)
        self.mapping = self._mapping()
        self.replay = None if self.mapping is None else Replay(self.mapping.trace)
        self.routers = NextRouterPredictor(find_routers(bench.model, bench.parts))
        self.predictor = self._predictor()
        self.played: dict[str, tuple[Recorded, Tier]] = {}  # by system, at the fraction at work
        self.curve: npt.NDArray[np.float64] | None = None

    # ---- what is computed

    def _forced_tokens(self, prompt: Sequence[int] | None) -> list[int]:
        """Tokens of one run: a prompt, then the model's own greedy answer to it; or all of them drawn."""
        options, bench = self.options, self.bench
        answer = options.warmup_tokens + options.tokens
        if prompt is None:
            generator = np.random.default_rng(options.seed)
            drawn: list[int] = generator.integers(0, bench.vocabulary, size=options.all_tokens).tolist()
            return drawn
        start = [prompt[at % len(prompt)] for at in range(options.prompt_tokens)]
        steps = bench.engine.generate(start, max_new_tokens=answer, temperature=0.0)
        given = [step.token_id for step in steps]
        # A model may end its answer early: it then begins again.
        return start + [given[at % len(given)] for at in range(answer)]

    def _mapping(self) -> MappedTrace | None:
        options, bench = self.options, self.bench
        if options.routing is None:
            return None
        trace = Trace.read(options.routing)
        wanted = (
            options.fill_tokens + options.all_tokens + 1
        )  # the last token's prediction looks at the one after it
        lengths = np.diff(trace.offsets)
        # One sequence if any is long enough; else several, one after the other, and from the beginning again.
        first = int((lengths >= wanted).argmax())
        part = trace.head(wanted, first_sequence=first)
        if part.tokens < wanted:
            self.report(f"the trace has {part.tokens} tokens; they are repeated")
        experts = bench.store.geometry.num_experts
        return map_trace(part, bench.layers, experts, bench.top_k, seed=options.seed)

    def _predictor(self) -> Predictor:
        if self.replay is None:
            return self.routers
        lookahead = max(system.settings.lookahead for system in self.options.systems)
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
                self.played = {}
                here, busy = [], []
                for turn in range(options.runs):
                    said = f"{fraction:.3g} of the experts, run {turn + 1} of {options.runs}"
                    if floor is not None:
                        here.append(self._pass(floor, unhindered))
                        self.report(f"{said}, everything in memory: {1000 * here[-1].tpot:.1f} ms a token")
                        if link.kind == "file":
                            busy.append(self._beside_link(floor, unhindered, link, here[-1]))
                            shown = f"{1000 * busy[-1].tpot:.1f} ms a token"
                            self.report(f"{said}, everything in memory, the link kept busy: {shown}")
                    for system in options.systems:
                        done = self._turn(system, pages, link)
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
            # With more than everything and a token's blocks on their way nothing changes any more.
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
        """Pages that hold all experts, and those of a token once more on their way."""
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
        """Where a trace chooses the experts nothing depends on what they compute, so no byte need move."""
        return self.replay is None

    def _resident_tier(self, largest: int, link: LinkSettings) -> NearTier | None:
        """A near tier that holds everything beside the largest that is measured: the floor of all systems."""
        needed = (self._enough + largest) * self.bench.store.geometry.record_bytes
        if needed > _RESIDENT_SHARE * available_bytes():
            self.report("there is not enough memory to measure with all experts in it")
            return None
        near = self._near(CacheSettings(policy="lru", prefetch="none"), self._enough, link)
        self._pass(near, link)
        return near

    def _near(self, settings: CacheSettings, pages: int, link: LinkSettings) -> NearTier:
        if self.replay is not None:
            self.replay.rewind()
        near = NearTier(
            self.bench.store,
            pages=pages,
            top_k=self.bench.top_k,
            settings=settings,
            link=link,
            predictor=TimedPredictor(self.predictor),
            replay=self.replay,
            activation_bits=self.bench.activation_bits,
        )
        recorder = Recorder(TimedCalls(near.runner), self.bench.layers)
        near.runner = recorder  # type: ignore[assignment]
        return near

    def _turn(self, system: System, pages: int, link: LinkSettings) -> Run:
        near = self._near(system.settings, pages, link)
        try:
            run = self._pass(near, link, fill=True)
            if system.name not in self.played:
                recorder: Any = near.runner
                self.played[system.name] = recorder.routing(near.geometry.num_experts), tier_of(near)
            return run
        finally:
            near.close()

    # ---- what the simulator says

    def _timing(self, floors: Sequence[Run], link: LinkSettings, bandwidth: float) -> Timing | None:
        """Times for the simulator; ``None`` where not everything fits in memory."""
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
        """Seconds of a token, the median as for what is measured.

        Args:
            system: That was measured.
            timing: While the link rests.
            slower: So much longer everything takes while it is busy.
        """
        if timing is None:
            return None
        recorded, tier = self.played[system.name]
        if recorded.rankings is not None:
            hidden_size = self.bench.store.geometry.hidden_size
            more = predictor_seconds(self.predictor, self.bench.layers, hidden_size)
            timing = replace(timing, attention=timing.attention + more)
        done, share = None, 0.0
        # How busy the link is depends on how long a token takes, and that on how busy it is.
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

    def _beside_link(self, floor: NearTier, unhindered: LinkSettings, link: LinkSettings, alone: Run) -> Run:
        """Everything in memory once more, while the link is kept busy with blocks that nobody needs."""
        options = self.options
        usual = alone.ttft + alone.tpot * (options.warmup_tokens + options.tokens)
        with busy_link(self.bench.store, link, _BESIDE * usual):
            return self._pass(floor, unhindered)

    def _pass(self, near: NearTier, link: LinkSettings, fill: bool = False) -> Run:
        """What fills the cache, prompt, warm-up, timed tokens."""
        options, bench = self.options, self.bench
        calls: Any = near.runner
        layers = [near.layer(ordinal) for ordinal in range(bench.layers)]
        if self.replay is not None:
            self.replay.rewind(0 if fill else options.fill_tokens)
            if fill and options.fill_tokens:
                with self._failures_of(link):
                    self._fill(near, layers)
        with bench.experts(layers):
            ttft, decoding = bench.start(self.tokens[: options.prompt_tokens])
            rest = self.tokens[options.prompt_tokens :]
            for token in rest[: options.warmup_tokens]:
                decoding.feed([token])
            with self._failures_of(link):
                near.drain()
            peak = near.stats()["pages_peak"]
            near.reset_stats()
            calls.reset()
            predictor: Any = near.predictor
            if predictor is not None:
                predictor.seconds = 0.0
            bench.seconds_in_experts = 0.0
            steps = tuple(decoding.feed([token]) for token in rest[options.warmup_tokens :])
        seconds = {
            **calls.seconds,
            "predict": 0.0 if predictor is None else predictor.seconds,
            "experts": bench.seconds_in_experts,
        }
        return Run(ttft, steps, seconds, near.stats(), peak / calls.pages)

    @contextmanager
    def _failures_of(self, link: LinkSettings) -> Iterator[None]:
        """Let what fails on a link outside of the engine's passes be an error that says which link it was."""
        try:
            yield
        except _native.LinkError as error:
            if link.kind == "file":
                name = f"the file link to {self.bench.store.path}"
                hint = "try again; if it stays so, check the disk"
            else:
                name = f"the simulated link at {link.bandwidth:.4g} bytes a second"
                hint = "give a faster one with --link"
            raise MoechatError(f"{name} failed: {error}", hint=hint) from error

    def _fill(self, near: NearTier, layers: Sequence[RunsExperts]) -> None:
        """Run the expert layers alone, over a link that is not held up, for the tokens before the prompt."""
        geometry = self.bench.store.geometry
        hidden = torch.zeros((1, geometry.hidden_size))
        index = torch.zeros((1, self.bench.top_k), dtype=torch.int64)  # the replay chooses
        weights = torch.full((1, self.bench.top_k), 1 / self.bench.top_k)
        near.runner.hurry_link(True)
        for _ in range(self.options.fill_tokens):
            for layer in layers:
                layer.forward(hidden, index, weights)
        near.drain()
        near.runner.hurry_link(False)

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
        prompt = self.tokens[: self.options.prompt_tokens]
        rest = self.tokens[self.options.prompt_tokens :]
        with self.bench.experts(self.bench.mapped()):
            figures = prediction_accuracy(self.bench, self.predictor, prompt, rest)
        return {"source": "next-router", **figures}


def _slower(alone: Sequence[Run], busy: Sequence[Run]) -> float:
    """By what share a token takes longer while the link is busy; 0 where that was not measured."""
    if not busy:
        return 0.0
    pairs = [late.tpot / usual.tpot for usual, late in zip(alone, busy, strict=True)]
    return max(0.0, statistics.median(pairs) - 1.0)


def _known(share: float) -> float | None:
    """``None`` in place of NaN, which JSON does not have: sequences of one token have no token before."""
    return None if math.isnan(share) else share
