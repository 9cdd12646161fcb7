"""The choice of a strategy by simulation, and the routing it is simulated over."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from moechat.configurator.costs import Costs
from moechat.configurator.systems import SYSTEMS, CacheSettings, parse_settings
from moechat.configurator.warm_start import default_statistics
from moechat.routing.counter import statistics_of_trace
from moechat.simulate import shared_draws
from moechat.simulate.choice import choose_by_statistics, lengths
from moechat.simulate.drawn_routing import draw_routing
from moechat.simulate.run import Tier
from moechat.simulate.strategy import PARTS, fastest, strategies

LAYERS, EXPERTS, TOP_K, BLOCKS = 6, 16, 2, 8
AUTO = SYSTEMS["auto"]
STATISTICS = default_statistics("mixtral", LAYERS, EXPERTS, TOP_K, policy=AUTO.policy)
# An expert takes 1 ms over the link.
COSTS = Costs(attention=0.2e-3, moe=0.1e-3, head=1e-3, load=1e-3, compute_far=0.5e-3)


def tier_for(settings: CacheSettings) -> Tier:
    """A quarter of the experts, the same number in each layer."""
    pages = LAYERS * EXPERTS * BLOCKS // 4
    reserve = 4 * BLOCKS
    kept = (pages - reserve) // (LAYERS * BLOCKS)
    targets = np.tile(np.array([kept, BLOCKS], np.int32), (LAYERS, 1))
    return Tier(EXPERTS, TOP_K, BLOCKS, 1 << 20, pages, targets, reserve)


def chosen(costs: Costs, settings: CacheSettings = AUTO):
    return choose_by_statistics(settings, tier_for, costs, STATISTICS, threads=4, launch="card")


def test_the_cpu_computes_everything_where_the_link_is_hopeless() -> None:
    found = chosen(replace(COSTS, load=1.0))
    assert found.strategy.settings.miss != "fetch"
    assert found.seconds["link"] > 10 * found.seconds_of_choice


def test_the_link_brings_everything_where_the_cpu_is_hopeless() -> None:
    found = chosen(replace(COSTS, compute_far=1.0))
    assert found.strategy.name != "cpu-nothing-ahead"
    assert found.seconds["cpu-nothing-ahead"] > 10 * found.seconds_of_choice


@pytest.mark.parametrize("load", [0.1e-3, 1e-3, 10e-3])
@pytest.mark.parametrize("far", [0.1e-3, 1e-3, 10e-3])
def test_the_choice_is_the_fastest_candidate_within_a_percent(load: float, far: float) -> None:
    found = chosen(replace(COSTS, load=load, compute_far=far))
    best = fastest(strategies(AUTO, far_computes=True), found.seconds)
    assert found.seconds_of_choice == pytest.approx(found.seconds[best.name], rel=1e-9)  # some are equal
    assert found.seconds_of_choice <= 1.01 * min(found.seconds.values())
    assert found.strategy.settings.choose is False


def test_the_same_input_gives_the_same_choice() -> None:
    assert chosen(COSTS) == chosen(COSTS)


def test_draws_are_shared_by_the_simulations_of_a_plan_and_change_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slow = replace(COSTS, load=10e-3)
    alone = chosen(COSTS), chosen(slow)
    count = {"draw_routing": 0, "draw_rankings": 0}

    def counting(name: str, draw: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **more: Any) -> Any:
            count[name] += 1
            return draw(*arguments, **more)

        return counted

    for name in count:
        monkeypatch.setattr(shared_draws, name, counting(name, getattr(shared_draws, name)))
    with shared_draws.shared_draws():
        assert (chosen(COSTS), chosen(slow)) == alone
        # One for the choice, and one for the time of what is chosen.
        assert count == {"draw_routing": 2, "draw_rankings": 2}
        # Statistics are told apart by identity, also equal ones.
        choose_by_statistics(AUTO, tier_for, COSTS, replace(STATISTICS), threads=4, launch="card")
        assert count == {"draw_routing": 4, "draw_rankings": 4}
    chosen(COSTS)
    assert count == {"draw_routing": 6, "draw_rankings": 6}


@pytest.mark.parametrize("far_computes", [False, True])
def test_candidates_can_take_turns_on_one_runner(far_computes: bool) -> None:
    found = strategies(AUTO, far_computes=far_computes)
    assert found[0].settings == replace(AUTO, choose=False)
    assert len({each.name for each in found}) == len(found)
    assert {each.settings.policy for each in found} == {AUTO.policy}
    assert {each.settings.admit for each in found} == {AUTO.admit}
    assert {each.settings.whole_experts for each in found} == {AUTO.whole_experts}


def test_without_a_far_tier_that_computes_nothing_is_computed_there() -> None:
    assert {each.settings.miss for each in strategies(AUTO, far_computes=False)} == {AUTO.miss}


@pytest.mark.parametrize("blocks", [BLOCKS, BLOCKS // 2])
def test_the_papers_plan_is_a_candidate_where_it_divides_experts(blocks: int) -> None:
    def tier(settings: CacheSettings) -> Tier:
        made = tier_for(settings)
        if settings.allocation != "moepic":
            return made
        kept = made.targets[0, 0] * BLOCKS // blocks
        targets = np.tile(np.array([kept, blocks], np.int32), (LAYERS, 1))
        return replace(made, targets=targets)

    costs = replace(COSTS, compute_far=math.inf)
    found = choose_by_statistics(AUTO, tier, costs, STATISTICS, threads=4, launch="card")
    assert (PARTS in found.seconds) == (blocks < BLOCKS)


def test_settings_that_are_given_are_not_changed() -> None:
    assert parse_settings("auto").choose
    assert not parse_settings("auto:prefetch=none").choose
    assert not parse_settings("moepic").choose


@pytest.mark.parametrize(
    ("family", "experts", "top_k"), [("mixtral", 8, 2), ("gpt_oss", 32, 4), ("qwen3_moe", 128, 8)]
)
def test_drawn_routing_hits_about_as_often_as_the_statistics(family: str, experts: int, top_k: int) -> None:
    wanted = default_statistics(family, 4, experts, top_k, policy="forecast")
    drawn = draw_routing(wanted, 600)
    seen = statistics_of_trace(drawn, CacheSettings(policy="forecast"))
    for share in (0.25, 0.5):
        at = int(share * experts)
        assert seen.hit_rate[:, at].mean() == pytest.approx(wanted.hit_rate[:, at].mean(), abs=0.12)


def test_a_choice_is_made_on_at_least_a_hundred_tokens() -> None:
    assert lengths(32, 2, 224)[1] >= 100
    assert lengths(1, 1, 1)[1] <= 600
