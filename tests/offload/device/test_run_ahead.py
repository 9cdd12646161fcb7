"""Decoded tokens whose experts the GPU looks up by itself, against those whose experts the host launches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from interpreted_gpu import InterpretedGpu
from interpreted_graph import InterpretedGraph, Operation

import moechat
from moechat.config import RUN_AHEAD_VARIABLE
from moechat.configurator.systems import CacheSettings
from moechat.models.cache_argument import cache_of
from moechat.offload import gpu_clocks, graph_decoder, run_ahead
from moechat.offload.page_lookup import PageLookup
from moechat.offload.run_ahead import RunAhead
from moechat.offload.settings import OffloadOptions

PROMPT = [5, 17, 9, 33, 21]
TOKENS = [3, 10, 17, 24, 31, 38, 45, 52]
# Nothing depends on time: what was chosen decides what is kept.
PLAIN = CacheSettings(policy="lru", prefetch="none")


@pytest.fixture(autouse=True)
def _always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run ahead of every layer, so that blocks are found missing."""
    monkeypatch.setenv(RUN_AHEAD_VARIABLE, "1")
    monkeypatch.setattr(run_ahead, "LEAST_SHARE", 0.0)


@pytest.fixture
def _without_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(RUN_AHEAD_VARIABLE)


@contextmanager
def behind() -> Iterator[None]:
    """The host launches every expert layer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graph_decoder, "can_run_ahead", lambda *_: False)
        yield


def load(model: Path, gpu, pages: int | None = None, cache: CacheSettings = PLAIN, **arguments):
    offload = OffloadOptions(accelerator=gpu, pages=pages, cache=cache)
    return moechat.load(model, device="cuda", offload=offload, ctx=64, vram="1G", **arguments)


class Run:
    """Logits of tokens, and what the cache holds and has counted after them."""

    def __init__(self, engine, tokens: list[int], prompt: list[int] = PROMPT) -> None:
        self.engine = engine
        self.cache = engine.decoder.new_cache()
        self.logits: list[torch.Tensor] = []
        self.feed(prompt)
        for token in tokens:
            self.feed([token])

    def feed(self, tokens: list[int]) -> None:
        output = self.engine.passes.run(torch.tensor([tokens]), self.cache)
        self.cache = cache_of(output)
        self.logits.append(output.logits[0, -1].clone())

    def decisions(self) -> tuple:
        near = self.engine.loaded.near
        stats = near.stats()
        times = {name for name in stats if name.endswith("seconds") or "bandwidth" in name}
        counted = {name: value for name, value in stats.items() if name not in times}
        for name in ("kernel_calls", "operations", "pages_peak", "queued", "in_flight"):
            counted.pop(name, None)
        return counted, near.runner.residency().tolist(), near.counters.activations, near.counters.bytes_read


def assert_same(found: Run, expected: Run) -> None:
    for place, (one, other) in enumerate(zip(found.logits, expected.logits, strict=True)):
        assert torch.equal(one, other), f"pass {place}"


def ahead_of(engine) -> RunAhead:
    recording = engine.loaded.decoder._recording
    assert recording is not None
    assert recording.ahead is not None
    return recording.ahead


@pytest.fixture(scope="module")
def expected(model: Path, driver) -> Callable[[int | None], Run]:
    """Tokens whose experts the host launched, by number of pages."""
    runs: dict[int | None, Run] = {}

    def expected_of(pages: int | None) -> Run:
        if pages not in runs:
            gpu = InterpretedGpu(driver)
            with behind(), load(model, gpu, pages) as engine:
                runs[pages] = Run(engine, TOKENS)
                runs[pages].kept = runs[pages].decisions()
                runs[pages].routed = routed(engine)
            gpu.close()
        return runs[pages]

    return expected_of


def test_logits_and_decisions_are_those_of_the_host(model: Path, gpu, expected) -> None:
    with load(model, gpu, 6) as engine:
        run = Run(engine, TOKENS)
        assert_same(run, expected(6))
        assert run.decisions() == expected(6).kept
        assert engine.notices() == []
        assert engine.loaded.near.runner.check() == ""
        assert ahead_of(engine).missed > 4, "few pages: blocks are missing again and again"
        graphs, _ = gpu.graphs_made
        parts = engine.loaded.near.layers + 1
        assert graphs.replayed == parts * len(TOKENS) + ahead_of(engine).repeated


def routed(engine) -> list[list[int]]:
    return engine.loaded.near.routing_statistics().activations.tolist()


@pytest.mark.usefixtures("_without_options")
def test_a_token_with_all_experts_resident_costs_no_layer_the_host_anything(
    model: Path, gpu, expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_clocks, "EVERY", 1)
    monkeypatch.setattr(gpu_clocks, "FIRST", 1)
    with load(model, gpu) as engine:
        near = engine.loaded.near
        assert (near.runner.residency() == near.geometry.blocks_per_expert).all(), "before the first token"
        assert near.stats()["preloaded"] == 0, "answers count what they move"
        run = Run(engine, TOKENS[:5])  # two are compared with passes, two with graphs of single layers
        graphs, lookups = gpu.graphs_made
        copies, waits = gpu.copies_to_host, gpu.waits
        replays, layers = graphs.all_replayed, near.stats()["layers_run"]
        looked_up = lookups.all_replayed
        for token in TOKENS[5:]:
            run.feed([token])
        tokens = len(TOKENS[5:])
        assert gpu.copies_to_host == copies
        assert gpu.waits - waits == tokens
        assert graphs.all_replayed - replays == 2 * tokens, "the layers, and the head"
        assert lookups.all_replayed == looked_up
        # All the same they count.
        assert near.stats()["layers_run"] - layers == tokens * near.layers
        assert run.decisions() == expected(None).kept
        assert routed(engine) == expected(None).routed
        assert_same(run, expected(None))
        # Memory runs out: blocks may be missing from now on, and the host decides.
        assert near.shrink(0.5) > 0
        waits, copies = gpu.waits, gpu.copies_to_host
        for token in TOKENS[:2]:
            run.feed([token])
        assert gpu.waits == waits
        assert gpu.copies_to_host - copies == near.layers * 2
        assert engine.loaded.decoder._recording.ahead is None
        assert engine.notices() == []
        assert near.runner.check() == ""


@pytest.mark.usefixtures("_without_options")
@pytest.mark.parametrize(("pages", "value"), [(6, ""), (None, "0")])
def test_nothing_runs_ahead_where_a_block_may_be_missing_or_it_is_switched_off(
    model: Path, gpu, expected, monkeypatch: pytest.MonkeyPatch, pages: int | None, value: str
) -> None:
    monkeypatch.setenv(RUN_AHEAD_VARIABLE, value)
    with load(model, gpu, pages) as engine:
        run = Run(engine, TOKENS[:4])
        recording = engine.loaded.decoder._recording
        assert recording.ahead is None
        assert recording.crossing.kept == [], "nothing is replayed again"
        assert gpu.waits == 0
        assert engine.notices() == []
    for one, other in zip(run.logits, expected(pages).logits, strict=False):
        assert torch.equal(one, other)


@pytest.mark.usefixtures("_without_options")
@pytest.mark.parametrize("reason", ["memory", "kernel", "another result"])
def test_the_host_launches_every_layer_where_a_token_cannot_be_two_graphs(
    model: Path, gpu, expected, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    def refuses(*_: object) -> None:
        raise torch.OutOfMemoryError("no memory") if reason == "memory" else RuntimeError("no kernel")

    if reason == "another result":
        whole = graph_decoder.CompleteRecording
        monkeypatch.setattr(whole, "result", lambda recording: recording.logits + 1)
    else:
        monkeypatch.setattr(RunAhead, "launch", refuses)
    with load(model, gpu) as engine:
        pages = engine.loaded.near.pages
        run = Run(engine, TOKENS[:5])
        (notice,) = engine.notices()
        assert "waits for the host" in notice
        assert {"memory": "no memory", "kernel": "no kernel"}.get(reason, "logits") in notice
        assert engine.loaded.near.pages == pages, "no page is given back for it"
        assert engine.loaded.decoder._recording.ahead is None
    for one, other in zip(run.logits, expected(None).logits, strict=False):
        assert torch.equal(one, other)


def test_blocks_that_a_lookup_does_not_find_are_computed_by_the_host(
    model: Path, gpu, expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    with load(model, gpu) as engine:
        run = Run(engine, TOKENS[:5])
        ahead = ahead_of(engine)
        table, layers = ahead._lookup._table, engine.loaded.near.layers
        whole = table.clone()
        for token, (absent, complete) in zip(
            TOKENS[5:], [([0], True), ([0, 1], True), ([1], False)], strict=True
        ):
            monkeypatch.setattr(RunAhead, "complete", lambda _, complete=complete: complete)
            missed = ahead.missed
            with torch.inference_mode():
                table.copy_(whole).view(layers, -1)[absent] = -1
            run.feed([token])
            assert ahead.missed - missed == len(absent)
        assert_same(run, expected(None))


def test_a_table_that_is_not_brought_up_to_date_gives_other_logits(
    model: Path, gpu, expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison above finds a table that still names pages of evicted experts."""
    fill_slot = PageLookup.fill

    def lost(lookup: PageLookup, count: int, *, clear: bool) -> int:
        return fill_slot(lookup, 0 if evictions else count, clear=clear)

    with load(model, gpu, 6) as engine:
        evictions = False
        run = Run(engine, TOKENS[:2])
        monkeypatch.setattr(PageLookup, "fill", lost)
        evictions = True
        for token in TOKENS[2:]:
            run.feed([token])
    same = [torch.equal(one, other) for one, other in zip(run.logits, expected(6).logits, strict=True)]
    assert not all(same)


