"""The expert runner with pages in a GPU's memory: launches, their time, and their order on the GPU."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from launch_lists import read_items, read_launch

from moechat import _native

LAYERS, EXPERTS = 3, 6
LAYOUT = _native.BlockLayout(64, 5 * 64, 4)
BLOCKS, PAGE = LAYOUT.blocks, LAYOUT.record_bytes


@pytest.fixture(scope="module")
def far():
    rng = np.random.default_rng(1)
    return [rng.integers(0, 256, (EXPERTS, BLOCKS, PAGE), np.uint8) for _ in range(LAYERS)]


class Tier:
    """A runner over pages of the GPU, with its two streams."""

    def __init__(self, cuda, far, pages, *, link="cuda", policy="lru", whole=False, **options):
        self.cuda, self.far, self.kind = cuda, far, link
        self.near = cuda.pages(pages, PAGE)
        self.stream = cuda.stream()
        self.seen = []  # of every launch: whether all its pages held their blocks
        self.launched = []  # (row, block) of the layer at work
        if link == "cuda":
            for layer in far:
                _native.cuda_pin(layer.reshape(-1))
            made = _native.cuda_link([(layer, layer.nbytes, True, "", 0) for layer in far], **options)
        elif link == "cuda-staged":
            regions = [(layer, layer.nbytes, False, "", 0) for layer in far]
            made = _native.cuda_link(regions, buffer_bytes=PAGE, buffers=2, **options)
        else:
            made = _native.sim_link([layer.reshape(-1) for layer in far], **options)
        target = max(0, (pages - 2) // LAYERS // BLOCKS)
        self.runner = _native.ExpertRunner(
            LAYOUT, _native.Gate(),
            layers=LAYERS, experts=EXPERTS, pages=pages,
            targets=np.array([[target, BLOCKS if target else 1]] * LAYERS, np.int32),
            reserve=1, policy=_native.EvictionPolicy(policy, LAYERS, EXPERTS), link=made,
            whole_experts=whole, top_k=2, near_memory=self.near.ctypes.data,
        )  # fmt: skip

    def close(self):
        self.stream.synchronize()
        self.runner.close()
        self.stream.close()
        if self.kind == "cuda":
            for layer in self.far:
                _native.cuda_unpin(layer.reshape(-1))
        self.cuda.disown(self.near.ctypes.data)

    def layer(self, layer, index, *, work=1 << 20, pause=0.0, fail=False):
        """Runs one layer; returns what was launched, as (expert, block), in order."""
        tokens = len(index)
        self.runner.begin(layer, np.ascontiguousarray(index, np.int64), np.ones(index.shape, np.float32))
        if layer + 1 < LAYERS and tokens == 1:
            self.runner.prefetch(layer + 1, np.arange(EXPERTS, dtype=np.float32), 2, None)
        experts, start, token, weight = self.runner.rows()
        lists = np.zeros(4096, np.int32)
        written = self.runner.item_lists(lists)
        row_item, item_token, item_weight, table = read_items(lists, written, tokens)
        assert np.array_equal(row_item, start)
        assert np.array_equal(item_token, token)
        assert np.array_equal(item_weight, weight)
        for number, items in enumerate(table):
            own = np.flatnonzero(token == number)
            assert items.tolist() == [*own, *[-1] * (table.shape[1] - len(own))]
        launched = []

        def launch(begin, end, entries, rows, slots):
            assert rows == len(experts)
            found = read_launch(lists, begin, end, entries, rows)
            page, row_entry, row_block = found.page, found.row_entry, found.row_block
            assert np.array_equal(found.row, np.repeat(np.arange(rows), np.diff(row_entry)))
            of_entry = np.diff(start)[found.row]
            assert np.array_equal(found.slot, np.cumsum(of_entry) - of_entry)
            assert slots == of_entry.sum()
            expected = []
            for row, expert in enumerate(experts):
                for place, entry in enumerate(range(row_entry[row], row_entry[row + 1])):
                    block = row_block[row] + place
                    launched.append((int(expert), int(block)))
                    expected.append((int(page[entry]), int(expert), int(block)))
            pairs = sum(
                int(start[row + 1] - start[row]) * int(row_entry[row + 1] - row_entry[row])
                for row in range(len(experts))
            )
            self.pairs.append(pairs)

            def kernel():
                def right():
                    return all((self.near[p] == self.far[layer][e, b]).all() for p, e, b in expected)

                first = right()
                time.sleep(pause)
                self.seen.append(first and right())

            if self.kind.startswith("cuda"):
                self.stream.run(kernel)
            else:
                kernel()
            if fail:
                raise ValueError("the launch failed")
            return end if end < 2048 else written[0]

        self.pairs = []
        walked = self.runner.finish_on_device(self.stream.handle, tokens, work, lists, written[0], launch)
        assert walked == len(launched) * PAGE
        return launched


def check_complete(launched, index):
    wanted = sorted({int(expert) for expert in np.unique(index)})
    assert sorted(launched) == [(expert, block) for expert in wanted for block in range(BLOCKS)]
    for expert in wanted:
        own = [block for other, block in launched if other == expert]
        assert own == sorted(own)


@pytest.mark.parametrize("link", ["cuda", "cuda-staged", "sim"])
@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    pages=st.sampled_from([2, 3, 5, 8, 12, 20, 40, 95]),
    policy=st.sampled_from(["lru", "lcp"]),
    whole=st.booleans(),
    work=st.sampled_from([1, 7, 1 << 20]),
    delays=st.booleans(),
)
def test_every_block_is_launched_once_in_order_and_lies_in_its_page(
    cuda, far, link, seed, pages, policy, whole, work, delays
):
    rng = np.random.default_rng(seed)
    cuda.reset()
    if delays:
        cuda.set(jitter=100e-6, seed=seed, piece=1024)
    options = {"jitter": 50e-6, "seed": seed} if link == "sim" and delays else {}
    tier = Tier(cuda, far, pages, link=link, policy=policy, whole=whole, **options)
    try:
        for _ in range(6):
            tokens = int(rng.choice([1, 1, 1, 4]))
            for layer in range(LAYERS):
                index = np.stack([rng.permutation(EXPERTS)[:2] for _ in range(tokens)])
                pause = float(rng.random()) * 100e-6 if delays else 0.0
                check_complete(tier.layer(layer, index, work=work, pause=pause), index)
        tier.stream.synchronize()
        tier.runner.drain()
        assert tier.runner.check() == ""
        assert tier.seen
        assert all(tier.seen)
    finally:
        tier.close()


def test_resident_blocks_are_launched_before_those_on_their_way(cuda, far):
    cuda.reset()
    tier = Tier(cuda, far, 60)
    try:
        tier.layer(0, np.array([[1, 2]]))
        tier.runner.drain()
        cuda.set(latency=0.2)
        begun = time.monotonic()
        launched = tier.layer(0, np.array([[0, 1]]))
        # The host has not waited for the copies of expert 0; the GPU does.
        assert time.monotonic() - begun < 0.2
        assert launched == [(1, block) for block in range(BLOCKS)] + [(0, block) for block in range(BLOCKS)]
        assert tier.stream.synchronize() == 0
        assert all(tier.seen)
    finally:
        tier.close()


def test_a_call_gets_no_more_work_than_it_has_memory_for(cuda, far):
    cuda.reset()
    tier = Tier(cuda, far, 60)
    try:
        index = np.array([[0, 1], [0, 2], [0, 3], [0, 4]])
        check_complete(tier.layer(1, index, work=6), index)
        assert max(tier.pairs) <= 6 + 1  # a row of one token may be the last to go in
        assert len(tier.pairs) >= BLOCKS * 8 // 7
    finally:
        tier.close()


def test_a_failing_launch_drops_the_layer_and_its_pages_stay_safe(cuda, far):
    cuda.reset()
    cuda.set(jitter=100e-6)
    tier = Tier(cuda, far, 12)
    try:
        with pytest.raises(ValueError, match="the launch failed"):
            tier.layer(0, np.array([[0, 1]]), pause=2e-3, fail=True)
        for _ in range(3):
            for layer in range(LAYERS):
                check_complete(tier.layer(layer, np.array([[4, 5]])), np.array([[4, 5]]))
        tier.stream.synchronize()
        assert all(tier.seen)
        tier.runner.drain()
        assert tier.runner.check() == ""
    finally:
        tier.close()


def test_a_gpu_error_is_raised_by_the_first_layer_that_meets_it(cuda, far):
    cuda.reset()
    tier = Tier(cuda, far, 12)
    try:
        cuda.set(fail_after=3)

        def run():
            for _ in range(20):
                tier.layer(0, np.array([[0, 1]]))
                tier.layer(1, np.array([[2, 3]]))

        with pytest.raises(_native.DeviceLostError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
            run()
    finally:
        cuda.reset()
        tier.close()


def test_pages_of_a_device_are_not_computed_by_the_cpu(cuda, far):
    cuda.reset()
    tier = Tier(cuda, far, 12)
    try:
        tier.runner.begin(0, np.array([[0, 1]]), np.ones((1, 2), np.float32))
        x = np.zeros((1, 64), np.float32)
        with pytest.raises(RuntimeError, match="memory of a device"):
            tier.runner.finish(x, np.zeros_like(x))
        lists = np.zeros(64, np.int32)
        with pytest.raises(ValueError, match="work is 0"):
            tier.runner.finish_on_device(0, 1, 0, lists, 0, print)
        with pytest.raises(ValueError, match="do not fit into 3"):
            tier.runner.item_lists(lists[:3])
        with pytest.raises(ValueError, match="cannot begin at 65"):
            tier.runner.finish_on_device(tier.stream.handle, 1, 10, lists, 65, print)
        tier.runner.begin(0, np.array([[0, 1]]), np.ones((1, 2), np.float32))
        with pytest.raises(ValueError, match="lists of 44 elements do not fit into 4"):
            tier.runner.finish_on_device(tier.stream.handle, 1, 10, lists, 60, print)
        for call in (tier.runner.rows, lambda: tier.runner.item_lists(lists)):
            with pytest.raises(RuntimeError, match="no layer has begun"):
                call()
        assert (tier.runner.huge_bytes, tier.runner.resident_bytes) == (0, 0)
    finally:
        tier.close()
