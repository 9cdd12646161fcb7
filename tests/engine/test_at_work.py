"""The map of experts agrees with what the tier holds."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import moechat
from moechat import Engine, _native
from moechat.engine.at_work import Watcher
from moechat.offload.expert_map import Place, RecentUse, read_map
from moechat.offload.settings import LinkSettings, OffloadOptions

PROMPT = [5, 60, 7, 81, 9, 100, 11, 12]


def answer(engine: Engine, count: int = 8) -> None:
    for _ in engine.generate(PROMPT, max_new_tokens=count, temperature=0.0):
        pass


@pytest.mark.parametrize("pages", [6, 11])
def test_the_map_agrees_with_the_tier_after_every_token(pages: int, chat_model: Path, home: Path) -> None:
    with moechat.load(chat_model, offload=OffloadOptions(pages=pages)) as engine:
        near, watcher = engine.loaded.near, Watcher(engine)
        assert near is not None
        blocks = near.geometry.blocks_per_expert
        seen = set()
        for _ in engine.generate(PROMPT, max_new_tokens=12, temperature=0.0):
            near.drain()
            found = watcher.look()
            resident = near.runner.residency()
            for row, held in zip(found.map.places, resident, strict=True):
                for place, count in zip(row, held, strict=True):
                    wanted = "m" if count == blocks else "p" if count else "."
                    assert place == wanted
            assert found.map.blocks == resident.sum()
            assert found.used_bytes == resident.sum() * near.geometry.record_bytes
            assert found.map.layers == tuple(entry.layer for entry in engine.loaded.store.manifest.layers)
            assert sum(found.map.counts().values()) == resident.size
            seen |= set("".join(found.map.places))
        assert {"m", "."} <= seen
        assert found.link is not None
        assert found.link.demand_bytes == near.stats()["link_bytes_demand"] > 0
        assert found.link.demand_bytes + found.link.ahead_bytes == near.stats()["link_bytes"]


def test_blocks_on_their_way_are_shown(chat_model: Path, home: Path) -> None:
    slow = OffloadOptions(pages=11, link=LinkSettings(kind="sim", bandwidth=1.0))
    with moechat.load(chat_model, offload=slow) as engine:
        near = engine.loaded.near
        assert near is not None
        near.runner.prefetch(1, None, 2, None)
        found = Watcher(engine).look().map
        assert found.places[1][:1] == Place.COMING
        assert found.counts()["coming"] == sum(row.count("w") for row in found.places) > 0


def test_uses_are_shares_of_recent_tokens(chat_model: Path, home: Path) -> None:
    with moechat.load(chat_model, offload=OffloadOptions(pages=6)) as engine:
        near, watcher = engine.loaded.near, Watcher(engine)
        assert near is not None
        before = watcher.look().map
        assert set("".join(before.uses)) == {"0"}
        answer(engine, 20)
        tokens, activations = near.runner.activations()
        expected = np.rint(9 * np.sqrt(activations / tokens)).astype(int)
        assert [[int(digit) for digit in row] for row in watcher.look().map.uses] == expected.tolist()
        near.reset_routing_counts()
        assert [[int(digit) for digit in row] for row in watcher.look().map.uses] == expected.tolist()
        near.reset_stats()
        assert watcher.look().link is not None


def test_mapped_experts_are_all_in_memory(engine: Engine) -> None:
    answer(engine, 2)
    found = Watcher(engine).look()
    assert set("".join(found.map.places)) == {"m"}
    assert found.map.uses == ()
    assert found.link is None
    assert found.used_bytes == engine.describe().memory_experts_bytes
    assert found.map.counts()["memory"] == len(found.map.layers) * len(found.map.places[0])


def large_runner() -> _native.ExpertRunner:
    """A runner with as many experts as large models have."""
    rng = np.random.default_rng(0)
    layout = _native.BlockLayout(32, 64, 4)
    runner = _native.ExpertRunner(
        layout,
        _native.Gate(),
        layers=48,
        experts=128,
        pages=600,
        targets=np.tile(np.array([10, 1], np.int32), (48, 1)),
        reserve=8,
        policy=_native.EvictionPolicy("lcp", 48, 128),
        link=_native.sim_link([np.zeros(128 * layout.record_bytes, np.uint8)] * 48),
        top_k=8,
    )
    x, out = np.zeros((1, 32), np.float32), np.zeros((1, 32), np.float32)
    for _ in range(10):
        for layer in range(48):
            chosen = rng.permutation(128)[:8][None].astype(np.int64)
            runner.begin(layer, chosen, np.ones((1, 8), np.float32))
            runner.finish(x, out)
    return runner


def test_a_map_of_6144_experts_takes_less_than_a_millisecond() -> None:
    runner = large_runner()

    near: Any = SimpleNamespace(runner=runner, geometry=SimpleNamespace(blocks_per_expert=1))
    recent, seconds = RecentUse(), []
    for _ in range(50):
        begun = time.perf_counter()
        found = read_map(near, tuple(range(48)), 128, recent)
        found.counts()
        seconds.append(time.perf_counter() - begun)
    assert found.counts()["memory"] > 300
    assert sorted(seconds)[len(seconds) // 2] < 1e-3
    runner.close()
