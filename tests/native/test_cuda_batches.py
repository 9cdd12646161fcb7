"""Batches of the link into a GPU's memory: how much is on the stream while there is work, and how calls
behave while the driver is busy. Over the stand-in driver, whose copies begin when a test lets them.
"""

import threading
import time

import numpy as np
import pytest
from fake_cuda import VARIABLE, FakeCuda

from moechat import _native

PAGE = 4096
DEMAND, NEXT, LATER = 0, 1, 2
# Blocks of 221 KB, 442 KB and 3 MB in a window of 12 MiB.
WINDOWS = pytest.mark.parametrize("window", [57 * PAGE, 28 * PAGE, 4 * PAGE], ids=["221K", "442K", "3M"])


@pytest.fixture(scope="module")
def driver():
    with pytest.MonkeyPatch.context() as patch:
        cuda = FakeCuda()
        patch.setenv(VARIABLE, str(cuda.path))
        assert _native.cuda_driver_version() == 12080
        yield cuda


@pytest.fixture
def cuda(driver):
    driver.reset()
    yield driver
    driver.reset()


class Link:
    """An open link over pinned memory, and the pages that it fills."""

    def __init__(self, cuda, slots, **options):
        self.far = np.random.default_rng(slots).integers(0, 256, (slots, PAGE), np.uint8)
        self.near = cuda.pages(slots, PAGE)
        self.cuda = cuda
        _native.cuda_pin(self.far)
        self.link = _native.cuda_link([(self.far, self.far.nbytes, True, "", 0)], **options)
        self.link.open(slots)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.cuda.set(gate=-1, call=0, latency=0)
        assert self.link.stop(5)
        _native.cuda_unpin(self.far)
        self.cuda.disown(self.near.ctypes.data)

    def submit(self, slots, priority):
        # In descending order: neighbours are not, so each is a copy of its own.
        self.link.submit([(slot, 0, slot * PAGE, PAGE, priority) for slot in sorted(slots)[::-1]], self.near)

    def stopped(self, copies):
        """So many copies were made, with all that follows them in the stream."""
        return self.cuda.get("copies") == copies and (
            self.cuda.get("held") == 1 or self.cuda.get("groups_now") == 0
        )

    def is_full(self):
        return self.cuda.get("groups_now") >= 2 or self.link.stats()["queued"] == 0

    def wait_until(self, condition, seconds=10.0):
        """Waits without a call of the link, which would do the work of its thread."""
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end
            time.sleep(1e-4)


@WINDOWS
@pytest.mark.parametrize("priority", [DEMAND, NEXT, LATER])
def test_two_batches_are_under_way_while_there_is_work_and_none_exceeds_a_quarter(cuda, window, priority):
    cuda.set(gate=0)
    with Link(cuda, 40, in_flight_bytes=window) as one:
        one.submit(range(40), priority)
        assert cuda.get("groups_now") >= 2
        drained = False
        for allowed in range(1, 41):
            if not drained and one.link.stats()["queued"] == 0:
                drained = True
                time.sleep(0.05)  # what has left the queue reaches the driver a moment later
            cuda.set(gate=allowed)
            # The thread of the link fills up what a batch has left, before the stream has run empty.
            one.wait_until(lambda allowed=allowed: one.stopped(allowed) and one.is_full())
        one.wait_until(lambda: cuda.get("groups_now") == 0)
        assert cuda.get("emptied") == 1, "the stream ran empty while transfers were queued"
        assert cuda.get("largest_group") <= max(window / 4, PAGE)
        one.wait_until(lambda: len(one.link.poll()) > 0)
        assert (one.near == one.far).all()


@WINDOWS
def test_a_demand_waits_for_no_more_prefetches_than_a_third_of_the_window(cuda, window):
    cuda.set(gate=0)
    with Link(cuda, 50, in_flight_bytes=window) as one:
        one.submit(range(46), NEXT)
        one.submit(range(46, 50), DEMAND)
        moved = max(window // 3, min(window, 2 * PAGE)) // PAGE
        cuda.set(gate=moved + 4)
        done = set()
        one.wait_until(lambda: done.update(slot for slot, _ in one.link.poll()) or done >= set(range(46, 50)))
        assert len(done) <= moved + 4
        cuda.set(gate=-1)


def test_a_block_larger_than_a_quarter_is_a_batch_by_itself(cuda):
    cuda.set(gate=0)
    with Link(cuda, 6, in_flight_bytes=2 * PAGE) as one:
        one.submit(range(6), DEMAND)
        # What has left the queue reaches the driver a moment later.
        one.wait_until(lambda: one.link.stats()["queued"] == 0 and cuda.get("groups") >= 6)
        assert (cuda.get("groups"), cuda.get("largest_group")) == (6, PAGE)


def test_a_caller_issues_two_batches_and_the_thread_of_the_link_the_others(cuda):
    with Link(cuda, 40, in_flight_bytes=8 * PAGE) as one:
        cuda.set(gate=0, call=0.02)
        begun = time.monotonic()
        one.submit(range(40), DEMAND)
        assert 0.04 <= time.monotonic() - begun < 0.2
        one.wait_until(lambda: cuda.get("groups") == 20)
        assert (one.link.stats()["queued"], cuda.get("most_groups")) == (0, 20)


def test_no_call_waits_while_another_thread_is_in_the_driver(cuda):
    """A call of the driver blocks when its queue is full, or while another thread allocates memory."""
    with Link(cuda, 8) as one:
        cuda.set(call=0.5)
        issuer = threading.Thread(target=lambda: one.submit(range(4), DEMAND))
        issuer.start()
        one.wait_until(lambda: one.link.stats()["in_flight"] > 0)
        begun = time.monotonic()
        one.submit(range(4, 8), DEMAND)
        assert one.link.poll() == []
        assert not one.link.cancel(0)
        one.link.promote(5, DEMAND)
        assert one.link.stats()["queued"] == 4
        assert time.monotonic() - begun < 0.25
        stream = cuda.stream()
        # What the other thread left is issued by the first one; this waits for it.
        assert not one.link.fills_first(stream.handle, np.arange(8, dtype=np.uint32), 0.01)
        cuda.set(call=0)
        assert one.link.fills_first(stream.handle, np.arange(8, dtype=np.uint32), 20)
        right = []
        stream.run(lambda: right.append(bool((one.near == one.far).all())))
        assert stream.synchronize() == 0
        assert right == [True]
        issuer.join()
        stream.close()
