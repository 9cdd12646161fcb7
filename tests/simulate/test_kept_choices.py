"""Kept choices of a strategy: the same plan without a simulation, and no harm from other files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import moechat
from moechat import kept_results
from moechat.budget import tier_targets
from moechat.configurator.costs import Costs
from moechat.configurator.systems import settings_of
from moechat.planning import Plan
from moechat.planning.expect import Expected, expect
from moechat.simulate import kept_choices
from moechat.simulate.strategy import Chosen, strategies

COSTS = Costs(attention=0.2e-3, moe=0.1e-3, head=1e-3, load=1e-3, compute_far=0.5e-3)


def made(**options: Any) -> Plan:
    """A plan of a small model on a card."""
    return moechat.plan("qwen1.5-moe-a2.7b", **({"profile": "rtx3060-12g", "vram": "8G"} | options))


def expected() -> Expected:
    return expect("qwen1.5-moe-a2.7b", profile="rtx3060-12g", vram="8G")


@pytest.fixture
def choices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MOECHAT_HOME", str(tmp_path))
    return tmp_path / "cache" / "choices"


def forbid_simulations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        tier_targets, "choose_by_statistics", lambda *_, **__: pytest.fail("a simulation was run")
    )


def test_the_same_plan_again_simulates_nothing(choices: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = made()
    assert first.strategy
    assert len(list(choices.iterdir())) > 5  # the choice, ends of ranges, other budgets
    forbid_simulations(monkeypatch)
    assert made() == first


def test_every_input_makes_another_choice(choices: Path) -> None:
    def kept(**options: Any) -> set[str]:
        before = set(choices.iterdir()) if choices.exists() else set()
        made(**options)
        return {path.name for path in set(choices.iterdir()) - before}

    assert kept()
    assert not kept()
    assert kept(vram="7G")
    assert kept(bits=8)
    assert kept(system="moepic") == set()  # leaves no choice
    assert kept(profile="rtx3080-10g")


def test_every_element_of_the_inputs_is_in_the_key(tmp_path: Path) -> None:
    settings = settings_of("auto")
    strategy = strategies(settings, far_computes=True)[0]
    inputs: list[object] = ["choice", 4, settings, COSTS, "digest", 8, "card"]
    others = [5, replace(settings, lookahead=3), replace(COSTS, load=2.0), "other", 9, "host"]
    made = []

    def choose() -> Chosen:
        made.append(1)
        return Chosen(strategy, {strategy.name: float(len(made))})

    with kept_choices.kept_choices(tmp_path, write=True):
        for _ in range(2):
            assert kept_choices.kept_choice(inputs, [strategy], choose).seconds_of_choice == 1
        for place, other in enumerate(others, start=1):
            changed = [*inputs[:place], other, *inputs[place + 1 :]]
            assert kept_choices.kept_choice(changed, [strategy], choose).seconds_of_choice == len(made)
    assert len(made) == 1 + len(others)


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content.update(strategy="nothing"),
        lambda content: content.update(strategy=[]),
        lambda content: content.pop("seconds"),
        lambda content: content.update(seconds=5),
        lambda content: content["seconds"].update(more=1.0),
        lambda content: content["seconds"].update(computed=-1.0),
        lambda content: content["seconds"].update(computed="fast"),
        lambda content: content["seconds"].update(computed=float("inf")),
        lambda content: content["seconds"].pop("computed"),
    ],
)
def test_a_damaged_file_counts_as_missing_and_is_replaced(choices: Path, change: Any) -> None:
    first = made()
    (path,) = [each for each in choices.iterdir() if len(json.loads(each.read_text())["seconds"]) > 5][:1]
    whole = path.read_bytes()
    content = json.loads(whole)
    change(content)
    for damaged in (json.dumps(content).encode(), whole[:-5], b"\xff", b"[" * 10_000):
        path.write_bytes(damaged)
        assert made() == first
        assert path.read_bytes() == whole


def test_speeds_of_a_search_read_choices_and_keep_none(
    choices: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = expected()
    assert not choices.exists()
    made()
    forbid_simulations(monkeypatch)
    assert expected() == before


def test_other_code_makes_other_choices(choices: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made()
    count = len(list(choices.iterdir()))
    monkeypatch.setattr(kept_results, "code_stamp", lambda code: [("changed.py", 1, 1)])
    made()
    assert len(list(choices.iterdir())) == 2 * count


def test_statistics_are_told_apart_by_every_count() -> None:
    from moechat.routing.statistics import RoutingStatistics

    plain = RoutingStatistics.zero("lru", 2, 4, 2)
    digests = {plain.digest(), replace(plain, policy="lfu").digest(), replace(plain, tokens=1).digest()}
    arrays = ("predicted", "activations", "ranks", "hits_of_prediction", "ranks_of_prediction")
    for name in arrays:
        changed = np.array(getattr(plain, name))
        changed.flat[-1] = 1
        digests.add(replace(plain, **{name: changed}).digest())
    assert len(digests) == 3 + len(arrays)


def test_only_the_newest_choices_are_kept(choices: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_choices, "_MOST_FILES", 2)
    made()
    assert len(list(choices.iterdir())) == 2
