"""Preloads of the native runner: free pages only, behind everything else, cancelled at once, no accesses."""

import threading
import time

import numpy as np
import pytest
from test_runner import Model, Pass

from moechat import _native

LAYERS, EXPERTS, BLOCKS = 2, 8, 4
PAGE = Model(0, 1, 1, 1).layout.record_bytes
EVERYTHING = np.array([(layer, e) for e in range(EXPERTS) for layer in range(LAYERS)], np.int32)


@pytest.fixture(scope="module")
def model():
    return Model(7, LAYERS, EXPERTS, BLOCKS)


def finish(runner, experts=EVERYTHING, most=1 << 30):
    """Preloads until all of it is done."""
    done, until = 0, time.monotonic() + 20
    while done < len(experts):
        assert time.monotonic() < until
        done += runner.preload(experts[done:], most)
    runner.drain()
    return runner


def test_the_first_token_finds_what_was_preloaded(model):
    runner = finish(model.runner(pages=LAYERS * EXPERTS * BLOCKS, reserve=8), EVERYTHING[:6])
    stats = runner.stats()
    assert (stats["preloaded"], stats["fetched_prefetch"], stats["fetched_demand"]) == (6 * BLOCKS, 0, 0)
    assert sum(stats[f"hits_{kind}"] for kind in ("full", "prefetch", "top", "miss")) == 0
    for layer in range(LAYERS):
        Pass(model, layer, 1, chosen=[[0, 2]]).run(runner)
    stats = runner.stats()
    assert (stats["hits_full"], stats["hits_prefetch"], stats["hits_miss"]) == (4, 0, 0)
    assert stats["blocks_resident"] == 4 * BLOCKS
    assert stats["prefetch_wasted"] == 0
    assert runner.check() == ""


def test_it_leaves_the_reserve_and_pages_of_others_alone(model):
    runner = model.runner(pages=10 * BLOCKS, reserve=BLOCKS + 1)
    Pass(model, 1, 1, chosen=[[6, 7]]).run(runner)
    finish(runner)
    resident = runner.residency()
    assert resident[1, 6] == resident[1, 7] == BLOCKS
    # In the order given; the last expert gets what is left.
    assert resident.sum() == 10 * BLOCKS - (BLOCKS + 1)
    assert [resident[layer, e] for layer, e in EVERYTHING[:6]] == [BLOCKS] * 6
    assert resident[1, 3] == 0
    assert resident[0, 3] == BLOCKS - 1
    assert runner.stats()["evicted"] == 0


def test_others_make_way_in_the_order_given_and_no_more_of_them_than_needed(model):
    runner = model.runner(pages=5 * BLOCKS, reserve=BLOCKS)
    finish(runner, EVERYTHING[:4])  # experts 0 and 1 of both layers
    replaceable = np.array([[1, 7], [1, 0], [0, 1], [0, 0]], np.int32)  # the first holds nothing
    wanted = np.array([[1, 5], [0, 6]], np.int32)
    done = 0
    while done < len(wanted):
        done += runner.preload(wanted[done:], 1 << 30, replaceable)
        runner.drain()
    held = [(layer, e) for layer, e in EVERYTHING.tolist() if runner.residency()[layer, e]]
    assert sorted(held) == [(0, 0), (0, 6), (1, 1), (1, 5)]
    assert runner.stats()["evicted"] == 2 * BLOCKS
    assert runner.check() == ""
    Pass(model, 1, 1, chosen=[[5, 1]]).run(runner)
    assert runner.stats()["hits_full"] == 2


def test_of_an_expert_no_more_comes_than_its_target_asks_for(model):
    targets = np.array([[2, 1], [3, BLOCKS - 1]], np.int32)
    runner = model.runner(pages=LAYERS * EXPERTS * BLOCKS, reserve=BLOCKS, targets=targets)
    done = 0
    while done < len(EVERYTHING):
        done += runner.preload(EVERYTHING[done:], 1 << 30, to_targets=True)
        runner.drain()
    assert runner.residency()[0].tolist() == [1] * EXPERTS
    assert runner.residency()[1].tolist() == [BLOCKS - 1] * EXPERTS


def test_keys_are_those_of_the_policy(model):
    runner = model.runner(policy=_native.EvictionPolicy("lfu", LAYERS, EXPERTS))
    Pass(model, 1, 1, chosen=[[5, 1]]).run(runner)
    Pass(model, 1, 1, chosen=[[5, 6]]).run(runner)
    keys = runner.keys()
    assert keys.shape == (LAYERS, EXPERTS)
    assert keys[1].argmax() == 5
    assert (keys[0] == keys[0, 0]).all()


