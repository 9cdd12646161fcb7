"""Watched runs: timelines that change how they load, and hardness as the engine counts it."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_routing import MadeRouting, made_model

from moechat import _native
from moechat.configurator.systems import SYSTEMS, CacheSettings
from moechat.hardware.profile_file import reference_profile
from moechat.routing import RoutingCounter
from moechat.routing.trace import Trace
from moechat.simulate.compare import Comparison, SimulateOptions
from moechat.simulate.run import SimulatedRun, Watched, simulate
from moechat.simulate.strategy import SELDOM, Chosen, loadings, loads_as, strategies, watched
from moechat.trials import Watch
from moechat.trials import watch as watch_module

LAYERS, EXPERTS, TOP_K, BLOCKS, HIDDEN = 3, 12, 2, 2, 64
RESERVE = 2 * TOP_K * BLOCKS
AUTO = SYSTEMS["auto"]
# How experts are loaded, as arguments of a timeline.
LOADING = {
    "miss": "fetch",
    "ahead": "ranked",
    "lookahead": 1,
    "ahead_experts": TOP_K,
    "ahead_bytes": None,
    "stream_tokens": 0,
}
QUIET = {**LOADING, "ahead": "none"}
LAYOUT = _native.BlockLayout(HIDDEN, 64 * BLOCKS, 4)


def targets_of(kept: int, blocks: int = BLOCKS) -> Any:
    return np.tile(np.array([kept, blocks], np.int32), (LAYERS, 1))


def sizes(kept: int, policy: str) -> dict[str, Any]:
    """Arguments that timeline and runner share."""
    return {
        "layers": LAYERS,
        "experts": EXPERTS,
        "pages": kept * LAYERS * BLOCKS + RESERVE,
        "targets": targets_of(kept),
        "reserve": RESERVE,
        "policy": _native.EvictionPolicy(policy, LAYERS, EXPERTS),
    }


def timeline(kept: int = 4, policy: str = "forecast", **loading: Any) -> _native.Timeline:
    return _native.Timeline(
        **sizes(kept, policy),
        blocks=BLOCKS,
        block_bytes=LAYOUT.record_bytes,
        whole_experts=False,
        **{**LOADING, **loading},
        group_items=0,
        attention=1e-4,
        head=1e-4,
        call=1e-6,
        compute=[1e-5, 1.5e-5],
        far_block=4e-5,
        far_block_shared=5e-5,
        latency=1e-5,
        link=[3e-5, 5e-5],
        link_shared=[4e-5, 6e-5],
        in_flight_bytes=8 * LAYOUT.record_bytes,
        counts_hard=True,
    )


def routing(tokens: int, seed: int = 0) -> tuple[Any, Any]:
    """Popular experts more often, and predictions of them, two layers ahead."""
    random = np.random.default_rng(seed)
    keys = -0.8 * np.log1p(np.arange(EXPERTS)) + random.gumbel(size=(tokens, LAYERS, EXPERTS))
    guesses = keys + 0.5 * random.gumbel(size=(2, *keys.shape))
    chosen, ranked = (np.argsort(-values, axis=-1)[..., :TOP_K] for values in (keys, guesses))
    return np.ascontiguousarray(chosen, np.int32), np.ascontiguousarray(ranked, np.int32)


def starts_of(tokens: int) -> Any:
    return np.arange(tokens + 1, dtype=np.int64)


def in_parts(line: _native.Timeline, tokens: int, changes: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """Figures of a timeline that is switched before some tokens, and its state at the end."""
    chosen, ranked = routing(tokens)
    parts = []
    for token in range(tokens):
        if token in changes:
            line.switch_to(**{"targets": targets_of(4), **LOADING, **changes[token]})
        parts.append(line.run(chosen, starts_of(tokens), ranked, token, token + 1))
    assert line.check() == ""
    figures = {name: np.concatenate([part[name] for part in parts]).tolist() for name in parts[0]}
    return {**figures, "stats": line.stats(), "residency": line.residency().tolist()}


@pytest.mark.parametrize("loading", [LOADING, {**LOADING, "miss": "both", "lookahead": 2}, QUIET])
def test_switching_to_the_same_settings_changes_nothing(loading: dict[str, Any]) -> None:
    chosen, ranked = routing(60)
    line = timeline(**loading)
    whole = {name: values.tolist() for name, values in line.run(chosen, starts_of(60), ranked).items()}
    whole |= {"stats": line.stats(), "residency": line.residency().tolist()}
    assert in_parts(timeline(**loading), 60, dict.fromkeys(range(60), loading)) == whole


def test_after_a_switch_a_timeline_loads_as_the_new_settings_say() -> None:
    found = in_parts(timeline(), 90, {30: QUIET, 60: LOADING})
    fetched = np.array(found["prefetch_bytes"]).reshape(3, 30)
    assert fetched[0].sum() > 0
    # What was queued for the first layer of the next token may still be on its way.
    assert fetched[1, 1:].sum() == 0
    assert fetched[2].sum() > 0
    assert in_parts(timeline(**QUIET), 30, {})["seconds"] != found["seconds"][:30]


def test_a_switch_before_the_first_token_is_as_if_made_so() -> None:
    for loading in (QUIET, {**LOADING, "miss": "compute"}, {**LOADING, "lookahead": 2, "ahead_experts": 1}):
        assert in_parts(timeline(), 40, {0: loading}) == in_parts(timeline(**loading), 40, {})


def test_other_targets_are_kept_from_the_next_pass_on() -> None:
    chosen, ranked = routing(60)
    found = []
    for targets in (targets_of(4), targets_of(1)):
        line = timeline(kept=4)
        line.run(chosen, starts_of(60), ranked, 0, 30)
        line.switch_to(targets=targets, **LOADING)
        found.append(line.run(chosen, starts_of(60), ranked, 30, 60))
        assert line.check() == ""
    assert found[0]["seconds"].tolist() != found[1]["seconds"].tolist()
    # Hardness depends on the pages, which are the same.
    assert found[0]["hard"].tolist() == found[1]["hard"].tolist()


@pytest.mark.parametrize(
    "wrong",
    [
        {"lookahead": 0},
        {"ahead_experts": -1},
        {"ahead_bytes": -1},
        {"miss": "sometimes"},
        {"ahead": "never"},
        {"targets": targets_of(EXPERTS + 1)},
        {"targets": targets_of(EXPERTS)},  # more than the pages hold
        {"targets": targets_of(4, BLOCKS + 1)},
        {"targets": targets_of(4)[:2]},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_a_switch_to_impossible_sizes_is_refused_and_changes_nothing(wrong: dict[str, Any]) -> None:
    chosen, ranked = routing(60)
    undisturbed, line = timeline(), timeline()
    expected = undisturbed.run(chosen, starts_of(60), ranked)["seconds"].tolist()
    first = line.run(chosen, starts_of(60), ranked, 0, 30)["seconds"].tolist()
    with pytest.raises((ValueError, TypeError)):
        line.switch_to(**{"targets": targets_of(4), **QUIET, **wrong})
    assert first + line.run(chosen, starts_of(60), ranked, 30, 60)["seconds"].tolist() == expected
    assert line.stats() == undisturbed.stats()


# ---- hardness


def engine_hardness(kept: int, policy: str, chosen: Any, starts: Any) -> list[int]:
    """Hard activations of each pass, as a runner counts them."""
    records = [np.zeros((EXPERTS, BLOCKS, LAYOUT.record_bytes), np.uint8) for _ in range(LAYERS)]
    runner = _native.ExpertRunner(
        LAYOUT, _native.Gate(), **sizes(kept, policy), link=_native.sim_link(records), top_k=TOP_K
    )
    counts = [0]
    for first, end in pairwise(starts):
        x = np.zeros((end - first, HIDDEN), np.float32)
        for layer in range(LAYERS):
            index = np.ascontiguousarray(chosen[first:end, layer], np.int64)
            runner.begin(layer, index, np.ones(index.shape, np.float32))
            runner.finish(x, np.empty_like(x))
        counts.append(runner.hard_activations())
    runner.reset_routing_counts()
    assert runner.hard_activations() == counts[-1], "it is never reset"
    runner.close()
    return np.diff(counts).tolist()


def counted_hardness(kept: int, policy: str, chosen: Any, starts: Any) -> list[int]:
    """The same from the ranks that a counter has counted: an expert of rank r is in caches of more."""
    counter = RoutingCounter(_native.EvictionPolicy(policy, LAYERS, EXPERTS), TOP_K)
    found = []
    for first, end in pairwise(starts):
        counter.reset()
        counter.feed(chosen[first:end], passes=np.array([end - first]))
        found.append(int(counter.snapshot().ranks[:, kept:].sum()))
    return found


@settings(max_examples=25, deadline=None)
@given(
    policy=st.sampled_from(["forecast", "blend", "lru", "lcp"]),
    kept=st.integers(0, EXPERTS),
    seed=st.integers(0, 1 << 20),
    lengths=st.lists(st.sampled_from([1, 1, 1, 4]), min_size=1, max_size=40),
)
def test_a_timeline_counts_the_hardness_of_the_engine_and_of_the_ranks(
    policy: str, kept: int, seed: int, lengths: list[int]
) -> None:
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    chosen, ranked = routing(int(starts[-1]), seed)
    found = timeline(kept, policy).run(chosen, starts, ranked)["hard"].tolist()
    assert found == engine_hardness(kept, policy, chosen, starts)
    assert found == counted_hardness(kept, policy, chosen, starts)
    assert sum(found) == 0 or kept < EXPERTS


def test_hardness_does_not_depend_on_how_experts_are_loaded() -> None:
    usual = in_parts(timeline(), 80, {})["hard"]
    assert len(set(usual)) > 2
    ways = (QUIET, {**LOADING, "miss": "both"}, {**LOADING, "miss": "compute"}, {**LOADING, "lookahead": 2})
    for loading in ways:
        assert in_parts(timeline(**loading), 80, {})["hard"] == usual
    assert in_parts(timeline(), 80, {10: QUIET, 40: LOADING})["hard"] == usual


def test_hardness_is_counted_only_where_it_is_wanted() -> None:
    chosen, ranked = routing(20)
    arguments = {**sizes(4, "lru"), **LOADING, "blocks": BLOCKS, "block_bytes": LAYOUT.record_bytes}
    line = _native.Timeline(
        **arguments, whole_experts=False, group_items=0, attention=0.0, head=0.0, call=0.0, compute=[0.0],
        far_block=0.0, far_block_shared=0.0, latency=0.0, link=[0.0], link_shared=[], in_flight_bytes=1 << 20,
    )  # fmt: skip
    assert line.run(chosen, starts_of(20), ranked)["hard"].tolist() == [0.0] * 20


# ---- watched runs

TOKENS, WARMUP, SHARE = 400, 100, 0.25


@cache
def comparison(profile: str = "rtx3060-12g") -> Comparison:
    made = MadeRouting(6, 32, 4, 0.8, 0.35)
    return Comparison(
        made.trace(WARMUP + TOKENS),
        made_model(made.layers, made.experts, made.top_k, hidden=2048, intermediate=768),
        reference_profile(profile),
        SimulateOptions(systems=("auto",), tokens=TOKENS, warmup=WARMUP),
    )


def played(way: CacheSettings, watching: Watched | None, profile: str = "rtx3060-12g") -> SimulatedRun:
    case = comparison(profile)
    return simulate(
        case.trace,
        way,
        case.tier(strategies(AUTO, far_computes=True)[0].settings, SHARE),
        case.timing,
        rankings=case.rankings_for(replace(AUTO, lookahead=2)),
        warmup=WARMUP,
        hurried=WARMUP,
        watched=watching,
    )


def ways() -> dict[str, CacheSettings]:
    found = loadings(AUTO, far_computes=True)
    return {each.name: each.settings for each in found}


def assert_equal(one: SimulatedRun, other: SimulatedRun) -> None:
    for name in ("seconds", "stall", "demand_bytes", "prefetch_bytes"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name), err_msg=name)
    assert one.counters == other.counters


def test_a_run_with_one_way_equals_one_without_a_watch() -> None:
    for name, way in ways().items():
        alone = Watched(Watch([name], name, {}), {name: way})
        assert_equal(played(way, alone), played(way, None))


def test_a_run_whose_ways_are_the_same_is_as_fast_as_one_without_a_watch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watch_module, "_FIRST", 1)
    monkeypatch.setattr(watch_module, "_LEAST_REST", 1)
    way = ways()["computed"]
    watch = Watch(["one", "other"], "one", {})
    found = played(way, Watched(watch, {"one": way, "other": way}))
    assert found.tpot == played(way, None).tpot
    assert watch.rounds > 0


@pytest.mark.parametrize("profile", ["laptop-rtx4060-8g", "rtx3060-12g", "rtx4090-24g"])
def test_a_watch_finds_the_fastest_way_from_the_slowest(profile: str) -> None:
    times = {name: played(way, None, profile).tpot for name, way in ways().items()}
    slowest, fastest = max(times, key=times.__getitem__), min(times, key=times.__getitem__)
    watching = watched(AUTO, None, ways()[slowest], far_computes=True)
    assert watching is not None
    found = played(ways()[slowest], watching, profile)
    assert times[watching.watch.at_work] < 1.03 * times[fastest]
    # The last half of the tokens are about as fast as with the fastest.
    late = played(ways()[fastest], None, profile).seconds[TOKENS // 2 :].sum()
    assert found.seconds[TOKENS // 2 :].sum() < 1.03 * late


# ---- which ways are watched


def test_ways_differ_only_in_how_experts_are_loaded() -> None:
    at_work = next(each for each in strategies(AUTO, far_computes=True) if each.name == "dp").settings
    watching = watched(AUTO, None, at_work, far_computes=True)
    assert watching is not None
    assert watching.watch.way == "computed", "it loads as the computed plan does"
    assert watching.ways["computed"] == at_work
    for name, way in watching.ways.items():
        assert loads_as(at_work, way) == way, name
        assert (way.allocation, way.split) == (at_work.allocation, at_work.split)
    assert set(watching.ways) == {each.name for each in loadings(AUTO, far_computes=True)}


def test_nothing_is_watched_without_a_choice() -> None:
    fixed = replace(AUTO, choose=False)
    assert watched(fixed, None, fixed, far_computes=True) is None
    assert watched(SYSTEMS["oracle"], None, fixed, far_computes=True) is None
    # Settings that are none of the candidates', as those that were given by hand.
    other = replace(fixed, prefetch_experts=1)
    assert watched(AUTO, None, other, far_computes=True) is None


def test_ways_that_cannot_take_turns_are_left_out() -> None:
    at_work = ways()["computed"]

    def served(one: CacheSettings, other: CacheSettings) -> bool:
        forms = [each.request_form(predicts=True, far_computes=True) for each in (one, other)]
        return forms[0].serves(forms[1])

    def names(start: str) -> set[str]:
        watching = watched(AUTO, None, ways()[start], far_computes=True, may_take_turns=served)
        return set() if watching is None else set(watching.ways)

    assert names("two-ahead") == set(ways())
    assert names("computed") == set(ways()) - {"two-ahead"}
    assert names("nothing-ahead") == {"nothing-ahead", "cpu-nothing-ahead"}
    assert names("link") == set()  # alone
    watching = watched(AUTO, None, at_work, far_computes=True, may_take_turns=served)
    assert watching is not None
    assert watching.ways["nothing-ahead"] == ways()["nothing-ahead"]
    assert watched(AUTO, None, at_work, far_computes=True, may_take_turns=lambda *_: False) is None


def test_seldom_uploads_are_watched_and_are_no_rival() -> None:
    found = {each.name: each.settings for each in strategies(AUTO, far_computes=True)}
    at_work = found[SELDOM]
    seconds = {name: 1.0 + 0.1 * (name != SELDOM) for name in found}
    chosen = Chosen(next(s for s in strategies(AUTO, far_computes=True) if s.name == SELDOM), seconds)
    watching = watched(AUTO, chosen, at_work, far_computes=True)
    assert watching is not None
    assert watching.watch.way == SELDOM
    assert watching.ways[SELDOM] == at_work
    assert set(watching.ways) == set(ways()) | {SELDOM}
    assert all(way.keeping_whole_experts() == way for way in watching.ways.values())
    others = watched(AUTO, chosen, ways()["computed"], far_computes=True)
    assert others is not None
    assert SELDOM not in others.ways


def test_a_trace_of_one_token_can_be_watched() -> None:
    case = comparison()
    trace = Trace(case.trace.experts[:1], np.array([0, 1], dtype=np.int64), case.trace.num_experts)
    way = ways()["computed"]
    watching = watched(AUTO, None, way, far_computes=True)
    tier = case.tier(way, SHARE)
    run = simulate(
        trace, replace(way, prefetch="none", prefetch_experts=None), tier, case.timing, watched=watching
    )
    assert len(run.seconds) == 1
