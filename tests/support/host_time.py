"""Microseconds of the host for the expert layers of a decoded token on a GPU, over the stand-in driver.

    TRITON_INTERPRET=1 python tests/support/host_time.py [--tokens N]

The schedule, the cache, the lists and the link are real, at the layers, experts and blocks of real models;
blocks are tiny, and kernels and graphs are not run: what is left is our own Python and native code, and what
the stand-in takes for copies and events. A launch that a GPU would be given counts as nothing; the table says
how many there are. Time is that of the thread, without what it waits for.

"python": Python launches every layer; "host": native code does, as in a replay
(``moechat/offload/launched_layers.py``); "ahead": with ``moechat/offload/run_ahead.py``. Layers that lack a
block lack one expert. Given are medians over tokens, without the first third.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from fake_cuda import VARIABLE, FakeCuda
from fake_kernels import FakeKernel
from interpreted_gpu import InterpretedGpu

from moechat import _native
from moechat.configurator.systems import CacheSettings
from moechat.geometry import ExpertGeometry, WeightType
from moechat.offload import run_ahead
from moechat.offload.experts import ExpertCounters
from moechat.offload.gpu_layer import ExpertRequest, GpuExpertLayer
from moechat.offload.gpu_pages import GpuPages
from moechat.offload.kernels.call import PreparedLayer
from moechat.offload.launched_layers import LaunchedLayers
from moechat.offload.tier import ExpertTier

# Layers, experts, blocks of an expert, experts of a token.
SHAPES = {
    "Mixtral-8x7B": (32, 8, 224, 2),
    "Qwen3-30B-A3B": (48, 128, 12, 8),
    "gpt-oss-20b": (24, 32, 45, 4),
}
HIDDEN = 16


class Counts:
    """Launches of graphs and kernels, and waits, since the last token."""

    graphs = kernels = copies = waits = 0


class Stub:
    """A graph that does nothing but what the test gives it."""

    def __init__(self, counts: Counts, work: Any = None) -> None:
        self.counts, self.work = counts, work

    def replay(self) -> None:
        """Count, and do the work."""
        self.counts.graphs += 1
        if self.work is not None:
            self.work()


class Gpu(InterpretedGpu):
    """Copies to the host return at once."""

    counts = Counts()

    def to_host(self, packed: torch.Tensor) -> np.ndarray:
        """Values of a tensor."""
        self.counts.copies += 1
        return packed.numpy()

    def arrived(self, landed: torch.Tensor) -> np.ndarray:
        """Values of a tensor."""
        return self.to_host(landed)

    def point(self) -> Any:
        """A point that has always passed."""
        counts = self.counts

        def wait() -> None:
            counts.waits += 1

        return SimpleNamespace(record=lambda: None, synchronize=wait)

    def before_kernels(self) -> None:
        """Kernels are not run, and wait for nothing."""


class Model:
    """Expert layers of one shape without a model."""

    def __init__(self, cuda: FakeCuda, shape: tuple[int, int, int, int], resident: float) -> None:
        layers, experts, blocks, picks = self.shape = shape
        geometry = ExpertGeometry(HIDDEN, 64 * blocks, experts, 4, WeightType.BF16, has_bias=False)
        self.gpu = Gpu(cuda)
        self.counts = self.gpu.counts = Counts()
        self.pages = GpuPages(self.gpu, geometry)
        count = int(resident * layers * experts) * blocks + 4 * picks * blocks
        self.far = np.zeros((experts, blocks, geometry.record_bytes), np.uint8)
        _native.cuda_pin(self.far.reshape(-1))
        link = _native.cuda_link([(self.far, self.far.nbytes, True, "", 0)] * layers)
        tier = ExpertTier.__new__(ExpertTier)
        tier.geometry, tier.layers, tier.top_k, tier.replay = geometry, layers, picks, None
        tier.counters, tier.stream_tokens, tier.pages = ExpertCounters(), 0, count
        tier.config = SimpleNamespace(predictor=None, replay=None)  # type: ignore[assignment]
        tier.runner = _native.ExpertRunner(
            geometry.layout, _native.Gate(), layers=layers, experts=experts, pages=count,
            targets=np.array([[0, 1]] * layers, np.int32), reserve=1,
            policy=_native.EvictionPolicy("lcp", layers, experts), link=link, top_k=picks,
            near_memory=self.pages.open(count),
        )  # fmt: skip
        tier._run_by(CacheSettings())
        self.tier = tier
        self.layers = [GpuExpertLayer(tier, self.pages, ordinal) for ordinal in range(layers)]
        kernels, counts = self.pages.kernels_of(0), self.counts
        partial = torch.zeros(4, picks, HIDDEN)

        def add(*_: Any, **__: Any) -> None:
            counts.kernels += 1

        def combine(*_: Any) -> None:
            counts.kernels += 1

        kernels.partials = lambda *_: partial  # type: ignore[method-assign]
        kernels.add, kernels.combine = add, combine  # type: ignore[method-assign]
        words = 2 * picks + experts
        self.requests = [
            ExpertRequest(
                torch.zeros(1, HIDDEN),
                packed := torch.zeros(words, dtype=torch.int32),
                picks,
                ((1, (ordinal + 1) % layers),),
                inputs=False,
                landed=packed,
            )
            for ordinal in range(layers)
        ]
        self.sums = [torch.zeros(1, HIDDEN) for _ in range(layers)]
        self.rng = np.random.default_rng(0)

    def fill(self, resident: float) -> None:
        """Bring the first experts of each layer to the GPU."""
        layers, experts, _, _ = self.shape
        scores = -np.arange(experts, dtype=np.float32)
        for layer in range(layers):
            self.tier.runner.prefetch(layer, scores, int(resident * experts), None)
            self.tier.runner.drain()

    def route(self, hits: float) -> None:
        """Choose the experts of a token: of each layer all are there in so many of all cases."""
        layers, experts, blocks, picks = self.shape
        resident = self.tier.runner.residency().reshape(layers, experts) == blocks
        for request, there in zip(self.requests, resident, strict=True):
            inside, outside = np.flatnonzero(there), np.flatnonzero(~there)
            if len(inside) < picks:
                chosen = self.rng.choice(experts, picks, replace=False)
            else:
                chosen = self.rng.choice(inside, picks, replace=False)
                if len(outside) and self.rng.random() >= hits:
                    chosen[0] = self.rng.choice(outside)
            packed = request.packed.numpy()
            packed[:picks] = chosen
            packed[picks : 2 * picks] = np.full(picks, 0.125, np.float32).view(np.int32)
            # A predictor that names what is there: prefetches move nothing.
            scores = np.zeros(experts, np.float32)
            scores[inside[:picks]] = 1
            packed[2 * picks :] = scores.view(np.int32)

    def launched(self) -> LaunchedLayers:
        """The layers for native code, with kernels that do nothing."""
        kernels = self.pages.kernels_of(0)
        lists = ["entry_page", "entry_slot", "row_entry", "row_block", "row_item", "item_token"]
        # As many parameters as the real ones have.
        self.fakes = FakeKernel.of("p" * 10 + "iiff"), FakeKernel.of("p" * 5 + "ii")
        blocks, total = (
            _native.PreparedLaunch(_native.CudaKernel(fake.address, 256, 0, kinds), (1, 1, 1), values)
            for fake, kinds, values in (
                (self.fakes[0], "p" * 10 + "iiff", [0, *lists, 0, 0, 0, 0, "clear", 0.0, 0.0]),
                (self.fakes[1], "p" * 5 + "ii", [0, "token_item", "item_weight", 0, 0, 0, 0]),
            )
        )
        kernels.prepare = lambda *_: PreparedLayer(blocks, total, None)  # type: ignore[method-assign]
        found = LaunchedLayers.of(self.layers, self.requests, self.sums)
        assert found is not None
        return found

    def ahead(self) -> run_ahead.RunAhead:
        """The layers, looked up by the test."""
        ahead = run_ahead.RunAhead.__new__(run_ahead.RunAhead)
        assert run_ahead.can_run_ahead(self.layers, self.requests)
        with torch.inference_mode():
            whole = run_ahead.RunAhead.launch
            run_ahead.RunAhead.launch = lambda *_: None  # type: ignore[assignment, method-assign]
            try:
                ahead.__init__(self.layers, self.requests, self.sums, _Graphs(self.counts))  # type: ignore[misc]
            finally:
                run_ahead.RunAhead.launch = whole  # type: ignore[method-assign]
        picks = self.shape[3]
        self.table = np.full(np.prod(self.shape[:3]), -1, np.int32)
        lookup = ahead._lookup

        def change(slot: int) -> None:
            view = lookup._views[slot]
            count = view[2 * run_ahead.CAPACITY]
            half = view[: 2 * run_ahead.CAPACITY].reshape(2, -1)
            self.table[half[0, :count]] = half[1, :count]

        def look_up(ordinal: int) -> None:
            seen, packed = ahead._seen[ordinal], self.requests[ordinal].packed.numpy()
            seen[: len(packed)] = packed
            found = self.table.reshape(*self.shape[:3])[ordinal][packed[:picks]]
            seen[-1] = (found < 0).any()

        ahead._changes = [
            Stub(self.counts, lambda slot=slot: change(slot)) for slot in range(run_ahead.SLOTS)
        ]
        ahead._experts = [
            Stub(self.counts, lambda ordinal=ordinal: look_up(ordinal)) for ordinal in range(len(self.layers))
        ]
        self.look_up = look_up
        return ahead

    def close(self) -> None:
        """Give everything back."""
        self.tier.runner.close()
        _native.cuda_unpin(self.far.reshape(-1))
        self.gpu.close()


class _Graphs:
    def __init__(self, counts: Counts) -> None:
        self.counts = counts

    def new(self) -> Any:
        """A graph that records nothing."""
        return SimpleNamespace(begin=lambda: None, end=lambda: None, abandon=lambda: None)


def measure(cuda: FakeCuda, shape: tuple[int, int, int, int], hits: float, *, way: str, tokens: int) -> dict:
    """Medians over tokens: microseconds, launches of graphs and kernels, waits, and copies to the host."""
    resident = 1.0 if hits == 1 else 0.75
    cuda.set(at_once=1)  # a thread of the stand-in that wakes up costs more than all that is measured
    model = Model(cuda, shape, resident)
    model.fill(resident)
    runs = model.ahead() if way == "ahead" else None
    launched = model.launched() if way == "host" else None
    pieces = [Stub(model.counts) for _ in range(shape[0] + 1)]
    rows = []
    for token in range(tokens):
        model.route(hits)
        counts = model.counts
        counts.graphs = counts.kernels = counts.copies = counts.waits = 0
        spent = 0.0
        with torch.inference_mode():
            if launched is not None:
                begun = time.thread_time()
                assert launched.serves()
                assert launched.begin_token()
                pieces[0].replay()
                for layer, graph in zip(model.layers, pieces[1:], strict=True):
                    launched.answer(layer.ordinal)
                    graph.replay()
                spent = time.thread_time() - begun
                counts.kernels = sum(fake.launches for fake in model.fakes)
                for fake in model.fakes:
                    fake.launches = 0
            elif runs is None:
                begun = time.thread_time()
                pieces[0].replay()
                for layer, request, total, graph in zip(
                    model.layers, model.requests, model.sums, pieces[1:], strict=True
                ):
                    layer.answer(request, total)
                    graph.replay()
                spent = time.thread_time() - begun
            else:
                work = 0.0

                def layers() -> None:
                    nonlocal work
                    begun = time.thread_time()
                    for ordinal in range(shape[0]):
                        model.look_up(ordinal)
                    work += time.thread_time() - begun

                for stub in (*runs._changes, *runs._experts):
                    inner = stub.work if not hasattr(stub, "inner") else stub.inner
                    stub.inner = inner

                    def timed(inner=inner) -> None:
                        nonlocal work
                        begun = time.thread_time()
                        inner()
                        work += time.thread_time() - begun

                    stub.work = timed
                begun = time.thread_time()
                if not (
                    runs.complete() and runs.replay_complete(Stub(counts, layers), Stub(counts), counted=True)
                ):
                    runs.replay(pieces)
                # What the test does in place of the GPU is not the host's.
                spent = time.thread_time() - begun - work
        if token >= tokens // 3:
            rows.append((spent, counts.graphs, counts.kernels, counts.waits, counts.copies))
    model.tier.runner.drain()
    model.close()
    return dict(
        zip(
            ("us", "graphs", "kernels", "waits", "copies"),
            (statistics.median(column) for column in zip(*rows, strict=True)),
            strict=True,
        )
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=60)
    options = parser.parse_args()
    cuda = FakeCuda()
    os.environ[VARIABLE] = str(cuda.path)
    torch.set_num_threads(1)
    print(f"{'model':15} {'hits':>5} {'way':>7} {'us/token':>9} {'us/layer':>9} graphs kernels waits copies")
    for name, shape in SHAPES.items():
        for hits in (1.0, 0.9, 0.5, 0.0):
            for way in ("python", "host", "ahead"):
                found = measure(cuda, shape, hits, way=way, tokens=options.tokens)
                micro = 1e6 * found["us"]
                print(
                    f"{name:15} {hits:5.0%} {way:>7} {micro:9.0f} "
                    f"{micro / shape[0]:9.1f} {found['graphs']:6.0f} {found['kernels']:7.0f} "
                    f"{found['waits']:5.0f} {found['copies']:6.0f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