def test_a_demand_waits_for_no_more_than_a_few_blocks_in_flight(model):
    seconds = 0.01  # a block
    link = model.link(bandwidth=PAGE / seconds, in_flight_bytes=6 * PAGE)
    runner = model.runner(link=link, pages=LAYERS * EXPERTS * BLOCKS, reserve=2 * BLOCKS)
    assert runner.preload(EVERYTHING, 1 << 30) == EXPERTS * LAYERS  # the rest has no pages
    queued = runner.stats()["link_queued"]
    begun = time.monotonic()
    Pass(model, 1, 1, chosen=[[7, 6]]).run(runner)
    waited = time.monotonic() - begun
    own = 2 * BLOCKS * seconds
    bound = runner.stats()["link_in_flight"] / PAGE * seconds
    assert queued > 30, "there was a long queue"
    assert waited < own + bound + 0.15, f"the preload would take {queued * seconds:.2f} seconds"
    runner.close()


def test_stopping_cancels_what_has_not_started(model):
    runner = model.runner(
        link=model.link(bandwidth=PAGE / 0.02, in_flight_bytes=6 * PAGE),
        pages=LAYERS * EXPERTS * BLOCKS,
        reserve=2 * BLOCKS,
    )
    runner.preload(EVERYTHING, 1 << 30)
    begun = time.monotonic()
    runner.stop_preload()
    runner.drain()
    assert time.monotonic() - begun < 0.5
    stats = runner.stats()
    assert stats["link_queued"] == stats["link_in_flight"] == 0
    assert stats["link_cancelled"] > 30
    assert stats["preloaded"] < 20
    assert runner.check() == ""


def test_closing_during_a_preload_ends_at_once(model):
    runner = model.runner(
        link=model.link(bandwidth=PAGE / 0.02, in_flight_bytes=6 * PAGE), pages=LAYERS * EXPERTS * BLOCKS
    )
    runner.preload(EVERYTHING, 1 << 30)
    begun = time.monotonic()
    runner.close()
    assert time.monotonic() - begun < 0.5
    with pytest.raises(RuntimeError):
        runner.preload(EVERYTHING, 1 << 30)


def test_expectations_rank_only_experts_that_were_not_used(model):
    """Of preloaded experts the coldest go first, and all of them before one that was used."""
    for policy in ("forecast", "blend", "lcp", "lru", "lfu", "discount", "two_level_lru"):
        made = _native.EvictionPolicy(policy, LAYERS, EXPERTS)
        runner = model.runner(policy=made, pages=5 * BLOCKS, reserve=BLOCKS)
        shares = np.zeros((LAYERS, EXPERTS))
        shares[1, :4] = [0.2, 0.9, 0.1, 0.5]
        runner.expect(shares)
        finish(runner, np.array([[1, 1], [1, 3], [1, 0], [1, 2]], np.int32))
        Pass(model, 1, 1, chosen=[[5, 1]]).run(runner)
        Pass(model, 1, 1, chosen=[[5, 6]]).run(runner)
        kept = [int(e) for e in np.flatnonzero(runner.residency()[1] == BLOCKS)]
        assert {1, 3, 5, 6} <= set(kept), policy
        assert 2 not in kept, policy
        runner.close()


def test_wrong_experts_and_shares_are_refused(model):
    runner = model.runner()
    for experts in ([[0, EXPERTS]], [[LAYERS, 0]], [[0, -1]]):
        with pytest.raises(ValueError, match="must be from 0 to"):
            runner.preload(np.array(experts, np.int32), 1 << 20)
        with pytest.raises(ValueError, match="must be from 0 to"):
            runner.preload(EVERYTHING[:1], 1 << 20, np.array(experts, np.int32))
    with pytest.raises(ValueError, match=r"must be \[n, 2\]"):
        runner.preload(np.array([1, 2], np.int32), 1 << 20)
    with pytest.raises(ValueError, match="shares"):
        runner.expect(np.zeros((LAYERS + 1, EXPERTS)))


def test_passes_beside_a_preloading_thread_stay_correct(model):
    runner = model.runner(link=model.link(jitter=1e-4), pages=9 * BLOCKS, reserve=BLOCKS)
    stop = threading.Event()

    def load():
        while not stop.is_set():
            runner.preload(EVERYTHING, 3 * PAGE)

    thread = threading.Thread(target=load)
    thread.start()
    try:
        for step in range(40):
            Pass(model, step % LAYERS, 1, seed=step).run(runner)
            if step % 5 == 0:
                runner.stop_preload()
    finally:
        stop.set()
        thread.join()
    assert runner.check() == ""
