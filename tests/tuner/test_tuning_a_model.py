"""Tests of the tuner on a real model: the demo with few pages, over a simulated link."""

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
from moechat.offload.settings import LinkSettings, OffloadOptions
from moechat.offload.tier import ExpertTier
from moechat.tuner import Sequences, racing

# The model has 512 blocks.
PAGES = 160
SLOW = LinkSettings(kind="sim", bandwidth=5e7)
FAST = LinkSettings(kind="sim")
# Rounds are few and short: they end long before this limit on any machine.
ENOUGH = 240.0
# Fetches sixteen experts a layer of which two are used: the slowest setting over a slow link.
WASTEFUL = CacheSettings(policy="lru", prefetch="whole-layer")
MESSAGES = [{"role": "user", "content": "Tell me a story about a fox."}]


@pytest.fixture(autouse=True)
def _short_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(racing, "MOST_ROUNDS", 3)
    monkeypatch.setattr(racing, "_FIRST_TOKENS", 4)


def load(cache: CacheSettings | None = WASTEFUL, link: LinkSettings = SLOW, **arguments: Any) -> Engine:
    return moechat.load("demo", offload=OffloadOptions(cache=cache, pages=PAGES, link=link), **arguments)


def answer(engine: Engine, count: int = 12) -> list[int]:
    return [step.token_id for step in engine.generate(MESSAGES, max_new_tokens=count, temperature=0.0)]


def test_a_faster_plan_wins_and_is_remembered(home: Path) -> None:
    with load() as engine:
        expected = answer(engine)
        tuning = engine.tune(limit_s=ENOUGH, may_map=False)
        assert (tuning.state, tuning.kept) == ("measured", True)
        assert tuning.winner not in ("computed", "uniform")
        by_name = {timing.name: timing for timing in tuning.timings}
        gap = by_name[tuning.winner].gap
        assert gap is not None
        assert gap.surely_below(-0.2, 2.0)
        assert tuning.decided
        assert tuning.same_as == {"uniform": "computed", "nothing-ahead": "plain"}
        assert answer(engine) == expected
        assert engine.stats.tuned == tuning.winner
        again = engine.tune(limit_s=1e-3, may_map=False, again=True)
        assert again.winner == tuning.winner, "what was timed before counts"
        measured = again.measured
        assert engine.loaded.near is not None
        assert engine.loaded.near.first_settings == WASTEFUL
        engine.tune(limit_s=0, may_map=False)
        report = tuning.to_json()
        assert [entry["name"] for entry in report["candidates"]] == list(by_name)
        assert all(entry["tokens"] >= 3 for entry in report["candidates"])
        assert engine.loaded.near is not None
        assert engine.loaded.near.runner.check() == ""
        assert engine.stats.pages_peak <= PAGES
    with load() as engine:
        again = engine.tune(limit_s=0, may_map=False)
        assert (again.state, again.winner, again.why) == ("remembered", tuning.winner, tuning.why)
        assert again.measured == measured
        assert engine.describe().prefetch == "prompts"
        assert answer(engine) == expected
    with load(link=LinkSettings(kind="sim", bandwidth=1e9)) as engine:
        assert engine.tune(limit_s=0, may_map=False).state == "skipped", "over another link nothing is known"


def test_the_mapped_store_wins_if_allowed_and_faster(home: Path) -> None:
    with load(tune=False) as engine:
        expected = answer(engine)
        tuning = engine.tune(limit_s=ENOUGH)
        assert (tuning.winner, tuning.decided) == ("mapped", True), tuning.to_json()
        assert engine.loaded.near is None
        assert engine.stats.pages == 0
        assert engine.describe().experts == "mapped: the page cache was faster than pages"
        assert answer(engine) == expected
        assert engine.tune(limit_s=1.0) is tuning, "there is no way back"
        assert (engine.idle(), engine.replan()) == (None, None)
    with load(tune=True) as engine:
        assert engine.tuning is not None
        assert (engine.tuning.state, engine.stats.tuned, engine.stats.pages) == ("remembered", "mapped", 0)
        assert answer(engine) == expected


def test_a_given_budget_excludes_the_mapped_store(home: Path) -> None:
    with load(ram="40G", link=FAST) as engine:
        tuning = engine.tune(limit_s=ENOUGH)
    assert "mapped" not in {timing.name for timing in tuning.timings}


def test_tuning_is_skipped_if_a_conversation_fills_the_memory(home: Path) -> None:
    with load(link=FAST, ctx=Sequences.MOST_TOKENS + 10) as engine:
        answer(engine)
        tuning = engine.tune(limit_s=ENOUGH, may_map=False)
        assert (tuning.state, tuning.timings) == ("skipped", ())
        assert "takes the memory of the attention cache" in tuning.why


def test_tuning_does_not_change_a_conversation(home: Path) -> None:
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


