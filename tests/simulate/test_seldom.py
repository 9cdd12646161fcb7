"""``miss="seldom"`` and ``"stay"``: the CPU computes what is missing; experts stay until routing has changed
clearly, or very much.
"""

from __future__ import annotations

import numpy as np
import pytest

from moechat._native import EvictionPolicy, Timeline
from moechat.configurator.systems import SYSTEMS, parse_settings
from moechat.routing.hot_experts import long_run
from moechat.simulate.strategy import (
    NOTHING_AHEAD_GAIN,
    PARTS_GAIN,
    SELDOM,
    SELDOM_GAIN,
    STAY,
    Strategy,
    fastest,
    handicap,
    strategies,
)

LAYERS, EXPERTS, BLOCKS, KEPT, RESERVE = 3, 24, 2, 6, 4


def timeline(miss: str = "seldom", policy: str = "forecast") -> Timeline:
    """A GPU that holds a quarter of the experts; CPU and link take the same time for a block."""
    return Timeline(
        layers=LAYERS,
        experts=EXPERTS,
        blocks=BLOCKS,
        block_bytes=1000,
        pages=LAYERS * KEPT * BLOCKS + RESERVE,
        targets=np.array([[KEPT, BLOCKS]] * LAYERS, np.int32),
        reserve=RESERVE,
        policy=EvictionPolicy(policy, LAYERS, EXPERTS),
        whole_experts=False,
        miss=miss,
        ahead="none",
        lookahead=1,
        ahead_experts=0,
        ahead_bytes=None,
        stream_tokens=0,
        group_items=0,
        attention=1e-4,
        head=1e-4,
        call=0.0,
        compute=[1e-6],
        far_block=1e-5,
        far_block_shared=1e-5,
        latency=0.0,
        link=[1e-5],
        link_shared=[],
        in_flight_bytes=1 << 20,
        launch="card",
    )


def routing(tokens: int, *, first: int = 0, often: float = 0.7, seed: int = 0) -> np.ndarray:
    """int32 [tokens, layers, 2]: each with a probability one of KEPT experts from ``first`` on, else another.

    Some choices are those of the token before, so that experts seem to be needed again for a short time.
    """
    rng = np.random.default_rng(seed)
    hot = (first + np.arange(KEPT)) % EXPERTS
    pools = [hot, np.setdiff1d(np.arange(EXPERTS), hot)]
    chosen = np.empty((tokens, LAYERS, 2), np.int32)
    for token, layer in np.ndindex(tokens, LAYERS):
        if token and rng.random() < 0.3:
            chosen[token, layer] = chosen[token - 1, layer]
            continue
        mixed = [rng.permutation(pool) for pool in pools]
        chosen[token, layer] = [mixed[int(rng.random() > often)][place] for place in range(2)]
    return chosen


def moved(made: Timeline, chosen: np.ndarray) -> np.ndarray:
    """Blocks that each token moves."""
    found = made.run(chosen, np.arange(len(chosen) + 1, dtype=np.int64), None)["demand_bytes"] / 1000
    assert made.check() == ""
    return found


def hot_share(made: Timeline, first: int = 0) -> float:
    """Share of the blocks of the hot experts that are resident."""
    hot = (first + np.arange(KEPT)) % EXPERTS
    return float(made.residency()[:, hot].sum()) / (LAYERS * KEPT * BLOCKS)


def test_experts_stay_and_hardly_any_is_uploaded() -> None:
    blocks = {}
    for miss in ("seldom", "compute"):
        made = timeline(miss)
        moved(made, routing(400))
        blocks[miss] = moved(made, routing(400, seed=1)).sum()
        if miss == "seldom":
            assert hot_share(made) > 0.9
    assert blocks["compute"] > 50
    assert blocks["seldom"] < blocks["compute"] / 4


def test_with_stay_less_is_uploaded_still() -> None:
    blocks = {}
    for miss in ("seldom", "stay"):
        made = timeline(miss)
        moved(made, routing(400))
        blocks[miss] = moved(made, routing(400, first=KEPT, seed=1)).sum()
    assert blocks["stay"] < blocks["seldom"] / 2


