"""The watch on a real tier: the same tokens whichever way is at work, and when it begins anew."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import moechat
from moechat.configurator.systems import SYSTEMS, CacheSettings
from moechat.engine import Engine
from moechat.offload.settings import LinkSettings, OffloadOptions
from moechat.offload.tier import ExpertTier
from moechat.offload.watching import TierWatch
from moechat.trials import Watch
from moechat.trials import watch as watch_module

PROMPT = "Once upon a time"
AUTO = SYSTEMS["auto"]


def load(system: str = "auto", pages: int = 160) -> Engine:
    # As fast as memory: these tests do not depend on a disk.
    offload = OffloadOptions(pages=pages, link=LinkSettings(kind="sim"))
    return moechat.load("demo", system=system, offload=offload, replan_tokens=0)


def near_of(engine: Engine) -> ExpertTier:
    assert engine.loaded.near is not None
    return engine.loaded.near


@pytest.fixture
def engine(moechat_home: Path) -> Iterator[Engine]:
    with load() as made:
        yield made


def answer(engine: Engine, count: int = 60) -> list[int]:
    return [step.token_id for step in engine.generate(PROMPT, max_new_tokens=count, temperature=0.0)]


def watch_of(watching: TierWatch) -> Watch:
    assert watching._watched is not None
    return watching._watched.watch


@pytest.fixture
def restless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials begin at once, take turns token by token, and never rest."""
    for name in ("_FIRST", "_PAUSE", "_LEAST_REST", "_MOST_REST", "_TURN", "_FEWEST_RECENT"):
        monkeypatch.setattr(watch_module, name, 1)
    monkeypatch.setattr(watch_module, "_SETTLE", 0)
    monkeypatch.setattr(watch_module, "_MOST_TOKENS", 4)
    monkeypatch.setattr(watch_module, "ALLOWED_SHARE", 100.0)


def recorded_ways(monkeypatch: pytest.MonkeyPatch) -> list[CacheSettings]:
    """Every way that a tier was switched to."""
    found: list[CacheSettings] = []
    load_by = ExpertTier.load_by

    def recording(self: ExpertTier, settings: CacheSettings) -> None:
        found.append(settings)
        load_by(self, settings)

    monkeypatch.setattr(ExpertTier, "load_by", recording)
    return found


def test_tokens_are_the_same_while_ways_take_turns(
    moechat_home: Path, restless: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with load("on-demand") as plain:
        expected = answer(plain)
    ways = recorded_ways(monkeypatch)
    with load() as engine:
        first = answer(engine)
        engine.idle()
        second = answer(engine)
        assert near_of(engine).runner.check() == ""
    assert first == second == expected
    # Without a GPU: one layer ahead, two, or none.
    assert {(each.prefetch, each.lookahead) for each in ways} == {
        ("next-router", 1),
        ("next-router", 2),
        ("prompts", 1),
    }
    assert len(ways) > 30


def test_a_tier_without_a_choice_is_not_watched(
    moechat_home: Path, restless: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ways = recorded_ways(monkeypatch)
    for system in ("auto:prefetch=none", "moepic", "on-demand"):
        with load(system) as engine:
            answer(engine, 20)
            engine.idle()
            assert engine.loaded.upkeep is not None
            assert engine.loaded.upkeep.switches == []
            assert not engine.loaded.upkeep._watch.kept
    assert ways == []


def test_a_watch_counts_tokens_with_the_hardness_of_their_routing(engine: Engine) -> None:
    near = near_of(engine)
    watching, hardness = TierWatch(near), []
    watching.begin()
    watch = watch_of(watching)
    count = watch.token

    def counting(seconds: float, hard: float) -> bool:
        hardness.append(hard)
        return count(seconds, hard)

    watch.token = counting  # type: ignore[method-assign]
    before = near.runner.hard_activations()
    for _ in engine.generate(PROMPT, max_new_tokens=11, temperature=0.0):
        watching.token(0.01)
    assert len(hardness) == 11
    assert sum(hardness) == near.runner.hard_activations() - before
    assert len(set(hardness)) > 1


def test_a_faster_way_is_at_work_after_some_tokens(engine: Engine) -> None:
    near = near_of(engine)
    watching = TierWatch(near)
    watching.begin()
    slow = near.settings
    for _ in range(200):  # before the next round
        watching.token(0.02 if near.settings == slow else 0.01)
    assert near.settings != slow
    assert near.settings == replace(slow, prefetch=near.settings.prefetch, lookahead=near.settings.lookahead)
    assert [switch.before for switch in watching.switches] == [watching.switches[0].before]
    assert watching.kept


def on_trial(engine: Engine) -> tuple[TierWatch, CacheSettings]:
    """A watch whose tier runs a rival, and the settings before."""
    near = near_of(engine)
    watching, before = TierWatch(near), near.settings
    watching.begin()
    for _ in range(100):
        if near.settings != before:
            break
        watching.token(0.01)
    assert near.settings != before
    return watching, before


def test_a_trial_ends_with_the_answer(engine: Engine) -> None:
    watching, before = on_trial(engine)
    watching.settle()
    assert near_of(engine).settings == before
    assert watching.switches == []
    watching.settle()
    assert near_of(engine).settings == before


def test_an_answer_that_begins_without_idle_time_goes_on_with_its_watch(engine: Engine) -> None:
    watching, _ = on_trial(engine)
    watch = watch_of(watching)
    watching.begin()
    assert watch_of(watching) is watch


@pytest.mark.parametrize("settled", [False, True])
def test_settings_that_were_changed_are_watched_anew(engine: Engine, settled: bool) -> None:
    watching, before = on_trial(engine)
    watch, near = watch_of(watching), near_of(engine)
    changed = replace(before, allocation="uniform", split=1.0)
    near.switch(changed, near.plan_for(changed))
    if settled:
        watching.settle()
        assert near.settings == changed, "a trial of the settings before does not return to them"
    watching.begin()
    assert watch_of(watching) is not watch
    for way in watching._watched.ways.values():  # type: ignore[union-attr]
        assert (way.allocation, way.split) == ("uniform", 1.0)


def test_settings_that_are_no_candidate_end_the_watch(engine: Engine) -> None:
    watching, before = on_trial(engine)
    near = near_of(engine)
    given = replace(before, prefetch="next-router", lookahead=3)
    near.switch(given, near.plan_for(given))
    watching.begin()
    assert watching._watched is None
    for _ in range(100):
        watching.token(0.01)
    watching.settle()
    assert near.settings == given
    assert not watching.kept


def test_switches_are_remembered_when_a_watch_begins_anew(engine: Engine) -> None:
    near = near_of(engine)
    watching = TierWatch(near)
    watching.begin()
    slow = near.settings
    for _ in range(100):
        watching.token(0.02 if near.settings == slow else 0.01)
    before = watching.switches
    assert before
    changed = replace(slow, allocation="uniform", split=1.0)
    near.switch(changed, near.plan_for(changed))
    watching.begin()
    assert watch_of(watching).switches == []
    assert watching.switches == before


def test_targets_stay_whichever_way_is_at_work(engine: Engine) -> None:
    targets = near_of(engine).targets.copy()
    on_trial(engine)
    assert (near_of(engine).targets == targets).all()


def test_settings_that_keep_other_experts_are_refused(engine: Engine) -> None:
    near = near_of(engine)
    with pytest.raises(ValueError, match="other targets"):
        near.load_by(replace(near.settings, split=0.5))
