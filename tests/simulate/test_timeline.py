"""Timelines computed by hand, and properties of every timeline."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moechat import _native

BLOCK = 1000  # bytes
# At a second a block the link has the rate that is assumed before it is measured, 10 GB/s; that of the CPU is
# 20 GB/s.
LARGE = 10_000_000_000


def timeline(layers: int = 1, experts: int = 2, blocks: int = 2, **changes: Any) -> _native.Timeline:
    """A second for a block over the link, a quarter for computing one; half a second before each layer."""
    block_bytes = changes.get("block_bytes", BLOCK)
    pages = changes.pop("pages", 2 * layers * experts * blocks)
    policy = changes.pop("policy", "lru")
    ranks = changes.pop("ranks", None)
    keep = changes.pop("keep", (experts, blocks))
    options = {
        "layers": layers,
        "experts": experts,
        "blocks": blocks,
        "block_bytes": block_bytes,
        "pages": pages,
        "targets": np.tile(np.array(keep, np.int32), (layers, 1)),
        "reserve": 1,
        "policy": _native.EvictionPolicy(policy, layers, experts, ranks=ranks),
        "whole_experts": False,
        "miss": "fetch",
        "ahead": "none",
        "lookahead": 1,
        "ahead_experts": 1,
        "ahead_bytes": None,
        "stream_tokens": 0,
        "group_items": 0,
        "attention": 0.5,
        "head": 0.125,
        "call": 0.0,
        "compute": [0.25],
        "far_block": 0.0,
        "far_block_shared": 0.0,
        "latency": 0.0,
        "link": [1.0],
        "link_shared": [],
        "in_flight_bytes": 100 * block_bytes,
    }
    return _native.Timeline(**{**options, **changes})  # type: ignore[arg-type]


def play(line: _native.Timeline, chosen: list[Any], expected: Any = None) -> dict[str, list[float]]:
    """Tokens one by one; ``chosen`` is [tokens, layers, k]."""
    experts = np.array(chosen, np.int32)
    rankings = None if expected is None else np.array(expected, np.int32)
    found = line.run(experts, np.arange(len(experts) + 1, dtype=np.int64), rankings)
    return {key: values.tolist() for key, values in found.items()}


def test_a_block_is_computed_while_the_next_one_arrives() -> None:
    found = play(timeline(), [[[0]], [[0]]])
    # 0.5 until the router has chosen; blocks at 1.5 and 2.5, the second is computed at 2.75; then the head.
    # The second token finds both.
    assert found["seconds"] == [2.875, 0.5 + 0.5 + 0.125]
    assert found["stall"] == [1.0 + 0.75, 0.0]
    assert found["demand_bytes"] == [2 * BLOCK, 0]
    assert found["prefetch_bytes"] == [0, 0]


def test_whole_experts_wait_for_the_last_block() -> None:
    line = timeline(whole_experts=True)
    assert play(line, [[[0]]])["seconds"] == [0.5 + 2 + 0.5 + 0.125]
    assert line.stats()["stall_seconds"] == 2


def test_latency_overlaps_with_what_moves_before() -> None:
    assert play(timeline(latency=0.75), [[[0]]])["seconds"] == [0.5 + 0.75 + 2 + 0.25 + 0.125]


def test_a_full_link_begins_the_next_block_when_one_has_arrived() -> None:
    # One block in flight: each pays the latency by itself.
    line = timeline(latency=0.75, in_flight_bytes=BLOCK)
    assert play(line, [[[0]]])["seconds"] == [0.5 + 2 * 1.75 + 0.25 + 0.125]


def test_neighbouring_blocks_move_together() -> None:
    line = timeline(link=[1.0, 1.5])
    assert play(line, [[[0]]])["seconds"] == [0.5 + 1.5 + 0.5 + 0.125]
    assert line.stats()["link_operations"] == 1
    assert line.stats()["link_busy_seconds"] == 1.5


def test_starting_the_kernels_costs_each_time() -> None:
    assert play(timeline(call=0.0625), [[[0]], [[0]]])["seconds"] == [
        0.5 + 2 + 0.0625 + 0.25 + 0.125,
        0.5 + 0.0625 + 0.5 + 0.125,
    ]


def test_compute_time_follows_its_curve_and_extrapolates_the_last_step() -> None:
    line = timeline(blocks=4, compute=[0.5, 0.625])
    times = play(line, [[[0]], [[0]]])["seconds"]
    assert times[1] == 0.5 + 0.625 + 2 * 0.125 + 0.125


def test_a_prefetch_moves_while_the_previous_layer_computes() -> None:
    # Layer 0 needs expert 0, layer 1 expert 1, which is expected. The demand goes first: 1.5 and 2.5, then
    # the prefetch: 3.5 and 4.5. Layer 0 is done at 2.75, layer 1 begins at 3.25: nothing is missing but on
    # its way; computed at 3.75, waited for to 4.5.
    line = timeline(layers=2, ahead="ranked")
    found = play(line, [[[0], [1]]], [[[[0], [1]]]])
    assert found["seconds"] == [4.5 + 0.25 + 0.125]
    assert found["prefetch_bytes"] == [2 * BLOCK]
    assert line.stats()["hits_prefetch"] == 1
    assert line.stats()["hits_miss"] == 1


def test_a_wrong_prefetch_is_cancelled_except_for_started_transfers() -> None:
    # As before, but layer 1 needs expert 0. A third of the link's 300 bytes is a block: prefetches go one by
    # one. At 3.25 the first one is under way until 3.5; the other is cancelled. Demands: 4.5 and 5.5.
    line = timeline(layers=2, ahead="ranked", in_flight_bytes=2 * BLOCK - 1)
    found = play(line, [[[0], [0]]], [[[[0], [1]]]])
    assert found["seconds"] == [5.5 + 0.25 + 0.125]
    assert found["prefetch_bytes"] == [BLOCK]
    assert line.stats()["link_cancelled"] == 1


def test_a_demand_overtakes_waiting_prefetches() -> None:
    line = timeline(layers=2, experts=4, ahead="ranked", ahead_experts=2, in_flight_bytes=2 * BLOCK - 1)
    found = play(line, [[[0], [3]]], [[[[0, 1], [1, 2]]]])
    # Prefetches of experts 1 and 2 begin at 2.5: one block until 3.5; the layer demands expert 3 at 3.25.
    assert found["seconds"] == [3.5 + 2 + 0.25 + 0.125]


def test_the_far_tier_computes_missing_blocks() -> None:
    line = timeline(miss="cpu", far_block=0.375, far_block_shared=0.5, keep=(0, 1))
    found = play(line, [[[0]], [[0]]])
    # The link is idle, so alone: two blocks. Nothing comes near, so the second token is the same.
    assert found["seconds"] == [0.5 + 0.75 + 0.125] * 2
    assert found["stall"] == [0.75] * 2
    assert found["demand_bytes"] == [0, 0]
    assert line.stats()["blocks_far"] == 4


def slow_far(policy: str, **changes: Any) -> _native.Timeline:
    """The far tier computes a block in a second, the link brings one in half a second."""
    far = {"block_bytes": LARGE, "far_block": 1.0, "far_block_shared": 1.0, "link": [0.5]}
    return timeline(miss="compute", policy=policy, **{**far, **changes})


def test_uploads_are_what_the_link_brings_while_the_far_tier_computes_the_rest() -> None:
    found = play(slow_far("forecast", blocks=6), [[[0]]] * 12)
    # At first a third of the blocks, by the assumed rates; then more of what is missing, by those seen.
    assert found["demand_bytes"][0] == 2 * LARGE
    assert found["seconds"][0] == pytest.approx(0.5 + 4 + 0.125, abs=0.5)
    assert sum(found["demand_bytes"]) == 6 * LARGE  # each block once
    assert found["seconds"][-1] == 0.5 + 6 * 0.25 + 0.125


def test_where_keys_rank_one_layer_only_what_its_target_keeps_is_uploaded() -> None:
    found = play(slow_far("lru", blocks=6, experts=4, keep=(1, 4)), [[[0]], [[0]], [[1]], [[0]]])
    # The first blocks of the expert used last, at once; there are free pages for more.
    assert found["demand_bytes"] == [4 * LARGE, 0, 4 * LARGE, 0]
    ranks = np.array([[2.0, 9.0, 1.0, 0.5]])
    line = slow_far("static", blocks=6, experts=4, keep=(1, 4), ranks=ranks)
    assert play(line, [[[0]], [[1]], [[2]], [[1]]])["demand_bytes"] == [0, 4 * LARGE, 0, 0]
    assert line.residency().tolist() == [[0, 4, 0, 0]]


@pytest.mark.parametrize("policy", ["static", "forecast"])
def test_an_expert_is_not_uploaded_in_place_of_a_better_one(policy: str) -> None:
    # Pages for two experts and one block. Experts 0 and 1 are used in most tokens, the others in one each.
    ranks = np.array([[9.0, 8.0, 2.0, 0.5]]) if policy == "static" else None
    line = slow_far(policy, ranks=ranks, pages=5, keep=(2, 2), link=[0.01], experts=4)
    found = play(line, [*([[0, 1]] for _ in range(40)), [[0, 2]], [[1, 3]], [[0, 1]]])
    assert sum(found["demand_bytes"][:40]) == 4 * LARGE
    assert found["demand_bytes"][40:] == [0, 0, 0]
    assert line.residency().tolist() == [[2, 2, 0, 0]]


def test_a_warm_start_fills_free_pages_with_the_hottest_experts() -> None:
    line = timeline(layers=2, experts=4, pages=6, keep=(1, 2), reserve=2)
    shares = np.array([[0.1, 0.6, 0.2, 0.1], [0.1, 0.3, 0.9, 0.0]])
    line.start_warm(shares, np.array([[1, 2], [0, 1], [1, 1], [0, 2]], np.int32))
    # Two experts: the reserve stays free for demands.
    assert line.residency().tolist() == [[0, 2, 0, 0], [0, 0, 2, 0]]
    stats = line.stats()
    assert stats["preloaded"] == 4
    assert stats["fetched_prefetch"] == stats["hits_full"] == stats["hits_miss"] == 0
    found = play(line, [[[1], [2]]])
    assert found["demand_bytes"] == [0]
    assert line.stats()["hits_full"] == 2
    assert line.check() == ""


@pytest.mark.parametrize("launch", ["host", "card"])
def test_link_and_far_tier_share_missing_blocks_by_their_rates(launch: str) -> None:
    line = timeline(
        blocks=4, block_bytes=LARGE, miss="both", far_block=1.0, far_block_shared=2.0, launch=launch
    )
    found = play(line, [[[0]]])
    # Of four blocks the link, which has a third of the assumed rates, gets one: it arrives at 1.5. The far
    # tier computes the last one, a second beside the link and half a second alone, to 2.0. Now its rate is
    # 16.7 GB/s: of two blocks the link gets one, to 3.0, and the far tier the other, to 3.5. Then the near
    # tier computes both.
    assert line.stats()["blocks_far"] == 2
    assert line.stats()["far_seconds"] == 3
    assert found["demand_bytes"] == [2 * LARGE]
    assert found["seconds"] == [3.5 + 0.5 + 0.125]


def test_the_far_tier_takes_blocks_back_from_a_link_that_turns_out_to_be_slow() -> None:
    line = timeline(
        blocks=10, block_bytes=LARGE, miss="both", far_block=1.0, far_block_shared=2.0, link=[60.0]
    )
    # At first the link gets a third of the blocks. It has brought none when the far tier has computed the
    # others, so the far tier computes these as well. The link is busy with them, and gets nothing of the next
    # expert.
    assert play(line, [[[0]], [[1]]])["seconds"] == [0.5 + 20 + 0.125] * 2
    assert line.stats()["blocks_far"] == 20
    assert line.stats()["link_bytes_demand"] == 0  # the first is still on its way
    line.drain()
    assert line.stats()["fetched_demand"] == 3


def test_the_far_tier_computes_a_prefetched_block_that_would_arrive_later() -> None:
    # A layer takes 0.5 seconds to its router and 1 far. After layer 0 a block of layer 1 begins to
    # move, which takes 60: the far tier computes that block in a second as well.
    line = timeline(
        layers=2,
        blocks=1,
        block_bytes=LARGE // 20,  # half a second at the assumed rate is ten blocks
        miss="cpu",
        keep=(0, 1),
        ahead="ranked",
        far_block=1.0,
        far_block_shared=1.0,
        link=[60.0],
    )
    found = play(line, [[[0], [1]]] * 2, [[[[0], [1]]] * 2])
    assert line.stats()["hits_prefetch"] == 1  # on its way
    assert found["seconds"] == [2 * (0.5 + 1) + 0.125] * 2


def test_nothing_is_prefetched_while_the_far_tier_computes() -> None:
    # Expert 0 is computed far; a guess for layer 1 would slow that down. It moves once the sum is there, and
    # only as much as the link has time for until the next router: two of four blocks.
    line = timeline(
        layers=2,
        experts=8,
        blocks=4,
        keep=(0, 1),
        miss="cpu",
        ahead="ranked",
        attention=2.0,
        far_block=1.0,
        far_block_shared=10.0,
        link=[1.0],
    )
    guesses = [[[expert], [expert]] for expert in (1, 2, 3, 4, 5, 6, 7)]
    found = play(line, [[[0], [0]]] * 7, [guesses])
    # In the second token the link's rate is not known yet, and too much is tried.
    assert found["seconds"][2:] == pytest.approx([2 * (2 + 4) + 0.125] * 5)
    assert max(found["prefetch_bytes"][2:]) == 2 * 2 * BLOCK


def test_far_computing_slows_the_link_as_long_as_it_lasts() -> None:
    line = timeline(
        blocks=4, block_bytes=LARGE, miss="both", far_block=1.0, far_block_shared=2.0, link_shared=[2.0]
    )
    # One block over the link and one far take 2 seconds side by side; at that rate the link gets no other.
    assert play(line, [[[0]]])["seconds"] == [0.5 + 2 + 1 + 1 + 0.25 + 0.125]
    assert line.stats()["blocks_far"] == 3
    assert line.stats()["link_busy_seconds"] == 2.0


def test_a_gpu_computes_resident_blocks_then_all_others_behind_their_copies() -> None:
    line = timeline(launch="card", call=0.0625)
    # The second token finds expert 0 and fetches expert 1: one launch at once, one behind both copies.
    found = play(line, [[[0]], [[0]]])
    assert found["seconds"] == [0.5 + 2 + 0.0625 + 0.5 + 0.125, 0.5 + 0.0625 + 0.5 + 0.125]
    line = timeline(launch="card", call=0.0625)
    found = play(line, [[[0, 0]], [[0, 1]]])
    assert line.stats()["kernel_calls"] == 3
    assert found["seconds"][1] == 0.5 + 2 + 0.0625 + 0.5 + 0.125
    assert found["stall"][1] == 2 - 0.0625 - 0.5


def test_demands_of_a_gpu_are_copied_at_once_and_behind_the_kernels_that_read_their_pages() -> None:
    # Both wait for latency together although only one block is in flight at a time on a host.
    line = timeline(launch="card", latency=0.75, in_flight_bytes=BLOCK)
    assert play(line, [[[0]]])["seconds"] == [0.5 + 0.75 + 2 + 0.5 + 0.125]
    # Two pages: the copies of expert 1 move into those of expert 0, after its kernels, which end at 3.5.
    line = timeline(launch="card", pages=2, keep=(0, 1))
    found = play(line, [[[0, 1]]])
    assert found["seconds"] == [3.0 + 2 + 0.5 + 0.125]


def test_a_gpu_that_holds_every_block_waits_for_the_host_at_no_layer() -> None:
    calls = {"dense": 8.0, "choice": 8.0, "lists": 8.0, "launch": 8.0, "sum": 8.0, "sum_gpu": 0.0625}
    line = timeline(layers=2, launch="graphs", call=0.0625, calls=calls)
    for layer in range(2):
        assert line.preload(layer, np.arange(2, dtype=np.int32), 2) == 4
    found = play(line, [[[0], [1]]])
    # One launch a layer, for all of its blocks, and its sum. Nothing of the host's.
    assert found["seconds"] == [2 * (0.5 + 0.0625 + 2 * 0.25 + 0.0625) + 0.125]
    assert found["stall"] == [2 * 0.0625]
    assert line.stats()["hits_full"] == 2


def test_a_fixed_set_is_resident_from_the_beginning() -> None:
    ranks = np.array([[1.0, 2.0]])
    chosen = timeline(
        keep=(1, 2),
        pages=3,
        miss="compute",
        far_block=1.0,
        far_block_shared=1.0,
        policy="static",
        ranks=ranks,
    )
    assert chosen.preload(0, np.array([1], np.int32), 2) == 2
    assert play(chosen, [[[1]], [[0]], [[1]]])["seconds"] == [1.125, 2.625, 1.125]
    assert chosen.check() == ""


def test_untimed_passes_take_no_time() -> None:
    line = timeline()
    experts = np.array([[[0]], [[1]]], np.int32)
    starts = np.arange(3, dtype=np.int64)
    first = line.run(experts, starts, None, 0, 1, True)
    assert first["seconds"].tolist() == [0.0]
    assert first["demand_bytes"].tolist() == [2 * BLOCK]
    assert line.run(experts, starts, None, 1, 2)["seconds"].tolist() == [2.875]


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_no_block_is_lost_and_time_never_decreases(data: st.DataObject) -> None:
    draw = data.draw
    layers, count, blocks = draw(st.integers(1, 4)), draw(st.integers(2, 6)), draw(st.integers(1, 5))
    k, tokens = draw(st.integers(1, min(3, count))), 30
    rng = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    experts = rng.random((tokens, layers, count)).argsort(axis=-1)[..., :k].astype(np.int32)
    lookahead = draw(st.integers(1, 3))
    rankings = rng.random((lookahead, tokens, layers, count)).argsort(axis=-1).astype(np.int32)
    pages = draw(st.integers(2, layers * count * blocks + 8))  # also too few for a token's experts
    reserve = draw(st.integers(1, pages))
    split = draw(st.integers(1, blocks))
    kept = min(count, (pages - reserve) // (layers * split))
    spans = st.floats(0, 2)
    curve = np.cumsum([draw(spans) for _ in range(3)]).tolist()
    moving = np.cumsum([draw(spans) for _ in range(draw(st.integers(1, 4)))]).tolist()
    line = timeline(
        layers,
        count,
        blocks,
        pages=pages,
        reserve=reserve,
        keep=(kept, split),
        launch=draw(st.sampled_from(["host", "card"])),
        policy=draw(st.sampled_from(["lru", "lcp", "blend"])),
        miss=draw(st.sampled_from(["fetch", "compute", "both"])),
        ahead=draw(st.sampled_from(["none", "prompts", "ranked", "whole-layer"])),
        lookahead=lookahead,
        ahead_experts=draw(st.integers(0, count)),
        ahead_bytes=draw(st.sampled_from([None, 0, BLOCK, 3 * BLOCK])),
        whole_experts=draw(st.booleans()),
        attention=draw(spans),
        head=draw(spans),
        compute=curve,
        far_block=draw(spans),
        far_block_shared=draw(spans),
        latency=draw(spans),
        link=moving,
        in_flight_bytes=draw(st.integers(1, 20 * BLOCK)),
    )
    starts = np.arange(tokens + 1, dtype=np.int64)
    found = line.run(experts, starts, rankings)
    assert line.check() == ""
    now = line.stats()["now"]
    assert now == pytest.approx(found["seconds"].sum())
    assert (found["stall"] >= 0).all()
    assert (found["stall"] <= found["seconds"] + 1e-9).all()
    line.drain()
    stats = line.stats()
    landed = stats["fetched_demand"] + stats["fetched_prefetch"]
    moved = sum(stats[f"link_bytes_{kind}"] for kind in ("demand", "next", "later"))
    assert moved == landed * BLOCK
    assert stats["link_busy_seconds"] <= stats["now"] + 1e-9
    assert stats["compute_seconds"] + stats["stall_seconds"] <= now + 1e-9
    # Every block of every choice is computed once, near or far.
    near = stats["bytes_computed"] // BLOCK
    assert near + stats["blocks_far"] == tokens * layers * k * blocks
    assert sum(stats[f"hits_{kind}"] for kind in ("full", "prefetch", "top", "miss")) == tokens * layers * k


def test_a_faster_link_is_never_slower_without_speculation() -> None:
    rng = np.random.default_rng(0)
    experts = rng.random((200, 3, 8)).argsort(axis=-1)[..., :2].astype(np.int32)
    starts = np.arange(201, dtype=np.int64)
    totals = []
    for seconds in (4.0, 2.0, 1.0, 0.5, 0.25, 0.125):
        line = timeline(3, 8, 2, pages=24, keep=(3, 2), reserve=4, link=[seconds])
        totals.append(line.run(experts, starts, None)["seconds"].sum())
    assert totals == sorted(totals, reverse=True)
    assert totals[0] > 2 * totals[-1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"miss": "guess"}, "miss is"),
        ({"ahead": "guess"}, "ahead is"),
        ({"compute": []}, "compute is empty"),
        ({"compute": [float("nan")]}, "compute is nan"),
        ({"link": []}, "seconds of the link is empty"),
        ({"link_shared": [1.0, 2.0]}, "seconds_shared has 2 values, seconds 1"),
        ({"latency": -1.0}, "latency of the link"),
        ({"attention": float("inf")}, "attention is inf"),
        ({"in_flight_bytes": 0}, "in_flight_bytes is 0"),
        ({"block_bytes": 0}, "block_bytes is 0"),
        ({"pages": 0, "keep": (0, 1)}, "pages is 0"),
        ({"pages": 3}, "the targets take 4 pages"),
        ({"lookahead": 0}, "lookahead must be"),
        ({"launch": "guess"}, "launch is"),
        ({"far_threads": 0}, "far_threads is 0"),
    ],
)
def test_impossible_options_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        timeline(**changes)


def test_impossible_passes_are_refused() -> None:
    experts = np.zeros((3, 1, 1), np.int32)
    starts = np.arange(4, dtype=np.int64)
    rankings = np.zeros((1, 2, 1, 1), np.int32)
    for arguments, message in (
        ((experts, starts, rankings), "rankings has shape"),
        ((experts, starts[::-1].copy(), None), "starts does not ascend"),
        ((experts, starts + 1, None), "starts does not ascend"),
        ((experts[0], starts, None), "experts has shape"),
        ((experts.astype(np.int64), starts, None), "dtype"),
        ((experts, starts, None, 2, 1), "passes 2 to 1"),
    ):
        with pytest.raises(ValueError, match=message):
            timeline().run(*arguments)  # type: ignore[arg-type]


def test_duplicate_and_unknown_experts_in_a_ranking_are_refused() -> None:
    for ranking in ([1, 1], [0, 2]):
        line = timeline(layers=2, ahead="ranked", ahead_experts=2)
        with pytest.raises(ValueError, match="expert"):
            play(line, [[[0], [0]]], [[[ranking, ranking]]])
