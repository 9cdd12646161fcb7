"""Tests of replanning between answers: tokens, budget, statistics files, every preset."""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

import moechat
from moechat.budget import knowledge, tier_targets
from moechat.cli.commands.run_arguments import RunOptions
from moechat.configurator.systems import SYSTEMS, CacheSettings
from moechat.engine import Engine
from moechat.errors import MoechatError, UsageError
from moechat.offload import upkeep
from moechat.offload.perfect import PerfectPredictor
from moechat.offload.settings import LinkSettings, OffloadOptions
from moechat.offload.tier import ExpertTier
from moechat.routing import Replay, Trace
from moechat.routing.statistics_file import load_statistics

PAGES = 160
POLICY = SYSTEMS["auto"].policy
PROMPT = "Once upon a time"


@pytest.fixture
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MOECHAT_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


# As fast as memory: these tests do not depend on a disk.
MEMORY = LinkSettings(kind="sim")


def load(pages: int = PAGES, **arguments: Any) -> Engine:
    return moechat.load("demo", offload=OffloadOptions(pages=pages, link=MEMORY), **arguments)


def answer(engine: Engine, count: int = 20) -> list[int]:
    return [step.token_id for step in engine.generate(PROMPT, max_new_tokens=count, temperature=0.0)]


def near_of(engine: Engine) -> ExpertTier:
    assert engine.loaded.near is not None
    return engine.loaded.near


def test_replanning_at_every_token_changes_no_token_and_keeps_the_budget(own_home: Path) -> None:
    with load() as engine:
        expected = answer(engine)
    process = psutil.Process(os.getpid())
    with load() as engine:
        near = near_of(engine)
        tokens, resident = [], []
        for step in engine.generate(PROMPT, max_new_tokens=20, temperature=0.0):
            tokens.append(step.token_id)
            replanned = engine.replan()
            assert replanned is not None
            assert near.runner.check() == ""
            assert int((near.targets[:, 0] * near.targets[:, 1]).sum()) <= PAGES - near.reserve
            resident.append(process.memory_info().rss)
        assert tokens == expected
        assert 0 < engine.stats.pages_peak <= PAGES
        assert near.runner.resident_bytes <= PAGES * near.runner.page_bytes
        assert max(resident[5:]) - resident[5] < 16 << 20
        assert engine.stats.replans == 20


def test_replanning_runs_after_a_number_of_tokens_and_only_between_answers(
    own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upkeep, "_OBSERVED_TOKENS", 30)
    # With a fixed strategy: a chosen one depends on observed times, and need not divide the pages by "auto".
    with load(replan_tokens=25, system="auto:miss=both") as engine:
        before = near_of(engine).targets.copy()
        answer(engine)
        assert engine.idle() is None, "19 tokens were decoded, the first comes from the prompt"
        answer(engine)
        assert (near_of(engine).targets == before).all(), "not during an answer"
        assert engine.stats.replans == 0
        replanned = engine.idle()
        assert replanned is not None
        assert (replanned.tokens, replanned.method) == (38, "auto")
        assert replanned.statistics_from == "defaults and 38 tokens of this model"
        assert replanned.costs_from == "38 decoded tokens"
        assert replanned.layers_changed == int((near_of(engine).targets != before).any(axis=1).sum())
        assert replanned.before_ms is not None
        assert replanned.after_ms is not None
        assert replanned.after_ms <= replanned.before_ms + 1e-9, (
            "replanning with the current statistics cannot be worse"
        )
        stats = engine.stats.to_json()
        assert (stats["replans"], stats["replan"]) == (1, replanned.to_json())
        assert engine.idle() is None, "the count begins again"


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_gets_an_error_and_writes_nothing(own_home: Path) -> None:
    with load(replan_tokens=5) as engine:
        answer(engine, 10)
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(30)
            errors = 0
            for use in (engine.idle, engine.replan):
                try:
                    use()
                except MoechatError as error:
                    errors += "forked child" in str(error)
                except BaseException:
                    break
            engine.close()
            os._exit(2 - errors)
        _, status = os.waitpid(child, 0)
        assert status == 0
        assert not list(own_home.glob("state/routing/*"))
        assert engine.replan() is not None


