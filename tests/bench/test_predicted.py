"""The simulator's prediction for a measurement: recording its inputs, and using them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moechat.bench.figures import Run
from moechat.bench.measure import run_bench
from moechat.bench.options import BenchOptions, LinkChoice, parse_systems
from moechat.bench.predicted import LinkTimes, Recorder, floor_timing, kernel_curve, link_times
from moechat.engine import Engine
from moechat.offload.settings import LinkSettings
from moechat.store.store import Store


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moechat.bench.speeds._COMPUTE_SECONDS", 0.01)
    monkeypatch.setattr("moechat.bench.speeds._LINK_SECONDS", 0.01)


class Silent:
    """A runner that does nothing."""

    def begin(self, *arguments: Any) -> None: ...
    def prefetch(self, *arguments: Any, later: bool) -> int:
        return 7


def record(recorder: Recorder, layer: int, chosen: list[list[int]]) -> None:
    index = np.array(chosen, np.int64)
    recorder.begin(layer, index, np.ones(index.shape, np.float32))


def test_calls_of_a_runner_become_a_trace_with_predictions() -> None:
    recorder = Recorder(Silent(), layers=2)
    scores = np.array([0.1, 0.9, float("nan"), 0.9], np.float32)
    record(recorder, 0, [[0, 1], [1, 2], [2, 3]])  # a prompt
    record(recorder, 1, [[0, 1], [0, 1], [0, 1]])
    assert recorder.prefetch(0, scores, 2, None) == 7  # for the token after it
    scores[:] = 0  # the predictor reuses its array
    record(recorder, 0, [[3, 0]])
    recorder.prefetch(1, -np.arange(4, dtype=np.float32), 1, None)
    recorder.prefetch(1, None, 4, None)  # a whole layer: no prediction
    record(recorder, 1, [[2, 1]])
    recorder.prefetch(0, scores, 2, None)  # for a token that is not generated
    record(recorder, 0, [[1, 2]])  # cut short
    found = recorder.routing(4)
    assert found.starts.tolist() == [0, 3, 4]
    assert found.trace.experts[:, 0].tolist() == [[0, 1], [1, 2], [2, 3], [3, 0]]
    assert found.trace.experts[3, 1].tolist() == [2, 1]
    assert found.rankings is not None
    assert found.rankings.shape == (1, 4, 2, 2)
    assert found.rankings[0, 3].tolist() == [[1, 3], [0, -1]]
    assert (found.rankings[0, :3] == -1).all()


def test_without_predictions_there_are_no_rankings() -> None:
    recorder = Recorder(Silent(), layers=1)
    record(recorder, 0, [[0]])
    assert recorder.routing(2).rankings is None


def test_the_parts_of_the_floor_add_up_to_it() -> None:
    run = Run(1.0, (0.5, 0.5, 0.5), {"experts": 0.9}, {"compute_seconds": 0.6}, 1.0)
    curve = np.array([0.01, 0.02, 0.04])
    timing = floor_timing([run], 4, curve, LinkTimes(0.001, (0.1,), 5))
    # A token has 0.2 seconds of kernels in 4 layers.
    assert timing.compute == pytest.approx((0.0125, 0.025, 0.05))
    assert 4 * (timing.attention + timing.compute[-1]) + timing.head == pytest.approx(0.5)
    assert (timing.latency, timing.link, timing.in_flight_bytes) == (0.001, (0.1,), 5)


def test_link_descriptions_match_the_links(tiny_store: Path) -> None:
    store = Store.open(tiny_store)
    block = store.geometry.record_bytes
    simulated = link_times(store, LinkSettings(kind="sim", latency=0.25), 1e6)
    assert simulated == LinkTimes(0.25, (block / 1e6,), 2 << 20)
    file = link_times(store, LinkSettings(), 1e9)
    assert file.link[0] == pytest.approx(block / 1e9)
    assert len(file.link) == (1 << 20) // block
    assert 0 <= file.latency < 1


def test_more_blocks_never_take_less_time(tiny_store: Path) -> None:
    curve = kernel_curve(Store.open(tiny_store), 7)
    assert len(curve) == 7
    assert curve[0] > 0
    assert (np.diff(curve) >= 0).all()


def test_the_simulator_is_close_where_the_link_is_the_bottleneck(engine: Engine, trace_file: Path) -> None:
    options = BenchOptions(
        systems=parse_systems("on-demand,auto:split=0.5,static"),
        fractions=(0.25,),
        link=LinkChoice("sim", bandwidth=1.5e5),
        routing=trace_file,
        prompt_tokens=2,
        warmup_tokens=1,
        tokens=5,
        fill_tokens=20,
        runs=1,
    )
    cases = {case["system"]: case for case in run_bench(engine, options)["cases"]}
    assert cases.pop("static")["predicted_tpot_ms"] is None
    for name, case in cases.items():
        # Other load of the machine makes the measured time longer, never the simulated one.
        assert 0.6 < case["predicted_ratio"] < 1.3, name
        measured = 1000 * case["tpot_s"]["median"]
        assert case["predicted_tpot_ms"] == pytest.approx(case["predicted_ratio"] * measured)
