"""The expert runner equals resident_forward bit by bit, wherever blocks lie and whenever they arrive."""

import gc
import os
import signal
import threading
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from native_support import POLICIES, random_expert

from moechat import _native

HIDDEN = 48

STAT_KEYS = {
    *(f"{kind}_{hit}" for kind in ("hits", "prefill_hits") for hit in ("full", "prefetch", "top", "miss")),
    *("blocks_wanted", "blocks_resident", "blocks_prefetched", "fetched_demand", "fetched_prefetch"),
    *(
        "prefetch_wasted",
        "evicted",
        "admitted",
        "preloaded",
        "compute_seconds",
        "stall_seconds",
        "begin_seconds",
    ),
    *(
        "layers_run",
        "activations",
        "bytes_computed",
        "kernel_calls",
        "blocks_staged",
        "blocks_far",
        "far_seconds",
    ),
    *("pages", "pages_peak", "page_bytes", "link_bytes"),
    *(
        f"link_{what}_{priority}"
        for what in ("bytes", "transfers")
        for priority in ("demand", "next", "later")
    ),
    *("link_operations", "link_errors", "link_cancelled", "link_queued", "link_in_flight"),
    *("link_busy_seconds", "link_bandwidth"),
}


@pytest.fixture(autouse=True)
def _keep_threads():
    before = _native.num_threads()
    yield
    _native.set_num_threads(before)


class Model:
    """Layers of random experts, as records in memory."""

    def __init__(self, seed: int, layers: int, experts: int, blocks: int) -> None:
        rng = np.random.default_rng(seed)
        self.layers, self.experts = layers, experts
        self.layout = _native.BlockLayout(HIDDEN, 64 * blocks, 16)
        self.records = [
            np.zeros((experts, blocks, self.layout.record_bytes), np.uint8) for _ in range(layers)
        ]
        for layer in self.records:
            for records in layer:
                _native.pack_expert(
                    self.layout, *random_expert(rng, HIDDEN, 64 * blocks, False)[0], None, records
                )

    def link(self, **options: float) -> _native.Link:
        return _native.sim_link(self.records, **options)

    def runner(self, link: _native.Link | None = None, **changes: object) -> _native.ExpertRunner:
        options = {
            "layers": self.layers,
            "experts": self.experts,
            "pages": 2 * self.experts * self.layout.blocks,
            "targets": np.tile(np.array([0, 1], np.int32), (self.layers, 1)),
            "reserve": 1,
            "policy": _native.EvictionPolicy("lcp", self.layers, self.experts),
            "link": link if link is not None else self.link(),
        }
        return _native.ExpertRunner(self.layout, _native.Gate(), **{**options, **changes})


class Pass:
    """Random tokens for one layer of a model, with the result that must come out."""

    def __init__(
        self,
        model: Model,
        layer: int,
        tokens: int,
        seed: int = 0,
        k: int = 2,
        chosen: list[list[int]] | None = None,
    ) -> None:
        rng = np.random.default_rng([seed, layer, tokens])
        self.layer = layer
        if chosen is None:
            chosen = [list(rng.permutation(model.experts)[:k]) for _ in range(tokens)]
        self.index = np.array(chosen, np.int64)
        self.weights = rng.random(self.index.shape).astype(np.float32)
        self.x = rng.standard_normal((tokens, HIDDEN)).astype(np.float32)
        self.expected = np.full_like(self.x, np.nan)
        records = model.records[layer]
        walked = _native.resident_forward(
            model.layout, _native.Gate(), records, self.x, self.index, self.weights, self.expected
        )
        there = {int(e) for e in self.index.ravel() if 0 <= e < model.experts}
        assert walked == len(there) * records[0].nbytes

    def begin(self, runner: _native.ExpertRunner) -> None:
        runner.begin(self.layer, self.index, self.weights)

    def finish(self, runner: _native.ExpertRunner) -> None:
        out = np.full_like(self.x, np.nan)
        runner.finish(self.x, out)
        assert np.array_equal(out, self.expected)

    def run(self, runner: _native.ExpertRunner) -> None:
        self.begin(runner)
        self.finish(runner)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), seed=st.integers(0, 1 << 30))
