"""Experts that earlier answers have used are loaded while the program waits; prompts and close end that."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

import moechat
from moechat.configurator.systems import parse_settings
from moechat.engine import Engine
from moechat.offload import upkeep
from moechat.offload.preload import of_targets
from moechat.offload.settings import LinkSettings, OffloadOptions
from moechat.routing.hot_experts import expert_shares, long_run

PROMPT = "Once upon a time"


@pytest.fixture
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MOECHAT_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(upkeep, "LEAST_TOKENS", 10)
    return tmp_path / "home"


def load(pages: int = 160, system: str = "auto", **link: Any) -> Engine:
    settings = LinkSettings(kind="sim", **link)
    offload = OffloadOptions(pages=pages, link=settings, cache=parse_settings(system))
    return moechat.load("demo", offload=offload, tune=False)


def answer(engine: Engine, count: int) -> list[int]:
    return [step.token_id for step in engine.generate(PROMPT, max_new_tokens=count, temperature=0.0)]


def wait_for_preload(engine: Engine) -> int:
    """Blocks that were preloaded, once no more arrive."""
    near = engine.loaded.near
    assert near is not None
    before, until = -1, time.monotonic() + 10
    while time.monotonic() < until:
        near.runner.drain()
        now = int(near.runner.stats()["preloaded"])
        if now == before > 0:
            return now
        before = now
        time.sleep(0.05)
    return before


def test_the_first_tokens_after_a_start_find_the_experts_of_earlier_answers(own_home: Path) -> None:
    with load() as engine:
        engine.idle()
        cold = answer(engine, 24)
        assert engine.stats.preloaded_bytes == 0, "nothing was known"
    moved = []
    for waits in (False, True):
        with load() as engine:
            if waits:
                assert engine.idle() is None
                blocks = wait_for_preload(engine)
                assert blocks > 0
                assert any("earlier tokens" in note for note in engine.notices())
            assert answer(engine, 4) == cold[:4]
            stats = engine.stats
            moved.append(stats.demand_bytes + stats.prefetch_bytes)
            assert "preloaded_bytes" in stats.to_json()
    # The prompt and its first tokens.
    assert moved[1] < moved[0]


def test_a_prompt_stops_the_preload_and_idle_goes_on_with_it(own_home: Path) -> None:
    with load() as engine:
        answer(engine, 24)
    with load(bandwidth=3e7) as engine:  # much slower than the answer
        keeper = engine.loaded.upkeep
        assert keeper is not None
        engine.idle()
        assert keeper.preloading
        engine.logits([1])
        assert not keeper.preloading
        engine.idle()
        assert keeper.preloading
        begun = time.monotonic()
    assert time.monotonic() - begun < 2, "closing waits for no preload"


def test_where_experts_stay_the_most_used_replace_others_again_and_again(
    own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upkeep, "_PRELOAD_TOKENS", 8)
    with load(system="auto:miss=stay,prefetch=prompts,allocation=model,split=1") as engine:
        near, keeper = engine.loaded.near, engine.loaded.upkeep
        assert near is not None
        assert keeper is not None
        for _ in range(2):
            answer(engine, 24)
            engine.idle()
            wait_for_preload(engine)
            counted = keeper.pending()
            assert counted is not None
            blocks = near.geometry.blocks_per_expert
            hot, _ = long_run(expert_shares(counted), (near.pages - near.reserve) // blocks)
            resident = near.runner.residency()
            assert (resident[hot[:, 0], hot[:, 1]] == blocks).all()
            assert near.runner.check() == ""
        before = near.runner.stats()["preloaded"]
        answer(engine, 4)
        engine.idle()
        assert wait_for_preload(engine) == before, "too few tokens have come"


def test_after_a_new_plan_a_system_that_always_admits_loads_what_its_targets_ask_for(own_home: Path) -> None:
    with load(system="moepic") as engine:
        near = engine.loaded.near
        assert near is not None
        answer(engine, 24)
        assert engine.replan() is not None
        keys = near.runner.keys()
        engine.idle()
        wait_for_preload(engine)
        wanted = of_targets(keys, near.targets).experts
        resident = near.runner.residency()
        blocks = near.targets[wanted[:, 0], 1]
        assert (resident[wanted[:, 0], wanted[:, 1]] >= blocks).all()
        assert near.runner.check() == ""