def test_closing_an_engine_while_it_plans_raises(own_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan_for = ExpertTier.plan_for

    def closing(self: ExpertTier, *arguments: Any) -> Any:
        plan = plan_for(self, *arguments)
        thread = threading.Thread(target=engine.close)
        thread.start()
        thread.join()
        return plan

    for name in ("idle", "replan"):
        engine = load(replan_tokens=5)
        answer(engine, 10)
        with monkeypatch.context() as patch:
            patch.setattr(ExpertTier, "plan_for", closing)
            with pytest.raises(MoechatError, match="was closed"):
                getattr(engine, name)()
        assert getattr(engine, name)() is None


def test_replanning_is_off_at_interval_0_or_with_mapped_experts(own_home: Path) -> None:
    with load(replan_tokens=0) as engine:
        answer(engine, 3)
        assert engine.idle() is None
    with moechat.load("demo") as engine:
        answer(engine, 3)
        assert (engine.idle(), engine.replan(), engine.notices()) == (None, None, [])
        assert (engine.stats.plan, engine.stats.replans) == ("", 0)
    with pytest.raises(UsageError, match="replan_tokens is -1"):
        load(replan_tokens=-1)


def test_statistics_are_saved_at_close_and_used_at_the_next_load(own_home: Path) -> None:
    with load() as engine:
        near = near_of(engine)
        assert near.knowledge is not None
        assert near.knowledge.statistics_from == "defaults"
        answer(engine)
        store, shape = engine.loaded.store, engine.loaded.upkeep._shape  # type: ignore[union-attr]
    kept = load_statistics(knowledge.key_of(shape, store.manifest.source.fingerprint), POLICY)
    assert kept is not None
    assert kept.tokens == 19
    assert kept.activations.sum() == 19 * 8 * 2
    with load() as engine:
        assert near_of(engine).knowledge.statistics_from == "defaults and 19 tokens of this model"  # type: ignore[union-attr]
        assert engine.describe().plan_statistics == "defaults and 19 tokens of this model"
        answer(engine)
        # Saved and unsaved statistics and the defaults are combined into one plan.
        assert engine.replan().statistics_from == "defaults and 38 tokens of this model"  # type: ignore[union-attr]


def test_statistics_are_written_after_some_answers_not_each(
    own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[int] = []
    monkeypatch.setattr(
        upkeep, "add_statistics", lambda key, counted, **_: not written.append(counted.tokens)
    )
    with load() as engine:
        answer(engine, 5)
        assert engine.idle() is None
        assert written == []
        monkeypatch.setattr(upkeep, "_SAVE_AFTER_ANSWER_S", 0.0)
        answer(engine, 5)
        assert written == [8]
        answer(engine, 3)
        assert written == [8, 2]
        monkeypatch.setattr(upkeep, "_SAVE_AFTER_ANSWER_S", 1e9)
        monkeypatch.setattr(upkeep, "_SAVE_IDLE_S", 0.0)
        answer(engine, 5)
        assert written == [8, 2]
        engine.idle()
        assert written == [8, 2, 4]
    assert written == [8, 2, 4]


def test_damaged_files_and_an_unusable_home_only_add_notices(own_home: Path) -> None:
    with load() as engine:
        expected = answer(engine, 10)
    (path,) = own_home.glob("state/routing/*.npz")
    path.write_bytes(path.read_bytes()[:-200])
    with load() as engine:
        assert near_of(engine).plan.method == "auto"
        assert near_of(engine).knowledge.statistics_from == "defaults"  # type: ignore[union-attr]
        assert any("damaged" in notice for notice in engine.notices())
        assert engine.notices() == []
        assert answer(engine, 10) == expected
    for file in own_home.glob("state/routing/*"):
        file.unlink()
    own_home.joinpath("state/routing").rmdir()
    own_home.joinpath("state/routing").write_text("in the way")
    with load() as engine:
        assert answer(engine, 10) == expected
        assert engine.replan() is not None
        engine.loaded.upkeep.save()  # type: ignore[union-attr]
        assert any("routing" in notice for notice in engine.notices())


def test_any_planning_failure_falls_back_to_a_plan(own_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError("as wanted")

    with load() as engine:
        expected = answer(engine, 10)
    for name in ("allocate", "load_measured", "load_statistics", "default_statistics", "blended_statistics"):
        with monkeypatch.context() as patch:
            patch.setattr(tier_targets if name == "allocate" else knowledge, name, fail)
            with load() as engine:
                assert answer(engine, 10) == expected
                assert engine.replan() is not None
                assert any("as wanted" in notice for notice in engine.notices()), name
                assert near_of(engine).runner.check() == ""


def test_a_plan_for_too_many_pages_is_rejected(own_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = tier_targets.allocate

    def greedy(*arguments: Any, pages: int, **named: Any) -> Any:
        return real(*arguments, pages=3 * pages, **named)

    monkeypatch.setattr(tier_targets, "allocate", greedy)
    with load(pages=100) as engine:
        assert near_of(engine).plan.method == "uniform"
        assert any("pages are planned" in notice for notice in engine.notices())
        assert len(answer(engine, 5)) == 5


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_preset_runs_or_is_rejected(system: str, own_home: Path) -> None:
    if system == "oracle":
        for pages in (0, PAGES):
            with pytest.raises(UsageError, match="need a replayed trace") as caught:
                load(pages=pages, system=system)
            assert "simulate" in str(caught.value.hint)
        with pytest.raises(UsageError, match="needs the routing of later tokens"):
            RunOptions(model="demo", system=system)
        return
    RunOptions(model="demo", system=system)
    with load(system=system) as engine:
        plan = near_of(engine).plan
        assert plan.method == SYSTEMS[system].allocation
        assert plan.notes == ()
        assert answer(engine, 6)
        assert engine.replan() is not None
        assert near_of(engine).runner.check() == ""
        assert engine.stats.plan == plan.method


def test_the_oracle_runs_on_a_replayed_trace(own_home: Path) -> None:
    generator = np.random.default_rng(1)
    experts = np.argsort(generator.random((300, 8, 16)), axis=-1)[..., :2].astype(np.int32)
    replay = Replay(Trace(experts=experts, num_experts=16, offsets=np.array([0, 300])))
    offload = OffloadOptions(pages=PAGES, link=MEMORY, replay=replay)
    with moechat.load("demo", system="oracle", offload=offload) as engine:
        assert isinstance(near_of(engine).predictor, PerfectPredictor)
        answer(engine, 30)
        stats = engine.stats
        assert stats.hits_prefetched > 0
        assert stats.misses + stats.hits_top < 0.1 * (stats.hits_full + stats.hits_prefetched)


def test_a_fixed_set_holds_the_popular_experts(own_home: Path) -> None:
    with load() as engine:
        answer(engine, 50)
    with load(system="fiddler") as engine:
        answer(engine, 40)
        near = near_of(engine)
        statistics = near.knowledge.statistics  # type: ignore[union-attr]
        assert statistics is not None
        near.drain()
        resident = near.runner.residency()
        for layer, (count, blocks) in enumerate(near.targets.tolist()):
            popular = np.argsort(-statistics.activations[layer], kind="stable")[:count]
            needed = popular[near.routing_statistics().activations[layer][popular] > 0]
            assert len(needed)
            assert (resident[layer][needed] >= blocks).all(), "once they are there they stay"


def test_switching_takes_effect_at_once_and_rejects_settings_that_need_another_runner(own_home: Path) -> None:
    with load() as engine:
        near = near_of(engine)
        expected = answer(engine, 10)
        quiet = CacheSettings(policy=POLICY, admit="best", prefetch="none", split=0.5)
        near.switch(quiet, near.plan_for(quiet))
        assert set(near.targets[:, 1].tolist()) == {2}
        near.drain()
        near.reset_stats()
        assert answer(engine, 10) == expected
        assert near.stats()["fetched_prefetch"] == 0
        far = CacheSettings(policy=POLICY, admit="best", lookahead=2)
        near.switch(far, near.plan_for(far))
        near.reset_stats()
        assert answer(engine, 10) == expected
        assert near.stats()["link_transfers_later"] > 0
        for other in (
            replace(far, policy="lru"),
            replace(far, whole_experts=True),
            replace(far, admit="key"),
        ):
            with pytest.raises(ValueError, match="another tier"):
                near.switch(other, near.plan)
        assert near.runner.check() == ""
