"""The clocks of a GPU: which time is whose, and the costs that plans are made from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("triton")

import moechat
from moechat.configurator.costs import Costs
from moechat.configurator.estimate import ModelShape
from moechat.configurator.systems import SYSTEMS
from moechat.engine import Engine
from moechat.offload import gpu_clocks, upkeep
from moechat.offload.gpu_clocks import GpuClocks, GpuTimes
from moechat.offload.observed import Observed, observed_on_gpu
from moechat.offload.settings import OffloadOptions

PROMPT = [5, 17, 9, 33, 21]
ON_DEMAND = replace(SYSTEMS["auto"], choose=False, prefetch="none", miss="fetch")


class Scripted:
    """A GPU whose marks have the times of a script."""

    def __init__(self, *times: float) -> None:
        self.times = list(times)
        self.complete = True

    def clocks(self) -> GpuClocks:
        return GpuClocks(self.mark, lambda mark: self.complete, lambda first, second: second - first)

    def mark(self) -> float:
        return self.times.pop(0)


@pytest.fixture
def _every_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_clocks, "EVERY", 1)
    monkeypatch.setattr(gpu_clocks, "FIRST", 1)


def decode(clocks: GpuClocks, layers: int = 2) -> None:
    with clocks.token(1):
        for _ in range(layers):
            clocks.begin_layer()
            for nbytes in (100, 50):
                clocks.begin_launch(nbytes)
                clocks.end_launch()
            clocks.end_layer()


@pytest.mark.usefixtures("_every_token")
def test_each_part_of_a_token_is_counted_once() -> None:
    gpu = Scripted(0, 2, 3, 7, 10, 11, 12, 20, 21, 24, 24, 26, 26, 29, 30, 30)
    clocks = gpu.clocks()
    decode(clocks)
    assert clocks.take() == GpuTimes(), "the GPU may still be at work on it"
    with clocks.token(1):
        pass
    times = clocks.take()
    assert times == GpuTimes(
        tokens=1,
        layers=2,
        token_seconds=29,
        dense_seconds=8,
        dense_layers=1,
        head_seconds=2 + 3,
        expert_seconds=(4 + 1) + (3 + 2),
        expert_bytes=300,
        launches=4,
        waiting_seconds=(10 - 5) + (6 - 5),
        deciding_seconds=2 * 1,
    )
    total = times.dense_seconds + times.head_seconds + times.expert_seconds + times.waiting_seconds
    assert total == times.token_seconds


def fail_in_the_middle(clocks: GpuClocks) -> None:
    def fail() -> None:
        with clocks.token(1):
            clocks.begin_layer()
            raise OSError("lost")

    with pytest.raises(OSError, match="lost"):
        fail()


@pytest.mark.usefixtures("_every_token")
@pytest.mark.parametrize("how", ["prompt", "failed", "dropped", "incomplete"])
def test_only_complete_decoded_tokens_count(how: str) -> None:
    gpu = Scripted(*range(100))
    clocks = gpu.clocks()
    if how == "prompt":
        with clocks.token(7):
            assert not clocks.timing
    elif how == "failed":
        fail_in_the_middle(clocks)
    elif how == "dropped":
        with clocks.token(1):
            clocks.begin_layer()
            clocks.drop()
            clocks.end_layer()
    else:
        decode(clocks)
        gpu.complete = False
    with clocks.token(1):
        pass
    gpu.complete = True
    with clocks.token(1):
        pass
    assert clocks.take() == GpuTimes()
    assert not clocks.timing


def test_few_tokens_are_timed_and_the_others_leave_no_mark() -> None:
    gpu = Scripted(*range(1000))
    clocks = gpu.clocks()
    timed = []
    for number in range(1, 3 * gpu_clocks.EVERY):
        before = len(gpu.times)
        decode(clocks)
        if len(gpu.times) < before:
            timed.append(number)
    assert timed == [gpu_clocks.FIRST + turn * gpu_clocks.EVERY for turn in range(3)]
    assert clocks.take().tokens == 3


# ---- costs

SHAPE = ModelShape(
    layers=10,
    experts=8,
    top_k=2,
    bits=4,
    block_bytes=1000,
    blocks_per_expert=10,
    expert_weights=20000,
    dense_bytes=1 << 20,
    head_bytes=1 << 20,
    dense_itemsize=2,
    kv_bytes=0,
    hidden_size=64,
)
BEFORE = Costs(
    attention=1e-3,
    moe=1e-3,
    head=1e-3,
    load=2e-3,
    compute_far=3e-3,
    load_together=4e-3,
    compute_together=9e-3,
    call=10e-6,
)
NOTHING = {"link_bytes": 0.0, "link_busy_seconds": 0.0, "blocks_far": 0.0, "far_seconds": 0.0}
TIMES = GpuTimes(
    tokens=5,
    layers=50,
    token_seconds=0.1,
    dense_seconds=0.009,
    dense_layers=45,
    head_seconds=0.01,
    expert_seconds=0.0205,
    expert_bytes=1_000_000,
    launches=50,
    waiting_seconds=0.01,
    deciding_seconds=0.0025,
)


def test_costs_are_those_of_the_gpu_s_clocks() -> None:
    found = observed_on_gpu(BEFORE, Observed(SHAPE, NOTHING, 100, 2.03), TIMES)
    assert found is not None
    assert found.attention == pytest.approx(0.2e-3 + 0.05e-3)
    # A token took 0.3 ms more than the GPU needed for it.
    assert found.head == pytest.approx(2e-3 + 0.3e-3)
    # 20 ms for 1 MB of blocks, without the calls; a layer computes 20 kB.
    assert found.moe == pytest.approx(10e-6 + 20_000 * 0.020 / 1_000_000)
    assert (found.load, found.compute_far) == (BEFORE.load, BEFORE.compute_far)
    assert observed_on_gpu(BEFORE, Observed(SHAPE, NOTHING, 100, 2.03), replace(TIMES, tokens=3)) is None


def test_the_costs_of_link_and_cpu_keep_their_ratio_to_those_of_both() -> None:
    moving = {**NOTHING, "link_bytes": 1e6, "link_busy_seconds": 0.5}
    alone = observed_on_gpu(BEFORE, Observed(SHAPE, moving, 100, 2.0), TIMES)
    assert alone is not None
    assert alone.load == pytest.approx(10_000 * 0.5e-6)
    assert alone.both_loads == pytest.approx(2 * alone.load)
    assert alone.both_computes == BEFORE.both_computes
    sharing = {**moving, "blocks_far": 1000.0, "far_seconds": 0.2}
    both = observed_on_gpu(BEFORE, Observed(SHAPE, sharing, 100, 2.0), TIMES)
    assert both is not None
    assert both.both_loads == pytest.approx(10_000 * 0.5e-6)
    assert both.load == pytest.approx(both.both_loads / 2)
    assert both.both_computes == pytest.approx(10 * 0.2e-3)
    assert both.compute_far == pytest.approx(both.both_computes / 3)


# ---- in the engine


@pytest.fixture
def engine(model: Path, gpu) -> Iterator[Engine]:
    offload = OffloadOptions(accelerator=gpu, pages=12, cache=ON_DEMAND)
    with moechat.load(model, device="cuda", ctx=64, offload=offload) as made:
        yield made


def take(engine: Engine) -> GpuTimes:
    assert engine.loaded.near is not None
    times: GpuTimes = engine.loaded.near.placement.pages.clocks.take()  # type: ignore[attr-defined]
    return times


def answer(engine: Engine, tokens: int) -> None:
    list(engine.generate(PROMPT, max_new_tokens=tokens, temperature=0.0))


@pytest.mark.usefixtures("_every_token")
def test_the_bytes_of_timed_tokens_are_those_that_the_runner_has_computed(engine: Engine) -> None:
    near = engine.loaded.near
    assert near is not None
    answer(engine, 4)  # records and compares
    steps = iter(engine.generate(PROMPT, max_new_tokens=6, temperature=0.0))
    next(steps)  # the prompt
    take(engine)
    computed = near.stats()["bytes_computed"]
    list(steps)
    computed = near.stats()["bytes_computed"] - computed
    next(iter(engine.generate(PROMPT, max_new_tokens=1, temperature=0.0)))
    times = take(engine)
    assert (times.tokens, times.layers) == (5, 5 * near.layers)
    assert times.expert_bytes == computed
    parts = times.dense_seconds + times.head_seconds + times.expert_seconds + times.waiting_seconds
    assert parts == pytest.approx(times.token_seconds)


@pytest.mark.usefixtures("_every_token")
def test_a_slow_link_shows_as_waiting_and_not_as_computing(engine: Engine, driver) -> None:
    answer(engine, 4)
    near = engine.loaded.near
    assert near is not None
    near.shrink(0.9)
    answer(engine, 4)
    steps = iter(engine.generate(PROMPT, max_new_tokens=4, temperature=0.0))
    next(steps)
    take(engine)
    driver.set(latency=0.02)
    list(steps)
    driver.set(latency=0.0)
    answer(engine, 1)
    times = take(engine)
    assert times.tokens > 0
    # Two pages are left: every layer misses an expert.
    assert times.waiting_seconds > 0.01 * times.layers
    assert times.deciding_seconds <= times.waiting_seconds


@pytest.mark.usefixtures("_every_token")
def test_a_new_plan_is_made_from_what_the_gpu_s_clocks_have_shown(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upkeep, "_OBSERVED_TOKENS", 4)
    answer(engine, 12)
    replanned = engine.replan()
    assert replanned is not None
    assert replanned.costs_from == "11 decoded tokens"
    assert engine.loaded.near is not None
    assert engine.loaded.near.knowledge is not None
    # The interpreter takes milliseconds for what a GPU does in microseconds.
    assert engine.loaded.near.knowledge.costs.moe > 1e-3
