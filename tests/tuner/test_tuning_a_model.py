"""The tuner on a real model: the demo within few pages, over a link of a programmed speed."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any

import pytest

import moechat
from moechat import _native
from moechat.configurator.systems import CacheSettings
from moechat.engine import Engine
from moechat.errors import MoechatError
from moechat.offload.cached import NearTier
from moechat.offload.settings import LinkSettings, OffloadOptions
from moechat.tuner import Sequences, timing

# 512 blocks in all.
PAGES = 160
SLOW = LinkSettings(kind="sim", bandwidth=5e7)
FAST = LinkSettings(kind="sim")
# Rounds are few and short, so that they end long before this on any machine.
ENOUGH = 240.0
# Brings sixteen experts a layer of which two are used: nothing is slower over a slow link.
WASTEFUL = CacheSettings(policy="lru", prefetch="whole-layer")
MESSAGES = [{"role": "user", "content": "Tell me a story about a fox."}]


@pytest.fixture(autouse=True)
def _short_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "MOST_ROUNDS", 3)
    monkeypatch.setattr(timing, "_MOST_TOKENS", 6)
    monkeypatch.setattr(timing, "_FIRST_TOKENS", 4)
    monkeypatch.setattr(timing, "_PREFILL_ROUNDS", 1)


def load(cache: CacheSettings | None = WASTEFUL, link: LinkSettings = SLOW, **arguments: Any) -> Engine:
    return moechat.load("demo", offload=OffloadOptions(cache=cache, pages=PAGES, link=link), **arguments)


def answer(engine: Engine, count: int = 12) -> list[int]:
    return [step.token_id for step in engine.generate(MESSAGES, max_new_tokens=count, temperature=0.0)]


def test_a_plan_that_is_truly_faster_wins_and_is_remembered(home: Path) -> None:
    with load() as engine:
        expected = answer(engine)
        tuning = engine.tune(limit_s=ENOUGH, may_map=False)
        assert (tuning.state, tuning.kept) == ("measured", True)
        assert tuning.winner not in ("computed", "uniform")
        by_name = {timing.name: timing for timing in tuning.timings}
        assert by_name[tuning.winner].token_seconds < 0.8 * by_name["computed"].token_seconds
        assert tuning.same_as == {"uniform": "computed"}
        assert answer(engine) == expected
        assert engine.stats.tuned == tuning.winner
        again = engine.tune(limit_s=1e-3, may_map=False, again=True)
        assert (again.winner, again.kept) == ("computed", False), "too little time to replace what is known"
        assert engine._near is not None
        assert engine._near.first_settings == WASTEFUL
        engine.tune(limit_s=0, may_map=False)
        told = tuning.to_json()
        assert [entry["name"] for entry in told["candidates"]] == list(by_name)
        assert all(entry["rounds"] >= 3 and entry["spread_ms"] >= 0 for entry in told["candidates"])
        assert engine._near is not None
        assert engine._near.runner.check() == ""
        assert engine.stats.pages_peak <= PAGES
    with load() as engine:
        again = engine.tune(limit_s=0, may_map=False)
        assert (again.state, again.winner, again.why) == ("remembered", tuning.winner, tuning.why)
        assert again.measured == tuning.measured
        assert engine.describe()["prefetch"] == "none"
        assert answer(engine) == expected
    with load(link=LinkSettings(kind="sim", bandwidth=1e9)) as engine:
        assert engine.tune(limit_s=0, may_map=False).state == "skipped", "over another link nothing is known"


def test_the_mapped_store_wins_where_it_may_and_is_faster(home: Path) -> None:
    with load(tune=False) as engine:
        expected = answer(engine)
        tuning = engine.tune(limit_s=ENOUGH)
        assert tuning.winner == "mapped"
        assert engine._near is None
        assert engine.stats.pages == 0
        assert engine.describe()["experts"] == "mapped: the page cache was faster than pages"
        assert answer(engine) == expected
        assert engine.tune(limit_s=1.0) is tuning, "there is no way back"
        assert (engine.idle(), engine.replan()) == (None, None)
    with load(tune=True) as engine:
        assert engine.tuning is not None
        assert (engine.tuning.state, engine.stats.tuned, engine.stats.pages) == ("remembered", "mapped", 0)
        assert answer(engine) == expected


def test_within_a_given_budget_nothing_is_mapped(home: Path) -> None:
    with load(ram="40G", link=FAST) as engine:
        tuning = engine.tune(limit_s=ENOUGH)
    assert "mapped" not in {timing.name for timing in tuning.timings} | set(tuning.left_out)


def test_a_long_conversation_leaves_no_memory_for_another_text(home: Path) -> None:
    with load(link=FAST, ctx=Sequences.MOST_TOKENS + 10) as engine:
        answer(engine)
        tuning = engine.tune(limit_s=ENOUGH, may_map=False)
        assert (tuning.state, tuning.timings) == ("skipped", ())
        assert "takes the memory of the attention cache" in tuning.why


def test_a_conversation_goes_on_as_if_nothing_had_been_timed(home: Path) -> None:
    def talk(tuned: bool) -> tuple[list[int], int]:
        with load(link=FAST) as engine:
            reply = "".join(step.text for step in engine.generate(MESSAGES, max_new_tokens=20, seed=1))
            if tuned:
                assert engine.tune(limit_s=ENOUGH, may_map=False).state == "measured"
                assert engine.stats.output_tokens == 20
            turns = [
                *MESSAGES,
                {"role": "assistant", "content": reply},
                {"role": "user", "content": "And then?"},
            ]
            tokens = [step.token_id for step in engine.generate(turns, max_new_tokens=20, seed=2)]
            stats = engine.stats
            hits = stats.hits_full + stats.hits_prefetched + stats.hits_top + stats.misses
            assert hits <= 20 * 8 * 2, "of this answer alone"
            return tokens, stats.reused_tokens

    plain = talk(tuned=False)
    assert plain[1] > 20
    assert talk(tuned=True) == plain


def test_what_the_tuner_writes_is_no_text_of_the_users(home: Path) -> None:
    with load(link=FAST) as engine:
        answer(engine, 10)
        engine.tune(limit_s=ENOUGH, may_map=False)
        assert engine._upkeep is not None
        pending = engine._upkeep.pending()
    assert pending is not None
    assert pending.tokens == 9


def test_an_interrupt_leaves_the_computed_plan(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count = 0
    decode = Sequences.decode

    def interrupted(self: Sequences) -> float:
        nonlocal count
        count += 1
        if count > 20:
            raise KeyboardInterrupt
        return decode(self)

    monkeypatch.setattr(Sequences, "decode", interrupted)
    with load(link=FAST) as engine:
        assert engine._near is not None
        settings, targets = engine._near.settings, engine._near.targets.copy()
        with pytest.raises(KeyboardInterrupt):
            engine.tune(limit_s=ENOUGH, may_map=False)
        assert engine.tuning is not None
        assert (engine.tuning.state, engine.tuning.why) == ("skipped", "it was interrupted")
        assert engine._near.settings == settings
        assert (engine._near.targets == targets).all()
        assert engine.stats.tuned == ""
        assert len(answer(engine)) == 12
    assert not list(home.glob("state/tuning/*"))


def test_a_disk_that_fails_is_told_and_the_computed_plan_stays(home: Path) -> None:
    standing = LinkSettings(kind="sim", bandwidth=1.0, stall_seconds=0.3)
    with load(link=standing) as engine:
        with pytest.raises(MoechatError, match="cannot be read"):
            engine.tune(limit_s=ENOUGH, may_map=False)
        assert engine.describe()["prefetch"] == "whole-layer"


def test_a_disk_that_fails_between_two_turns_is_told_too(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stalled(self: NearTier) -> None:
        raise _native.LinkError("none has arrived for 30 seconds")

    with load(link=FAST) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(NearTier, "drain", stalled)
            with pytest.raises(MoechatError, match="cannot be read: none has arrived"):
                engine.tune(limit_s=ENOUGH, may_map=False)
        assert engine.describe()["prefetch"] == "whole-layer"
        assert len(answer(engine)) == 12


def test_an_engine_that_is_closed_meanwhile_says_so(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decode, count = Sequences.decode, 0

    def closing(self: Sequences) -> float:
        nonlocal count
        count += 1
        if count == 10:
            thread = threading.Thread(target=engine.close)
            thread.start()
            thread.join()
        return decode(self)

    monkeypatch.setattr(Sequences, "decode", closing)
    engine = load(link=FAST)
    with pytest.raises(MoechatError, match="was closed"):
        engine.tune(limit_s=ENOUGH, may_map=False)
    assert count == 10


def test_too_little_time_decides_nothing_and_the_next_start_goes_on(home: Path) -> None:
    with load(link=FAST) as engine:
        first = engine.tune(limit_s=1e-3, may_map=False)
        assert (first.state, first.winner, engine.stats.tuned) == ("skipped", "computed", "")
        assert re.fullmatch(r"a token takes \S+ s, too long to time plans within 0.001 s", first.why)
    with load(link=FAST) as engine:
        assert engine.tune(limit_s=0, may_map=False).state == "skipped"
        assert engine.tune(limit_s=1.0, may_map=False).state == "measured"


def test_all_in_memory_leaves_nothing_to_choose(home: Path) -> None:
    with moechat.load("demo", tune=True) as engine:
        assert engine.tuning is not None
        assert (engine.tuning.state, engine.stats.tuned) == ("skipped", "")
        assert "all experts are in memory" in engine.tuning.why


def test_a_home_that_cannot_be_written_costs_only_the_memory(home: Path) -> None:
    (home / "state").mkdir(parents=True)
    for name in ("tuning", "routing"):
        (home / "state" / name).write_text("in the way")
    with load(link=FAST) as engine:
        tuning = engine.tune(limit_s=ENOUGH, may_map=False)
        assert (tuning.state, tuning.kept) == ("measured", False)
        answer(engine)
        engine._upkeep.save()  # type: ignore[union-attr]
        assert any("routing statistics" in notice for notice in engine.notices())


def test_damaged_memory_is_no_memory(home: Path) -> None:
    with load(link=FAST) as engine:
        assert engine.tune(limit_s=ENOUGH, may_map=False).kept
    (path,) = home.glob("state/tuning/*.json")
    path.write_text("{")
    with load(link=FAST) as engine:
        assert engine.tune(limit_s=0, may_map=False).state == "skipped"
        assert engine.tune(limit_s=ENOUGH, may_map=False).kept


def test_text_begins_again_before_the_context_is_full() -> None:
    lengths: list[int] = []

    def forward(ids: Any, cache: int) -> tuple[Any, int]:
        import torch

        lengths.append(cache + ids.shape[1])
        return torch.zeros(50), cache + ids.shape[1]

    sequences = Sequences(forward, lambda: 0, None, vocabulary=50, most_tokens=20)
    assert sequences.prompt_tokens == 10
    for _ in range(100):
        sequences.decode()
    assert max(lengths) == 20
    assert lengths.count(1) == 5
    sequences.prefill()
    assert lengths[-1] == 10


def test_the_same_text_is_written_whatever_the_plan(home: Path) -> None:
    def text(cache: CacheSettings | None) -> list[int]:
        with load(cache, link=FAST) as engine:
            sequences = engine._sequences(engine._usable_model())
            seen = []
            for _ in range(40):
                sequences.decode()
                seen.append(sequences._next)
            return seen

    assert text(WASTEFUL) == text(None)


def test_rounds_of_several_starts_add_up(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "MOST_ROUNDS", 2)
    with load(link=FAST) as engine:
        first = engine.tune(limit_s=ENOUGH, may_map=False)
        assert (first.winner, first.kept) == ("computed", True)
        assert first.why.startswith("2 of at least 3 rounds")
    with load(link=FAST) as engine:
        assert engine.tune(limit_s=0, may_map=False).state == "skipped", "nothing is decided yet"
        second = engine.tune(limit_s=ENOUGH, may_map=False)
        assert [entry.rounds for entry in second.timings] == [4] * len(first.timings)
        assert [entry.decode[:2] for entry in second.timings] == [entry.decode for entry in first.timings]
    with load(link=FAST) as engine:
        assert engine.tune(limit_s=0, may_map=False).state == "remembered"