def test_the_most_used_experts_take_the_places_of_others_between_passes() -> None:
    made = timeline("stay")
    moved(made, routing(100))
    shares = np.zeros((LAYERS, EXPERTS))
    shares[:, KEPT : 2 * KEPT] = 0.5
    made.start_warm(shares, *long_run(shares, LAYERS * KEPT))
    assert hot_share(made, KEPT) == 1
    assert made.check() == ""


@pytest.mark.parametrize("miss", ["seldom", "stay"])
def test_free_pages_are_filled_at_once(miss: str) -> None:
    made = timeline(miss)
    moved(made, routing(24))
    assert made.residency().sum() >= LAYERS * KEPT * BLOCKS


def test_a_lasting_change_of_the_routing_is_followed() -> None:
    made = timeline()
    moved(made, routing(400))
    changed = moved(made, routing(300, first=KEPT, seed=2))
    assert hot_share(made, KEPT) > 0.8
    # No layer replaces more than one expert for a token.
    assert changed.max() <= LAYERS * BLOCKS
    assert changed.sum() >= 0.8 * LAYERS * KEPT * BLOCKS


@pytest.mark.parametrize("policy", ["lru", "lcp"])
def test_keys_without_a_common_scale_replace_nothing(policy: str) -> None:
    made = timeline(policy=policy)
    moved(made, routing(100))
    before = made.residency().tolist()
    assert moved(made, routing(100, first=KEPT, seed=2)).sum() == 0
    assert made.residency().tolist() == before


def test_they_are_candidates_where_the_cpu_can_compute() -> None:
    found = {each.name: each.settings for each in strategies(SYSTEMS["auto"], far_computes=True)}
    assert found[SELDOM] == parse_settings("auto:miss=seldom,prefetch=prompts,allocation=uniform,split=1")
    assert found[STAY] == parse_settings("auto:miss=stay,prefetch=prompts,allocation=model,split=1")
    assert not {SELDOM, STAY} & {each.name for each in strategies(SYSTEMS["auto"], far_computes=False)}


@pytest.mark.parametrize("name", [SELDOM, STAY])
def test_an_adaptive_strategy_is_preferred_where_the_gain_is_small(name: str) -> None:
    found = strategies(SYSTEMS["auto"], far_computes=True)

    def chosen(resting: float, other: float) -> str:
        seconds = {each.name: 2.0 for each in found} | {name: resting, "link": other}
        return fastest(found, seconds).name

    assert chosen(1.0, 1.0 + 2 * SELDOM_GAIN) == name
    assert chosen(1.0, 1.0 + SELDOM_GAIN / 2) == "link"
    assert chosen(1.0, 0.9) == "link"
    alone = Strategy(name, "", SYSTEMS["auto"])
    assert fastest([alone], {name: 1.0}) == alone


@pytest.mark.parametrize("name", ["nothing-ahead", "whole-nothing-ahead", "cpu-nothing-ahead"])
def test_fetching_nothing_ahead_needs_a_gain(name: str) -> None:
    found = strategies(SYSTEMS["auto"], far_computes=True)

    def chosen(nothing_ahead: float) -> str:
        seconds = {each.name: 2.0 for each in found} | {name: nothing_ahead, "dp": 1.0}
        return fastest(found, seconds).name

    assert chosen(1 - 2 * NOTHING_AHEAD_GAIN) == name
    assert chosen(1 - NOTHING_AHEAD_GAIN / 2) == "dp"


def test_parts_of_experts_need_a_gain_over_whole_ones() -> None:
    found = strategies(SYSTEMS["auto"], far_computes=True)

    def chosen(parts: float) -> str:
        seconds = {each.name: 2.0 for each in found} | {"computed": parts, "whole": 1.0}
        return fastest(found, seconds, {"computed"}).name

    assert chosen(1 - 2 * PARTS_GAIN) == "computed"
    assert chosen(1 - PARTS_GAIN / 2) == "whole"


def test_gains_add_up() -> None:
    both = handicap("nothing-ahead", in_parts=True)
    assert both == pytest.approx(handicap("nothing-ahead", in_parts=False) * handicap("link", in_parts=True))