def test_layers_that_often_lack_a_block_are_left_to_the_host(
    model: Path, gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_ahead, "LEAST_SHARE", 0.75)
    with load(model, gpu, 2) as engine:
        run = Run(engine, TOKENS[:5])
        waits = gpu.waits
        missed = ahead_of(engine).missed
        for token in TOKENS[5:]:
            run.feed([token])
        assert (gpu.waits, ahead_of(engine).missed) == (waits, missed)


def test_what_lives_between_graphs_is_not_overwritten_by_a_layer_that_ran_too_early(
    model: Path, gpu, expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU reuses the memory of every tensor that nobody holds: here it is overwritten at every replay."""
    with load(model, gpu, 6) as engine:
        run = Run(engine, TOKENS[:3])
        recording = engine.loaded.decoder._recording
        held = [*recording.crossing.kept, *recording.sums, recording.logits]
        held += [tensor for request in recording.requests for tensor in (request.x, request.packed)]
        kept = {tensor.untyped_storage().data_ptr() for tensor in held}
        graphs, _ = gpu.graphs_made
        owned = {
            graph: [
                tensor
                for operation in graph.operations
                if isinstance(operation, Operation)
                for tensor, fresh in zip(operation.results, operation.fresh, strict=True)
                if fresh and tensor.is_floating_point() and tensor.untyped_storage().data_ptr() not in kept
            ]
            for graph in graphs.made
        }
        replay = InterpretedGraph.replay

        def reuse(graph: InterpretedGraph) -> None:
            for other, tensors in owned.items():
                if other is not graph:
                    for tensor in tensors:
                        tensor.fill_(torch.nan)
            replay(graph)

        monkeypatch.setattr(InterpretedGraph, "replay", reuse)
        for token in TOKENS[3:]:
            run.feed([token])
        assert recording.crossing.kept
        assert ahead_of(engine).missed > 0
    assert_same(run, expected(6))


@pytest.mark.usefixtures("_without_options")
def test_what_lives_between_graphs_is_not_overwritten_by_a_layer_that_is_compared(
    model: Path, gpu, expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Graphs that are recorded later in the same memory reuse what the pass does not hold any more."""
    replay = InterpretedGraph.replay

    def reuse(graph: InterpretedGraph) -> None:
        if not graph.of_model:
            for other in graph.graphs.made:
                for operation in other.operations if other.of_model else ():
                    if isinstance(operation, Operation):
                        for tensor, fresh in zip(operation.results, operation.fresh, strict=True):
                            if fresh and tensor.is_floating_point():
                                tensor.fill_(torch.nan)
        replay(graph)

    monkeypatch.setattr(InterpretedGraph, "replay", reuse)
    with load(model, gpu) as engine:
        run = Run(engine, TOKENS)
        assert engine.notices() == []
        assert engine.loaded.decoder._recording.complete is not None
    assert_same(run, expected(None))


def test_pages_that_were_given_back_are_looked_up_anew(model: Path, gpu, expected) -> None:
    with load(model, gpu) as engine:
        run = Run(engine, TOKENS[:4])
        before = ahead_of(engine)
        assert engine.loaded.near.shrink(0.2) > 0
        for token in TOKENS[4:]:
            run.feed([token])
        assert ahead_of(engine) is not before
        assert engine.notices() == []
    assert_same(run, expected(None))


def test_prefetches_and_sharing_continue(model: Path, gpu) -> None:
    with behind(), load(model, gpu, 8, CacheSettings(miss="both"), activation_bits=32) as engine:
        wanted = torch.stack(Run(engine, TOKENS).logits)
    gpu.cuda.set(jitter=2e-4, latency=5e-5, seed=3, piece=4096)
    with load(model, gpu, 8, CacheSettings(miss="both"), activation_bits=32) as engine:
        found = torch.stack(Run(engine, TOKENS).logits)
        stats = engine.loaded.near.stats()
        assert stats["blocks_far"] > 0
        assert engine.loaded.near.routing_statistics().predicted.sum() > 0
        assert engine.notices() == []
    assert float((found - wanted).abs().max() / wanted.abs().max()) < 1e-4