def test_tokens_of_the_tuner_are_not_counted_in_statistics(home: Path) -> None:
    with load(link=FAST) as engine:
        answer(engine, 10)
        engine.tune(limit_s=ENOUGH, may_map=False)
        assert engine.loaded.upkeep is not None
        pending = engine.loaded.upkeep.pending()
    assert pending is not None
    assert pending.tokens == 9


def test_an_interrupt_keeps_the_computed_plan(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
        assert engine.loaded.near is not None
        settings, targets = engine.loaded.near.settings, engine.loaded.near.targets.copy()
        with pytest.raises(KeyboardInterrupt):
            engine.tune(limit_s=ENOUGH, may_map=False)
        assert engine.tuning is not None
        assert (engine.tuning.state, engine.tuning.why) == ("skipped", "it was interrupted")
        assert engine.loaded.near.settings == settings
        assert (engine.loaded.near.targets == targets).all()
        assert engine.stats.tuned == ""
        assert len(answer(engine)) == 12
    assert not list(home.glob("state/tuning/*"))


def test_a_disk_failure_is_reported_and_keeps_the_computed_plan(home: Path) -> None:
    standing = LinkSettings(kind="sim", bandwidth=1.0, stall_seconds=0.3)
    with load(link=standing) as engine:
        with pytest.raises(MoechatError, match="cannot be read"):
            engine.tune(limit_s=ENOUGH, may_map=False)
        assert engine.describe().prefetch == "whole-layer"


def test_a_disk_failure_between_two_turns_is_reported(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stalled(self: ExpertTier) -> None:
        raise _native.LinkError("none has arrived for 30 seconds")

    with load(link=FAST) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(ExpertTier, "drain", stalled)
            with pytest.raises(MoechatError, match="cannot be read: none has arrived"):
                engine.tune(limit_s=ENOUGH, may_map=False)
        assert engine.describe().prefetch == "whole-layer"
        assert len(answer(engine)) == 12


def test_closing_the_engine_while_it_tunes_raises(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_too_little_time_decides_nothing_and_the_next_load_continues(home: Path) -> None:
    with load(link=FAST) as engine:
        first = engine.tune(limit_s=1e-3, may_map=False)
        assert (first.state, first.winner, engine.stats.tuned) == ("skipped", "computed", "")
        assert re.fullmatch(r"a token takes \S+ s, too long to time plans within 0.001 s", first.why)
    with load(link=FAST) as engine:
        assert engine.tune(limit_s=0, may_map=False).state == "skipped"
        assert engine.tune(limit_s=1.0, may_map=False).state == "measured"


def test_tuning_is_skipped_if_all_experts_fit(home: Path) -> None:
    with moechat.load("demo", tune=True) as engine:
        assert engine.tuning is not None
        assert (engine.tuning.state, engine.stats.tuned) == ("skipped", "")
        assert "all experts are in memory" in engine.tuning.why


def test_an_unwritable_home_only_prevents_saving(home: Path) -> None:
    (home / "state").mkdir(parents=True)
    for name in ("tuning", "routing"):
        (home / "state" / name).write_text("in the way")
    with load(link=FAST) as engine:
        tuning = engine.tune(limit_s=ENOUGH, may_map=False)
        assert (tuning.state, tuning.kept) == ("measured", False)
        answer(engine)
        engine.loaded.upkeep.save()  # type: ignore[union-attr]
        assert any("routing statistics" in notice for notice in engine.notices())


def test_a_damaged_saved_choice_is_ignored(home: Path) -> None:
    with load(link=FAST) as engine:
        assert engine.tune(limit_s=ENOUGH, may_map=False).kept
    (path,) = home.glob("state/tuning/*.json")
    path.write_text("{")
    with load(link=FAST) as engine:
        assert engine.tune(limit_s=0, may_map=False).state == "skipped"
        assert engine.tune(limit_s=ENOUGH, may_map=False).kept


def test_text_restarts_before_the_context_is_full() -> None:
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


def test_every_plan_decodes_the_same_text(home: Path) -> None:
    def text(cache: CacheSettings | None) -> list[int]:
        with load(cache, link=FAST) as engine:
            sequences = engine._plans._sequences()
            seen = []
            for _ in range(40):
                sequences.decode()
                seen.append(sequences._next)
            return seen

    assert text(WASTEFUL) == text(None)


def test_times_of_several_loads_add_up_until_the_choice_is_sure(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(racing, "MOST_ROUNDS", 1)
    monkeypatch.setattr(racing, "WITHIN", -9.0)  # nothing is ever sure
    with load(link=FAST) as engine:
        first = engine.tune(limit_s=ENOUGH, may_map=False)
        assert (first.kept, first.decided) == (True, False)
        assert "are still open" in first.why
    with load(link=FAST) as engine:
        assert engine.tune(limit_s=0, may_map=False).state == "skipped", "nothing is decided yet"
        second = engine.tune(limit_s=ENOUGH, may_map=False)
        assert second.state == "measured"
        before = {entry.name: entry.tokens for entry in first.timings}
        assert all(entry.tokens >= before[entry.name] for entry in second.timings)
        assert sum(entry.tokens for entry in second.timings) > sum(before.values())