def test_bits_do_not_depend_on_budget_split_policy_prefetch_threads_or_delays(data, seed):
    layers, experts, blocks = (data.draw(st.integers(1, most)) for most in (3, 6, 4))
    model = Model(seed % 5, layers, experts, blocks)
    pages = data.draw(st.integers(2, layers * experts * blocks + 4), "pages")
    reserve = data.draw(st.integers(1, pages), "reserve")
    left, targets = pages - reserve, []
    for _ in range(layers):
        kept = data.draw(st.integers(1, blocks))
        targets.append((data.draw(st.integers(0, min(experts, left // kept))), kept))
        left -= targets[-1][0] * kept
    link = model.link(
        latency=data.draw(st.sampled_from((0.0, 1e-4))),
        jitter=data.draw(st.sampled_from((0.0, 2e-4))),
        reorder=data.draw(st.integers(1, 4)),
        seed=seed,
        in_flight_bytes=data.draw(st.sampled_from((0, 20_000, 60_000))),
    )
    policy = _native.EvictionPolicy(data.draw(st.sampled_from(POLICIES)), layers, experts)
    _native.set_num_threads(data.draw(st.integers(1, 3), "threads"))
    runner = model.runner(
        link,
        pages=pages,
        reserve=reserve,
        targets=np.array(targets, np.int32),
        policy=policy,
        whole_experts=data.draw(st.booleans(), "whole"),
        stall_seconds=20.0,
    )
    rng = np.random.default_rng(seed)
    for step in range(data.draw(st.integers(1, 5), "steps")):
        tokens = data.draw(st.sampled_from((1, 1, 2, 17)), "tokens")
        for layer in range(layers):
            one = Pass(model, layer, tokens, seed + step, k=data.draw(st.integers(1, experts)))
            one.begin(runner)
            if data.draw(st.booleans(), "prefetch"):
                scores = rng.random(experts).astype(np.float32) if rng.random() < 0.8 else None
                limit = None if rng.random() < 0.5 else int(rng.integers(0, 6)) * runner.page_bytes
                ahead = (layer + int(rng.integers(0, 3))) % layers
                queued = runner.prefetch(
                    ahead, scores, int(rng.integers(0, experts + 1)), limit, rng.random() < 0.3
                )
                assert queued % runner.page_bytes == 0
                assert limit is None or queued <= limit
            if data.draw(st.sampled_from((False, False, False, True)), "abort"):
                runner.abort()
                one.begin(runner)
            one.finish(runner)
            assert runner.check() == ""
    stats = runner.stats()
    assert stats["pages_peak"] <= pages
    assert stats["link_errors"] == 0


@pytest.mark.parametrize("tokens", [1, 700])
def test_a_long_pass_equals_its_tokens_computed_alone(tokens):
    # 700 tokens of 2 experts each need more than one group of accumulators at hidden 8192.
    layout = _native.BlockLayout(8192, 64, 4)
    rng = np.random.default_rng(0)
    records = np.zeros((3, 1, layout.record_bytes), np.uint8)
    for expert in records:
        _native.pack_expert(layout, *random_expert(rng, 8192, 64, False)[0], None, expert)
    x = rng.standard_normal((tokens, 8192)).astype(np.float32)
    index = np.array([rng.permutation(3)[:2] for _ in range(tokens)], np.int64)
    weights = rng.random((tokens, 2)).astype(np.float32)
    out = np.empty_like(x)
    _native.resident_forward(layout, _native.Gate(), records, x, index, weights, out)
    for t in {0, tokens // 2, tokens - 1}:
        alone = np.empty((1, 8192), np.float32)
        _native.resident_forward(layout, _native.Gate(), records, x[[t]], index[[t]], weights[[t]], alone)
        assert np.array_equal(alone[0], out[t])


def test_experts_outside_the_layer_select_nothing_and_repeated_ones_add_up():
    model = Model(1, 1, 3, 2)
    one = Pass(model, 0, 4, chosen=[[-1, 3], [2, 2], [0, 1], [2, 7]])
    assert not one.expected[0].any()
    once = np.empty((1, HIDDEN), np.float32)
    weight = one.weights[1].sum(keepdims=True)[None]
    _native.resident_forward(
        model.layout, _native.Gate(), model.records[0], one.x[[1]], one.index[[1], :1], weight, once
    )
    assert np.allclose(once, one.expected[1], rtol=1e-4, atol=1e-5)
    one.run(model.runner())


def test_places_tell_blocks_on_their_way_from_those_that_are_there():
    model = Model(4, 2, 4, 3)
    runner = model.runner(model.link(latency=0.2))
    one = Pass(model, 1, 1, chosen=[[0, 2]])
    one.begin(runner)
    resident, assigned, far = runner.places()
    assert resident.shape == assigned.shape == far.shape == (2, 4)
    assert not resident.any()
    assert assigned.tolist() == [[0, 0, 0, 0], [3, 0, 3, 0]]
    one.finish(runner)
    resident, assigned, far = runner.places()
    assert resident.tolist() == assigned.tolist() == runner.residency().tolist()
    assert resident[1].tolist() == [3, 0, 3, 0]
    assert not far.any()


def test_activations_are_those_of_the_routing_counts():
    model = Model(4, 2, 4, 1)
    runner = model.runner()
    for chosen in ([0, 2], [2, 3]):
        for layer in range(2):
            Pass(model, layer, 1, chosen=[chosen]).run(runner)
    Pass(model, 0, 5).run(runner)  # a prompt, which is not counted
    tokens, activations = runner.activations()
    counts = runner.routing_counts()
    assert tokens == counts[0] == 2
    assert activations.tolist() == counts[2].tolist() == [[1, 0, 2, 1]] * 2
    runner.reset_routing_counts()
    assert runner.activations()[0] == runner.activations()[1].sum() == 0


def test_statistics_match_the_work_done():
    model = Model(2, 2, 4, 3)
    runner = model.runner()
    assert set(runner.stats()) == STAT_KEYS
    one = Pass(model, 1, 1)
    one.run(runner)
    one.run(runner)
    stats = runner.stats()
    size = model.layout.record_bytes
    assert (stats["hits_miss"], stats["hits_full"]) == (2, 2)
    assert stats["link_bytes"] == stats["link_bytes_demand"] == 6 * size
    assert stats["bytes_computed"] == 12 * size
    assert (stats["layers_run"], stats["activations"], stats["fetched_demand"]) == (2, 4, 6)
    assert (stats["pages"], stats["pages_peak"], stats["page_bytes"]) == (24, 6, size)
    assert stats["compute_seconds"] > 0
    assert stats["begin_seconds"] > 0
    assert runner.residency()[1].tolist() == [3 if e in one.index else 0 for e in range(4)]
    assert runner.resident_bytes >= 6 * size
    runner.reset_stats()
    cleared = runner.stats()
    assert cleared["link_bytes"] == cleared["hits_miss"] == cleared["compute_seconds"] == 0
    assert cleared["pages_peak"] == 6


def test_prefetched_experts_are_resident_when_their_layer_begins():
    model = Model(3, 2, 6, 2)
    runner = model.runner()
    scores = np.array([0, 5, 1, np.nan, 4, 2], np.float32)
    assert runner.prefetch(1, scores, 2, None) == 4 * runner.page_bytes
    runner.drain()
    assert runner.residency()[1].tolist() == [0, 2, 0, 0, 2, 0]
    one = Pass(model, 1, 1, chosen=[[1, 4]])
    one.run(runner)
    stats = runner.stats()
    assert stats["hits_prefetch"] == 2
    assert stats["link_bytes_demand"] == 0
    assert runner.prefetch(0, None, 0, 3 * runner.page_bytes, later=True) == 3 * runner.page_bytes
    runner.drain()
    assert runner.residency()[0].tolist() == [2, 1, 0, 0, 0, 0]


def test_a_prefetch_without_pages_continues_as_pages_are_released():
    model = Model(3, 2, 4, 2)
    runner = model.runner(pages=4)
    one = Pass(model, 0, 1)
    one.begin(runner)
    assert runner.prefetch(1, None, 4, 3 * runner.page_bytes) == 0
    one.finish(runner)
    runner.drain()
    assert runner.residency()[1].tolist() == [2, 1, 0, 0]


def test_of_two_waiting_prefetches_the_next_layer_continues_first():
    model = Model(3, 3, 4, 2)
    runner = model.runner(pages=4)
    one = Pass(model, 0, 1)
    one.begin(runner)
    assert runner.prefetch(1, None, 4, 4 * runner.page_bytes) == 0
    assert runner.prefetch(2, None, 4, 4 * runner.page_bytes, later=True) == 0
    one.finish(runner)
    runner.drain()
    assert runner.residency()[1].tolist() == [2, 2, 0, 0]
    assert runner.residency()[2].tolist() == [0, 0, 0, 0]


def test_a_prefetch_leaves_pages_to_the_layer_that_still_waits_for_them():
    model = Model(3, 3, 4, 2)
    runner = model.runner(model.link(latency=0.05), pages=4)
    # Experts 0 and 1 of layer 1 are in flight and cannot be cancelled; then the layer needs 2 and 3.
    assert runner.prefetch(1, np.array([4, 3, 2, 1], np.float32), 2, None) == 4 * runner.page_bytes
    one = Pass(model, 1, 1, chosen=[[2, 3]])
    one.begin(runner)
    time.sleep(0.2)
    assert runner.prefetch(2, None, 4, None) == 0
    one.finish(runner)
    assert runner.stats()["prefetch_wasted"] == 4


def test_a_prefetch_evicts_nothing_that_it_names_itself():
    model = Model(3, 3, 4, 2)
    runner = model.runner(pages=4)
    Pass(model, 1, 1, chosen=[[0, 1]]).run(runner)
    Pass(model, 2, 1, chosen=[[0, 1]]).run(runner)
    Pass(model, 1, 1, chosen=[[0, 1]]).run(runner)
    assert runner.residency()[1].tolist() == [2, 2, 0, 0]
    assert runner.prefetch(1, np.array([4, 3, 2, 1], np.float32), 3, None) == 0
    assert runner.residency()[1].tolist() == [2, 2, 0, 0]


def test_a_long_row_is_computed_in_several_calls_with_the_same_result():
    model = Model(4, 1, 2, 4)
    runner = model.runner()
    one = Pass(model, 0, 9000, chosen=[[1]] * 9000)
    one.run(runner)
    assert runner.stats()["kernel_calls"] >= 2


def test_a_pass_finished_by_another_thread_than_began_it_is_refused():
    model = Model(4, 2, 3, 2)
    runner = model.runner()
    ours, theirs = Pass(model, 0, 1), Pass(model, 1, 1)
    ours.begin(runner)
    thread = threading.Thread(target=theirs.begin, args=(runner,))
    thread.start()
    thread.join()
    with pytest.raises(RuntimeError, match="another thread"):
        ours.finish(runner)
    ours.run(runner)


def test_time_of_a_stopped_process_is_not_counted_as_stall():
    model = Model(4, 1, 3, 2)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            runner = model.runner(model.link(latency=0.6), stall_seconds=1.2)
            Pass(model, 0, 1).run(runner)
            code = 0
        finally:
            os._exit(code)
    time.sleep(0.3)
    os.kill(child, signal.SIGSTOP)
    time.sleep(1.6)
    os.kill(child, signal.SIGCONT)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


class TestFiles:
    def runner(
        self, tmp_path: Path, model: Model, io: str = "auto"
    ) -> tuple[_native.ExpertRunner, list[Path]]:
        paths = [tmp_path / f"layer-{layer}.bin" for layer in range(model.layers)]
        for path, records in zip(paths, model.records, strict=True):
            path.write_bytes(records.tobytes())
        regions = [(str(path), 0, path.stat().st_size) for path in paths]
        return model.runner(_native.file_link(regions, io=io), pages=8), paths

    @pytest.mark.parametrize("io", ["auto", "threads"])
    def test_bits_are_those_of_the_records(self, tmp_path, io):
        model = Model(4, 2, 5, 3)
        runner, _ = self.runner(tmp_path, model, io)
        for step in range(10):
            for layer in range(2):
                Pass(model, layer, 1 + step % 3, step).run(runner)
        assert runner.check() == ""

    @pytest.mark.parametrize("io", ["auto", "threads"])
    def test_a_file_cut_short_is_an_error_within_a_second_and_whole_again_it_is_used(self, tmp_path, io):
        model = Model(4, 2, 5, 3)
        runner, paths = self.runner(tmp_path, model, io)
        Pass(model, 0, 1).run(runner)
        whole = paths[1].read_bytes()
        with paths[1].open("r+b") as file:
            file.truncate(4096)
        one = Pass(model, 1, 3)
        start = time.monotonic()
        one.begin(runner)
        with pytest.raises(_native.LinkError, match=r"expert layer 1 \(.*layer-1.bin at byte \d+\)"):
            one.finish(runner)
        assert time.monotonic() - start < 1
        assert runner.check() == ""
        Pass(model, 0, 1).run(runner)
        with paths[1].open("r+b") as file:
            file.write(whole)
        one.run(runner)


class TestWaiting:
    def test_a_stall_is_an_error_that_names_the_missing_blocks(self):
        model = Model(5, 2, 3, 2)
        runner = model.runner(model.link(stall_after=1), stall_seconds=0.3)
        one = Pass(model, 1, 1)
        one.begin(runner)
        start = time.monotonic()
        with pytest.raises(
            RuntimeError, match=r"of expert layer 1 \(simulated region 1 at byte \d+\) has not arr"
        ):
            one.finish(runner)
        assert 0.3 <= time.monotonic() - start < 1.3
        one.begin(runner)
        with pytest.raises(_native.LinkError, match="blocks are on their way, but none has arrived"):
            runner.drain()
        runner.abort()
        assert runner.check() == ""

    @pytest.mark.parametrize("drain", [False, True])
    def test_ctrl_c_is_raised_and_the_next_pass_runs(self, drain):
        model = Model(6, 1, 3, 2)
        runner = model.runner(model.link(latency=1.0))
        one = Pass(model, 0, 2)
        one.begin(runner)
        timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        start = time.monotonic()
        wait = runner.drain if drain else lambda: one.finish(runner)
        with pytest.raises(KeyboardInterrupt):
            wait()
        assert time.monotonic() - start < 0.8
        timer.join()
        assert runner.check() == ""
        one.run(runner)

    def test_other_python_threads_run_meanwhile(self):
        model = Model(6, 1, 3, 2)
        runner = model.runner(model.link(latency=0.3))
        one = Pass(model, 0, 2)
        one.begin(runner)
        beats: list[float] = []

        def beat() -> None:
            while len(beats) < 20:
                beats.append(time.monotonic())
                time.sleep(0.005)

        thread = threading.Thread(target=beat)
        thread.start()
        one.finish(runner)
        ended = time.monotonic()
        thread.join()
        assert sum(b < ended for b in beats) >= 15
        assert max(b - a for a, b in pairwise(beats)) < 0.2

    def test_close_lets_a_call_in_another_thread_finish(self):
        model = Model(6, 1, 3, 2)
        runner = model.runner(model.link(latency=0.3))
        one = Pass(model, 0, 1)
        failures: list[BaseException] = []

        def finish() -> None:
            try:
                one.run(runner)
            except BaseException as error:  # handed to the test
                failures.append(error)

        thread = threading.Thread(target=finish)
        thread.start()
        time.sleep(0.1)
        runner.close()
        thread.join()
        assert failures == []
        with pytest.raises(RuntimeError, match="closed"):
            runner.stats()


def test_a_failed_link_is_an_error_and_resident_experts_still_work():
    model = Model(7, 2, 3, 2)
    runner = model.runner(model.link(fail_after=4))
    resident = Pass(model, 0, 1)
    resident.run(runner)
    other = Pass(model, 1, 3)
    for _ in range(2):
        other.begin(runner)
        with pytest.raises(_native.LinkError, match="failed after 4 transfers"):
            other.finish(runner)
        resident.run(runner)
    assert runner.prefetch(1, None, 3, None) == 0


def test_a_forked_child_is_refused_and_the_parent_goes_on():
    model = Model(8, 1, 3, 2)
    runner = model.runner()
    one = Pass(model, 0, 1)
    one.run(runner)
    one.begin(runner)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            refused = 0
            calls = (runner.abort, runner.stats, runner.drain, runner.residency, lambda: one.begin(runner))
            for call in (*calls, lambda: one.finish(runner), lambda: runner.prefetch(0, None, 1, None)):
                try:
                    call()
                except RuntimeError as error:
                    refused += "forked child" in str(error)
            runner.close()
            code = 0 if refused == 7 else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    one.finish(runner)


def test_closing_is_idempotent_and_final():
    model = Model(8, 1, 3, 2)
    runner = model.runner()
    Pass(model, 0, 1).begin(runner)
    runner.close()
    runner.close()
    with pytest.raises(RuntimeError, match="closed"):
        runner.begin(0, np.zeros((1, 1), np.int64), np.zeros((1, 1), np.float32))


def test_the_memory_that_a_link_reads_from_lives_as_long_as_the_runner():
    model = Model(9, 1, 3, 2)
    one = Pass(model, 0, 2)
    runner = model.runner(_native.sim_link([model.records[0].copy()]))
    gc.collect()
    one.run(runner)


def test_targets_can_change_between_layers():
    model = Model(10, 2, 4, 2)
    runner = model.runner(pages=12, reserve=4)
    for step in range(6):
        runner.set_targets(np.array([[step % 3, 1], [1, 2]], np.int32))
        for layer in range(2):
            Pass(model, layer, 1, step).run(runner)
        assert runner.check() == ""
    with pytest.raises(ValueError, match="pages"):
        runner.set_targets(np.array([[4, 2], [1, 2]], np.int32))


class TestRefusals:
    def setup_method(self):
        self.model = Model(11, 2, 3, 2)
        self.runner = self.model.runner()
        self.one = Pass(self.model, 0, 2)

    def test_arrays_of_wrong_types_are_refused(self):
        one = self.one
        with pytest.raises(ValueError, match="top_k_index has dtype int32"):
            self.runner.begin(0, one.index.astype(np.int32), one.weights)
        with pytest.raises(ValueError, match=r"top_k_weights has shape \[2, 1\]"):
            self.runner.begin(0, one.index, one.weights[:, :1])
        with pytest.raises(ValueError, match="top_k_index has 1 dimensions"):
            self.runner.begin(0, one.index[0], one.weights)
        with pytest.raises(ValueError, match="layer is 2; it must be from 0 to 1"):
            self.runner.begin(2, one.index, one.weights)
        with pytest.raises(ValueError, match=r"scores has shape \[2\]"):
            self.runner.prefetch(0, np.zeros(2, np.float32), 1, None)
        with pytest.raises(ValueError, match="max_bytes is -1"):
            self.runner.prefetch(0, None, 1, -1)

    def test_finish_without_begin_or_with_other_tokens_is_refused(self):
        one = self.one
        with pytest.raises(RuntimeError, match="finish without begin"):
            one.finish(self.runner)
        one.begin(self.runner)
        with pytest.raises(ValueError, match="given 1 tokens, begin 2"):
            self.runner.finish(one.x[:1], np.empty((1, HIDDEN), np.float32))
        with pytest.raises(ValueError, match="out overlaps x"):
            self.runner.finish(one.x, one.x)
        out = np.empty_like(one.x)
        out.flags.writeable = False
        with pytest.raises(ValueError, match="out is read-only"):
            self.runner.finish(one.x, out)
        one.finish(self.runner)

    def test_inconsistent_sizes_are_refused(self):
        model = self.model
        with pytest.raises(ValueError, match="the link has 1 regions for 2 layers"):
            model.runner(_native.sim_link(model.records[:1]))
        with pytest.raises(ValueError, match="region 1 of the link has"):
            model.runner(_native.sim_link([model.records[0], model.records[1][:2].copy()]))
        with pytest.raises(ValueError, match="the policy is for 2 layers of 4 experts"):
            model.runner(policy=_native.EvictionPolicy("lru", 2, 4))
        with pytest.raises(ValueError, match="stall_seconds"):
            model.runner(stall_seconds=0.0)
        with pytest.raises(ValueError, match="pages is 0"):
            model.runner(pages=0)
        with pytest.raises(ValueError, match="pages"):
            model.runner(pages=4, targets=np.array([[1, 2], [1, 2]], np.int32))

    def test_policies_and_links_in_use_are_refused(self):
        link = self.model.link()
        policy = _native.EvictionPolicy("lru", 2, 3)
        self.model.runner(link, policy=policy)
        with pytest.raises(ValueError, match="policy already belongs"):
            self.model.runner(policy=policy)
        with pytest.raises(ValueError, match="link already belongs"):
            self.model.runner(link)
