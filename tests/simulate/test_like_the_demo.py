"""The simulator against the engine's own near tier over a model that decodes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import moechat
from moechat.bench.decode import Bench
from moechat.bench.predicted import Recorder, predict, tier_of
from moechat.configurator.systems import parse_settings
from moechat.offload.host import HostPlacement
from moechat.offload.settings import LinkSettings, OffloadOptions
from moechat.offload.tier import ExpertTier, TierConfig
from moechat.predict import ReplayPredictor
from moechat.routing import Replay, Trace
from moechat.simulate import Timing

PROMPT, TIMED = 12, 40
COUNTED = (
    *(f"hits_{kind}" for kind in ("full", "prefetch", "top", "miss")),
    *("blocks_wanted", "blocks_resident", "blocks_prefetched", "fetched_demand", "fetched_prefetch"),
    *("prefetch_wasted", "evicted"),
)


class Settled(Recorder):
    """Waits for all transfers after each layer, so that no decision depends on time."""

    def finish(self, *arguments: Any) -> int:
        walked: int = self._runner.finish(*arguments)
        self._runner.drain()
        return walked


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with pytest.MonkeyPatch.context() as patch:
        home: Path = tmp_path_factory.mktemp("home")
        patch.setenv("MOECHAT_HOME", str(home))
        engine = moechat.load("demo", dtype="float32", offload=OffloadOptions(pages=0))
        yield Bench(engine)
        engine.close()


@pytest.fixture(scope="module")
def replay(bench: Bench) -> Replay:
    rng = np.random.default_rng(0)
    count = bench.store.geometry.num_experts
    popular = np.log(1.0 / (1 + np.arange(count)))
    keys = popular + rng.gumbel(size=(PROMPT + TIMED + 1, bench.layers, count))
    chosen = np.argsort(-keys, axis=-1)[..., : bench.top_k].astype(np.int32)
    return Replay(Trace(np.ascontiguousarray(chosen), np.array([0, len(chosen)]), count))


@pytest.mark.parametrize(
    "system",
    [
        "on-demand",
        "mixtral-offloading",
        "pregated",
        "deepspeed",
        "auto:allocation=uniform,split=0.5",
        "moepic",
        "auto:lookahead=3,prefetch_experts=4",
        "oracle",
    ],
)
def test_blocks_and_hits_of_a_replay_are_those_of_the_engine(
    bench: Bench, replay: Replay, system: str
) -> None:
    settings = parse_settings(system)
    geometry = bench.store.geometry
    everything = bench.layers * geometry.num_experts * geometry.blocks_per_expert
    replay.rewind()
    config = TierConfig(
        bench.store,
        bench.top_k,
        link=LinkSettings(kind="sim"),
        predictor=ReplayPredictor(replay, lookahead=3),
        replay=replay,
    )
    near = ExpertTier(config, HostPlacement(), pages=everything * 3 // 4, settings=settings)
    recorder = Settled(near.runner, bench.layers)
    near.runner = recorder  # type: ignore[assignment]
    tokens = np.random.default_rng(1).integers(0, bench.vocabulary, PROMPT + TIMED).tolist()
    with bench.experts([near.layer(ordinal) for ordinal in range(bench.layers)]):
        _, decoding = bench.start(tokens[:PROMPT])
        near.reset_stats()
        for token in tokens[PROMPT:]:
            decoding.feed([token])
    measured = near.stats()
    recorded, tier = recorder.routing(geometry.num_experts), tier_of(near)
    near.close()
    assert np.array_equal(recorded.trace.experts, replay.trace.experts[: PROMPT + TIMED])
    free = Timing(attention=1.0, head=0.0, compute=(0.0,), link=(0.0,))
    found = predict(recorded, settings, tier, free, fill=0, timed=TIMED, hidden_size=geometry.hidden_size)
    assert found is not None
    # Which blocks of a prefetch still find a page depends on which of the layer's experts was done first.
    for key in COUNTED:
        assert found.counters[key] == pytest.approx(measured[key], rel=0.01, abs=3), key
    assert found.bytes_per_token * TIMED == pytest.approx(measured["link_bytes"], rel=0.01)
