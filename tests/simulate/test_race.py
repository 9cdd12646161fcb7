"""Races of candidates: paused simulations, those that are dropped, and starts from another's cache."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from moechat import _native
from moechat.configurator.costs import Costs
from moechat.configurator.systems import SYSTEMS, CacheSettings
from moechat.configurator.warm_start import default_statistics
from moechat.errors import UsageError
from moechat.simulate.choice import choose_by_statistics
from moechat.simulate.drawn_routing import draw_routing
from moechat.simulate.predictions import draw_rankings
from moechat.simulate.race import Entrant, race
from moechat.simulate.run import SimulatedRun, Simulation, Tier, simulate
from moechat.simulate.strategy import Chosen, Strategy, fastest, strategies
from moechat.simulate.timing import Timing, timing_of

LAYERS, EXPERTS, TOP_K, BLOCKS = 5, 16, 2, 8
AUTO = replace(SYSTEMS["auto"], choose=False)
STATISTICS = default_statistics("mixtral", LAYERS, EXPERTS, TOP_K, policy=AUTO.policy)
COSTS = Costs(attention=0.2e-3, moe=0.1e-3, head=1e-3, load=1e-3, compute_far=0.5e-3)
TRACE = draw_routing(STATISTICS, 150)
RANKINGS = draw_rankings(TRACE, np.full(LAYERS, 0.7), width=TOP_K, lookahead=2)
PAGES = LAYERS * EXPERTS * BLOCKS // 3
WARMUP = 40


def tier(blocks: int = BLOCKS, pages: int = PAGES) -> Tier:
    """The same number of experts in each layer, with so many blocks each."""
    reserve = 4 * BLOCKS
    kept = (pages - reserve) // (LAYERS * blocks)
    targets = np.tile(np.array([kept, blocks], np.int32), (LAYERS, 1))
    return Tier(EXPERTS, TOP_K, BLOCKS, 1 << 20, pages, targets, reserve)


def timing(costs: Costs = COSTS) -> Timing:
    return timing_of(costs, top_k=TOP_K, blocks=BLOCKS, block_bytes=1 << 20, far_threads=4, launch="card")


def simulation(settings: CacheSettings = AUTO, costs: Costs = COSTS, **more: object) -> Simulation:
    arguments = {"rankings": RANKINGS, "warmup": WARMUP, "hurried": WARMUP, **more}
    return Simulation(TRACE, settings, tier(), timing(costs), **arguments)  # type: ignore[arg-type]


def assert_equal(one: SimulatedRun, other: SimulatedRun) -> None:
    for name in ("seconds", "stall", "demand_bytes", "prefetch_bytes"):
        assert getattr(one, name).tobytes() == getattr(other, name).tobytes(), name
    assert one.counters == other.counters


def entrants(costs: Costs = COSTS) -> list[Entrant]:
    found = strategies(SYSTEMS["auto"], far_computes=True)
    return [Entrant(each.name, each.settings, simulation(each.settings, costs)) for each in found]


def best(means: Mapping[str, float]) -> str:
    return min(means, key=lambda name: means[name])


@pytest.mark.parametrize("name", ["computed", "nothing-ahead", "seldom", "link"])
@pytest.mark.parametrize(("warmup", "hurried", "settled"), [(40, 40, False), (40, 25, True), (0, 0, False)])
def test_a_paused_simulation_ends_like_one_that_runs_at_once(
    name: str, warmup: int, hurried: int, settled: bool
) -> None:
    settings = next(
        each.settings for each in strategies(SYSTEMS["auto"], far_computes=True) if each.name == name
    )
    phases = {"warmup": warmup, "hurried": hurried, "settled": settled, "rankings": RANKINGS}
    paused = Simulation(TRACE, settings, tier(), timing(), **phases)  # type: ignore[arg-type]
    paused.fill(7)
    for timed in (0, 1, 20, 20, 63):
        paused.advance(timed)
        assert len(paused.seconds) == timed
    paused.advance()
    at_once = simulate(TRACE, settings, tier(), timing(), **phases)  # type: ignore[arg-type]
    assert_equal(paused.result(), at_once)


def test_a_start_from_the_cache_of_an_equal_simulation_changes_nothing() -> None:
    for left in range(0, 40, 4):
        filled = simulation()
        filled.fill(left)
        second = simulation(like=filled)
        second.advance()
        filled.advance()
        assert np.array_equal(second.seconds, filled.seconds)


def test_a_start_from_another_cache_is_near_a_start_of_its_own() -> None:
    filled = simulation()
    filled.fill(4)
    ahead = replace(AUTO, lookahead=2)
    taken, own = simulation(ahead, like=filled), simulation(ahead)
    taken.advance()
    own.advance()
    assert taken.seconds.mean() == pytest.approx(own.seconds.mean(), rel=0.01)
    empty = simulation(ahead, followed=WARMUP)
    empty.advance(3)
    assert empty.seconds.mean() > 1.1 * max(taken.seconds[:3].mean(), own.seconds[:3].mean())


def test_another_cache_is_taken_over_only_before_tokens_take_time_and_only_in_the_same_size() -> None:
    late = simulation()
    late.advance(1)
    with pytest.raises(ValueError, match="hurried passes"):
        simulation(like=late)
    filled = simulation()
    filled.fill(4)
    with pytest.raises(ValueError, match=f"{PAGES} pages"):
        Simulation(
            TRACE,
            AUTO,
            tier(pages=PAGES - 1),
            timing(),
            rankings=RANKINGS,
            warmup=40,
            hurried=40,
            like=filled,
        )


def test_tokens_that_only_the_policy_sees_move_nothing() -> None:
    taught = simulation(AUTO.fetching_nothing_ahead(), followed=WARMUP)
    taught.advance(1)
    assert taught.result().hits["miss"] == 1
    policy = _native.EvictionPolicy(AUTO.policy, LAYERS, EXPERTS)
    policy.follow(np.ascontiguousarray(TRACE.experts[: WARMUP + 1]))
    for layer in range(LAYERS):
        # The schedule hands over the experts of a layer in another order, which changes roundings.
        assert taught._timeline.copy_policy().keys(layer) == pytest.approx(policy.keys(layer), rel=1e-3)


def test_tokens_that_only_the_policy_sees_come_before_others_and_one_at_a_time() -> None:
    with pytest.raises(UsageError):
        simulation(followed=WARMUP + 1)
    starts = np.array([0, 10, *range(11, 151)], np.int64)
    with pytest.raises(ValueError, match="one token"):
        simulation(followed=5, starts=starts)


def test_a_race_times_every_entrant_and_the_winner_over_most_tokens() -> None:
    all_of_them = entrants()
    seconds = race(all_of_them, best)
    assert list(seconds) == [each.name for each in all_of_them]
    winner = next(each for each in all_of_them if each.name == best(seconds))
    assert len(winner.simulation.seconds) == max(len(each.simulation.seconds) for each in all_of_them)
    assert seconds[winner.name] == winner.simulation.seconds.mean()


@pytest.mark.parametrize("load", [0.3e-3, 1e-3, 3e-3])
def test_times_agree_with_the_winner(load: float) -> None:
    all_of_them = entrants(replace(COSTS, load=load))
    picked: list[str] = []

    def pick(means: Mapping[str, float]) -> str:
        picked.append(best(means))
        return picked[-1]

    seconds = race(all_of_them, pick)
    assert best(seconds) == picked[-1]


def test_clearly_slower_entrants_run_few_tokens() -> None:
    all_of_them = entrants(replace(COSTS, load=0.1))
    seconds = race(all_of_them, best)
    ran = {each.name: len(each.simulation.seconds) for each in all_of_them}
    assert ran["link"] == 20
    assert ran[best(seconds)] == max(ran.values())
    complete = simulation(all_of_them[-2].settings, replace(COSTS, load=0.1))
    complete.advance()
    # From eight compared tokens; the best takes a hundredth of it.
    assert seconds["link"] == pytest.approx(complete.seconds.mean(), rel=0.25)


@pytest.mark.parametrize("load", [0.3e-3, 1e-3, 3e-3])
@pytest.mark.parametrize("far", [0.2e-3, 1e-3])
def test_the_winner_is_the_fastest_of_complete_simulations_within_half_a_percent(
    load: float, far: float
) -> None:
    costs = replace(COSTS, load=load, compute_far=far)
    complete = {}
    for each in entrants(costs):
        each.simulation.advance()
        complete[each.name] = float(each.simulation.seconds.mean())
    winner = best(race(entrants(costs), best))
    assert complete[winner] <= 1.005 * min(complete.values())


def chosen(only: Strategy | None = None) -> Chosen:
    def tier_for(settings: CacheSettings) -> Tier:
        return tier(BLOCKS if settings.allocation == "uniform" else BLOCKS // 2)

    return choose_by_statistics(
        SYSTEMS["auto"], tier_for, COSTS, STATISTICS, threads=4, launch="card", only=only
    )


def test_the_choice_has_a_time_for_every_strategy() -> None:
    found = strategies(SYSTEMS["auto"], far_computes=True)
    choice = chosen()
    assert list(choice.seconds) == [each.name for each in found]
    in_parts = [each.name for each in found if each.settings.allocation != "uniform"]
    assert choice.strategy == fastest(found, choice.seconds, in_parts)


def test_a_choice_takes_as_long_as_its_strategy_alone() -> None:
    choice = chosen()
    alone = chosen(only=choice.strategy)
    assert alone.seconds == {choice.strategy.name: choice.seconds_of_choice}


def test_the_choice_does_not_depend_on_the_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    choices = []
    for threads in (1, 2, 16):
        monkeypatch.setattr(os, "cpu_count", lambda threads=threads: threads)
        choices.append(chosen())
    assert choices[0] == choices[1] == choices[2]


def test_a_timeline_takes_over_the_pages_of_another() -> None:
    filled = simulation()
    filled.fill(0)
    other = simulation(replace(AUTO, miss="fetch"), like=filled)
    one, two = (each._timeline for each in (filled, other))
    assert (one.residency() == two.residency()).all()
    assert two.check() == ""
    for layer in range(LAYERS):
        assert (one.copy_policy().keys(layer) == two.copy_policy().keys(layer)).all()
    with pytest.raises(ValueError, match="already"):
        two.start_like(one)
    with pytest.raises(ValueError, match="itself"):
        one.start_like(one)


def test_a_copied_policy_changes_by_itself() -> None:
    for name in _native.policy_names():
        if name in ("static", "belady"):
            continue
        policy = _native.EvictionPolicy(name, LAYERS, EXPERTS)
        policy.follow(np.ascontiguousarray(TRACE.experts[:50]))
        copy = policy.copy()
        kept = [policy.keys(layer) for layer in range(LAYERS)]
        copy.follow(np.ascontiguousarray(TRACE.experts[50:60]))
        policy_after = [policy.keys(layer) for layer in range(LAYERS)]
        assert all((one == two).all() for one, two in zip(kept, policy_after, strict=True)), name
        policy.follow(np.ascontiguousarray(TRACE.experts[50:60]))
        assert all((policy.keys(layer) == copy.keys(layer)).all() for layer in range(LAYERS)), name
