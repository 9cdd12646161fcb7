"""The watch on a simulated GPU: ways that ask it for the same take turns, and a tier that was shrunk."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("triton")


import moechat
from moechat.configurator.systems import SYSTEMS, CacheSettings, RequestForm
from moechat.engine import Engine
from moechat.offload.settings import OffloadOptions
from moechat.offload.tier import ExpertTier
from moechat.offload.watching import TierWatch
from moechat.trials import watch as watch_module

AUTO = replace(SYSTEMS["auto"], choose=False)
NOTHING_AHEAD = replace(AUTO, prefetch="prompts")


@pytest.fixture
def engine(model: Path, gpu) -> Iterator[Engine]:
    offload = OffloadOptions(accelerator=gpu, pages=12)
    with moechat.load(model, device="cuda", ctx=64, offload=offload, replan_tokens=0) as made:
        yield made


def near_of(engine: Engine) -> ExpertTier:
    assert engine.loaded.near is not None
    return engine.loaded.near


def run_by(near: ExpertTier, **changes) -> None:
    settings = replace(AUTO, **changes)
    near.switch(settings, near.plan_for(settings))


def test_ways_take_turns_that_the_requests_at_work_serve(engine: Engine) -> None:
    near = near_of(engine)
    may = near.placement.may_take_turns
    assert may(AUTO, replace(AUTO, miss="compute"))
    assert may(AUTO, replace(AUTO, prefetch_experts=0))
    assert may(AUTO, replace(AUTO, allocation="uniform", split=1.0))
    assert not may(AUTO, replace(AUTO, lookahead=2))
    assert may(replace(AUTO, lookahead=2), AUTO)
    assert may(AUTO, NOTHING_AHEAD)
    assert not may(NOTHING_AHEAD, AUTO)
    assert may(AUTO, replace(AUTO, miss="fetch"))
    assert not may(replace(AUTO, miss="fetch"), AUTO)
    # Without predictions it does not matter how far ahead they would look.
    assert may(NOTHING_AHEAD, replace(NOTHING_AHEAD, lookahead=2))
    assert may(NOTHING_AHEAD, replace(NOTHING_AHEAD, miss="compute"))


def test_a_form_of_requests_has_predictions_their_distance_and_the_cpus_part(engine: Engine) -> None:
    pages = near_of(engine).placement.pages  # type: ignore[attr-defined]
    assert pages.request_form(AUTO) == RequestForm(1, True)
    assert pages.request_form(replace(AUTO, lookahead=2, miss="fetch")) == RequestForm(2, False)
    assert pages.request_form(NOTHING_AHEAD) == RequestForm(0, True)
    pages.far_records = ()
    assert pages.request_form(AUTO) == RequestForm(1, False)


def test_the_ways_that_are_watched_are_served_by_the_graphs(engine: Engine) -> None:
    near = near_of(engine)
    pages = near.placement.pages  # type: ignore[attr-defined]
    for changes in ({}, {"prefetch": "prompts"}, {"miss": "compute"}, {"lookahead": 2}):
        run_by(near, **changes)
        watching = TierWatch(near)
        watching.begin()
        assert watching._watched is not None
        ways = watching._watched.ways
        assert len(ways) >= 2
        form = pages.request_form(near.settings)
        assert all(form.serves(pages.request_form(way)) for way in ways.values())
    run_by(near, miss="fetch")
    alone = TierWatch(near)
    alone.begin()
    assert alone._watched is None  # no other candidate does without the CPU


@pytest.mark.parametrize("lookahead", [1, 2])
def test_the_graphs_serve_all_ways_that_take_turns(
    engine: Engine, gpu, monkeypatch: pytest.MonkeyPatch, lookahead: int
) -> None:
    for name in ("_FIRST", "_PAUSE", "_LEAST_REST", "_MOST_REST", "_TURN", "_FEWEST_RECENT"):
        monkeypatch.setattr(watch_module, name, 1)
    monkeypatch.setattr(watch_module, "ALLOWED_SHARE", 100.0)
    near = near_of(engine)
    run_by(near, lookahead=lookahead)
    found: list[CacheSettings] = []
    load_by = near.load_by
    monkeypatch.setattr(near, "load_by", lambda settings: found.append(settings) or load_by(settings))
    prompt = [5, 17, 9, 33, 21]
    list(engine.generate(prompt, max_new_tokens=3, temperature=0.0))
    recorded = sum(len(graphs.made) for graphs in gpu.graphs_made)
    assert recorded
    list(engine.generate(prompt, max_new_tokens=3, temperature=0.0))
    depths = {way.lookahead if way.predicts else 0 for way in found}
    assert len(depths) > 1, "ways took turns that look another number of layers ahead"
    assert sum(len(graphs.made) for graphs in gpu.graphs_made) == recorded
    assert near.runner.check() == ""


def test_a_shrunk_tier_is_watched_anew(engine: Engine) -> None:
    near = near_of(engine)
    run_by(near)
    watching, before = TierWatch(near), near.settings
    watching.begin()
    while near.settings == before:
        watching.token(0.01)
    assert watching._watched is not None
    watch = watching._watched.watch
    runner = near.runner
    assert near.shrink(0.2) > 0
    assert near.runner is not runner
    watching.begin()
    assert watching._watched is None or watching._watched.watch is not watch
    for _ in range(40):
        watching.token(0.01)
    assert near.runner.check() == ""
