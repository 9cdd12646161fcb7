"""The timeline against the real expert runner: the same trace, the same decisions.

Every combination of ``miss`` and launch pattern: on the host over a simulated link, and as on a GPU over the
stand-in CUDA driver. Here all transfers end before the next layer begins. Where the CPU computes missing
blocks, time decides which of them, and how much is prefetched: native/tests/schedule_test.cc runs that on a
clock of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moechat import _native

HIDDEN = 64
# Whatever is counted, but for times and for what only one of the two has.
COUNTED = (
    *(f"{kind}_{hit}" for kind in ("hits", "prefill_hits") for hit in ("full", "prefetch", "top", "miss")),
    *("blocks_wanted", "blocks_resident", "blocks_prefetched", "fetched_demand", "fetched_prefetch"),
    *("prefetch_wasted", "evicted", "blocks_staged", "blocks_far", "bytes_computed"),
    *("link_bytes_demand", "link_bytes_next", "link_bytes_later"),
)


POLICIES = ["lcp", "lru", "lfu", "blend", "two_level_lru", "request", "map", "belady"]
# Decided by time where the CPU may compute what is on its way.
SHARED = ("blocks_far", "bytes_computed")


@dataclass
class Case:
    """A model's shape, its routing, and a near tier for it."""

    experts: Any  # int32 [tokens, layers, k]
    count: int
    blocks: int
    pages: int
    targets: Any
    reserve: int
    policy: str = "lcp"
    whole: bool = False
    ahead: str = "ranked"
    lookahead: int = 1
    width: int = 0
    starts: Any = None
    rankings: Any = None
    miss: str = "fetch"
    launch: str = "host"
    rules: dict[str, Any] = field(default_factory=dict)
    queues: Any = None  # int32 [tokens, 1 + layers, queued]
    scores: Any = None
    requests: Any = None

    def __post_init__(self) -> None:
        self.tokens, self.layers, self.k = self.experts.shape
        if self.starts is None:
            self.starts = np.arange(self.tokens + 1, dtype=np.int64)
        self.layout = _native.BlockLayout(HIDDEN, 64 * self.blocks, 16)

    def _policy(self) -> _native.EvictionPolicy:
        future = self.experts if self.policy == "belady" else None
        return _native.EvictionPolicy(self.policy, self.layers, self.count, future=future)

    def timeline(self, **times: Any) -> _native.Timeline:
        free = {"attention": 0.0, "head": 0.0, "call": 0.0, "compute": [0.0], "latency": 0.0, "link": [0.0]}
        return _native.Timeline(
            layers=self.layers,
            experts=self.count,
            blocks=self.blocks,
            block_bytes=self.layout.record_bytes,
            pages=self.pages,
            targets=self.targets,
            reserve=self.reserve,
            policy=self._policy(),
            whole_experts=self.whole,
            miss=self.miss,
            launch=self.launch,
            ahead=self.ahead,
            lookahead=self.lookahead,
            ahead_experts=self.width,
            ahead_bytes=None,
            stream_tokens=0,
            group_items=0,
            far_block=0.0,
            far_block_shared=0.0,
            link_shared=[],
            **{"in_flight_bytes": 2 << 20, **free, **times, **self.rules},
        )

    def simulate(self, **times: Any) -> dict[str, float]:
        timeline = self.timeline(**times)
        ahead = {"queues": self.queues, "queue_scores": self.scores, "requests": self.requests}
        timeline.run(self.experts, self.starts, self.rankings, **ahead)
        timeline.drain()
        assert timeline.check() == ""
        return {**timeline.stats(), "residency": timeline.residency().tolist()}

    def run(self, *, settled: bool, cuda: Any = None, **link: Any) -> dict[str, Any]:
        """The same with the engine; ``settled`` waits for all transfers whenever a layer is done."""
        records = [
            np.zeros((self.count, self.blocks, self.layout.record_bytes), np.uint8)
            for _ in range(self.layers)
        ]
        with self._memory(records, cuda, link) as (stream, options):
            runner = _native.ExpertRunner(
                self.layout,
                _native.Gate(),
                layers=self.layers,
                experts=self.count,
                pages=self.pages,
                targets=self.targets,
                reserve=self.reserve,
                policy=self._policy(),
                whole_experts=self.whole,
                **self.rules,
                far_records=[] if self.miss == "fetch" else [layer.reshape(-1) for layer in records],
                **options,
            )
            try:
                for first, end in zip(self.starts[:-1], self.starts[1:], strict=True):
                    self._begin_pass(runner, int(first), int(end))
                    for layer in range(self.layers):
                        self._run_layer(runner, layer, int(first), int(end), stream)
                        if settled:
                            runner.drain()
                runner.drain()
                assert runner.check() == ""
                return {**runner.stats(), "residency": runner.residency().tolist()}
            finally:
                if stream is not None:
                    stream.synchronize()
                runner.close()

    @contextmanager
    def _memory(self, records: list[Any], cuda: Any, link: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
        """Link and pages: the host's, or those of the stand-in GPU with a stream of its own."""
        if self.launch == "host":
            yield None, {"link": _native.sim_link(records, **link)}
            return
        cuda.reset()
        pages, stream = cuda.pages(self.pages, self.layout.record_bytes), cuda.stream()
        for layer in records:
            _native.cuda_pin(layer.reshape(-1))
        made = _native.cuda_link([(layer, layer.nbytes, True, "", 0) for layer in records], **link)
        try:
            yield stream, {"link": made, "near_memory": pages.ctypes.data}
        finally:
            stream.close()
            for layer in records:
                _native.cuda_unpin(layer.reshape(-1))
            cuda.disown(pages.ctypes.data)

    def _run_layer(self, runner: _native.ExpertRunner, layer: int, first: int, end: int, stream: Any) -> None:
        tokens = end - first
        x = np.zeros((tokens, HIDDEN), np.float32)
        index = np.ascontiguousarray(self.experts[first:end, layer], dtype=np.int64)
        runner.begin(layer, index, np.ones(index.shape, np.float32), self.miss)
        self._prefetch(runner, layer, end - 1, tokens)
        if self.launch == "host" and self.miss == "fetch":
            runner.finish(x, np.empty_like(x))
            return
        lists = np.zeros(1 << 16, np.int32)
        handle = 0 if stream is None else stream.handle
        runner.finish_on_device(handle, tokens, 1 << 20, lists, 0, lambda *_: 0, x=x, out=np.empty_like(x))

    def _begin_pass(self, runner: _native.ExpertRunner, first: int, end: int) -> None:
        if self.requests is not None and first in self.requests:
            runner.begin_request()
        if self.ahead == "queued" and end - first == 1:
            self._prefetch_queue(runner, first, 0)
            runner.drain()

    def _prefetch_queue(self, runner: _native.ExpertRunner, token: int, slot: int) -> None:
        queue = self.queues[token, slot]
        wanted = queue[: int((queue >= 0).sum())]
        if len(wanted) or slot:
            layers, experts = (part.astype(np.int32) for part in np.divmod(wanted, self.count))
            runner.prefetch_ahead(layers, experts, self.scores[token, slot, : len(wanted)])

    def _prefetch(self, runner: _native.ExpertRunner, layer: int, token: int, tokens: int) -> None:
        if self.ahead == "queued":
            if tokens == 1:
                self._prefetch_queue(runner, token, layer + 1)
            return
        if self.ahead in ("none", "prompts") or self.layers == 1:
            return
        if self.ahead == "whole-layer":
            runner.prefetch((layer + 1) % self.layers, None, self.count, None)
            return
        if tokens > 1 and layer < self.layers - 1:
            return
        for ahead in range(1, min(self.lookahead, self.layers - 1) + 1):
            turns, target = divmod(layer + ahead, self.layers)
            if token + turns >= self.tokens:
                continue
            scores = np.full(self.count, -math.inf, np.float32)
            ranking = self.rankings[ahead - 1, token + turns, target]
            scores[ranking] = np.arange(len(ranking), 0, -1)
            runner.prefetch(target, scores, self.width, None, later=ahead > 1)


def random_case(draw: st.DrawFn) -> Case:
    layers, count, blocks = draw(st.integers(1, 7)), draw(st.integers(2, 8)), draw(st.integers(1, 4))
    k = draw(st.integers(1, min(3, count)))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    longest = draw(st.sampled_from([1, 1, 5]))
    lengths = rng.integers(1, longest + 1, size=40)
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    tokens = int(starts[-1])
    weights = 1.0 / (1 + np.arange(count))  # a few experts are chosen often
    keys = np.log(weights) + rng.gumbel(size=(tokens, layers, count))
    experts = np.ascontiguousarray(np.argsort(-keys, axis=-1)[..., :k], dtype=np.int32)
    lookahead = draw(st.integers(1, 3))
    width = draw(st.integers(0, count))
    noise = rng.gumbel(size=(lookahead, tokens, layers, count))
    rankings = np.ascontiguousarray(np.argsort(-(keys + noise), axis=-1)[..., : max(width, 1)], np.int32)
    # Room for what is on its way, so that no decision has to wait for a page.
    transit = (min(count, longest * k) + lookahead * count) * blocks
    kept = draw(st.integers(0, layers * count * blocks))
    per_layer = kept // layers
    split = draw(st.integers(1, blocks))
    target = (min(count, per_layer // split), split)
    return Case(
        experts=experts,
        count=count,
        blocks=blocks,
        pages=kept + transit,
        targets=np.tile(np.array(target, np.int32), (layers, 1)),
        reserve=transit,
        policy=draw(st.sampled_from(POLICIES)),
        whole=draw(st.booleans()),
        ahead=draw(st.sampled_from(["none", "prompts", "ranked", "whole-layer"])),
        lookahead=lookahead,
        width=width,
        starts=starts,
        rankings=rankings,
        rules={
            "admit": draw(st.sampled_from(["key", "always", "best"])),
            "victims": draw(st.sampled_from(["farthest", "lowest"])),
        },
        requests=np.sort(rng.choice(starts[:-1], size=draw(st.integers(0, 5)), replace=False)),
    )


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_queues_over_layers_equal_the_engines(data: st.DataObject) -> None:
    case = random_case(data.draw)
    case.ahead = "queued"
    rng = np.random.default_rng(data.draw(st.integers(0, 1 << 30)))
    # As many as are given to the link at a time: how fast they arrive decides about the others.
    queued = data.draw(st.integers(1, 4))
    shape = (case.tokens, case.layers + 1, queued)
    every = case.layers * case.count
    case.queues = np.full(shape, -1, np.int32)
    for token in range(case.tokens):
        for slot in range(case.layers + 1):
            count = int(rng.integers(0, min(queued, every) + 1))
            case.queues[token, slot, :count] = rng.choice(every, count, replace=False)
    case.scores = rng.random(shape, dtype=np.float32)
    expected = case.run(settled=True)
    found = case.simulate()
    assert {key: found[key] for key in COUNTED} == {key: expected[key] for key in COUNTED}
    assert found["residency"] == expected["residency"]


@pytest.mark.parametrize("launch", ["host", "card"])
# Uploads of the others depend on measured rates.
@pytest.mark.parametrize("miss", ["fetch", "cpu", "seldom"])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_blocks_and_hits_equal_the_engines_when_timing_has_no_influence(
    cuda: Any, miss: str, launch: str, data: st.DataObject
) -> None:
    case = random_case(data.draw)
    case.miss, case.launch = miss, launch
    counted = COUNTED
    if miss != "fetch":
        case.ahead = "none"
        case.policy = data.draw(st.sampled_from(["forecast", case.policy]))
        counted = tuple(key for key in COUNTED if key not in SHARED)
    expected = case.run(settled=True, cuda=cuda)
    found = case.simulate()
    assert {key: found[key] for key in counted} == {key: expected[key] for key in counted}
    record = case.layout.record_bytes
    computed = [counts["blocks_far"] * record + counts["bytes_computed"] for counts in (found, expected)]
    assert computed[0] == computed[1]
    assert found["residency"] == expected["residency"]
