"""The link into a GPU's memory, over a driver that works in host memory (``native/tests/fake_cuda.cc``).

Properties that need a real GPU (a driver that behaves as documented, bandwidth) are in ``tests/gpu``.
"""

import errno
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from fake_cuda import VARIABLE, FakeCuda
from places import SUPPORT

from moechat import _native

PAGE = 4096
DEMAND, NEXT, LATER = 0, 1, 2


@pytest.fixture(scope="module")
def driver():
    with pytest.MonkeyPatch.context() as patch:
        cuda = FakeCuda()
        patch.setenv(VARIABLE, str(cuda.path))
        assert _native.cuda_driver_version() == 12080  # opens it, for this process
        yield cuda


@pytest.fixture
def cuda(driver):
    driver.reset()
    yield driver
    driver.reset()


def far_memory(seed, pages=64):
    return np.random.default_rng(seed).integers(0, 256, (pages, PAGE), np.uint8)


class Pinned:
    """Pinned regions, as a context manager."""

    def __init__(self, *arrays):
        self.arrays = arrays

    def __enter__(self):
        for array in self.arrays:
            _native.cuda_pin(array)
        return [(array, array.nbytes, True, "", 0) for array in self.arrays]

    def __exit__(self, *_):
        for array in self.arrays:
            _native.cuda_unpin(array)


def collect(link, count, limit=10.0):
    done = {}
    end = time.monotonic() + limit
    while len(done) < count:
        assert time.monotonic() < end, f"{len(done)} of {count} transfers have finished"
        link.wait(0.1)
        for slot, error in link.poll():
            assert slot not in done
            done[slot] = error
    return done


def slots(*numbers):
    return np.array(numbers, np.uint32)


@pytest.mark.parametrize("batches", [True, False])
def test_a_slower_link_is_played_by_copying_every_block_several_times(cuda, batches):
    cuda.set(no_batches=0 if batches else 1)
    far, near = far_memory(3), cuda.pages(16, PAGE)
    with Pinned(far) as regions:
        link = _native.cuda_link(regions, copies=3)
        link.open(16)
        link.submit([(slot, 0, 2 * slot * PAGE, PAGE, DEMAND) for slot in range(8)], near)
        assert collect(link, 8) == dict.fromkeys(range(8), 0)
        assert np.array_equal(near[:8], far[:16:2])
        assert cuda.get("bytes") == 3 * 8 * PAGE
        assert link.stats()["bytes_demand"] == 8 * PAGE
        assert link.stop(5)
    for copies in (0, 65):
        with pytest.raises(ValueError, match="copies"):
            _native.cuda_link([(far, far.nbytes, False, "", 0)], copies=copies)


def test_blocks_arrive_exactly_in_one_copy_where_they_are_neighbours(cuda):
    first, second = far_memory(1), far_memory(2)
    near = cuda.pages(16, PAGE)
    with Pinned(first, second) as regions:
        link = _native.cuda_link(regions)
        link.open(16)
        assert (link.name(), link.regions(), link.region_bytes(1)) == ("cuda", 2, second.nbytes)
        # Pages 0 to 3 are neighbours on both sides, 8 and 9 on one only.
        wanted = {0: (0, 5), 1: (0, 6), 2: (0, 7), 3: (0, 8), 8: (1, 1), 9: (1, 3)}
        link.submit([(slot, r, p * PAGE, PAGE, DEMAND) for slot, (r, p) in wanted.items()], near)
        assert collect(link, 6) == dict.fromkeys(wanted, 0)
        stats = link.stats()
        assert link.stop(5)
    for slot, (region, page) in wanted.items():
        assert np.array_equal(near[slot], (first, second)[region][page])
    untouched = [slot for slot in range(16) if slot not in wanted]
    assert (near[untouched] == 0xA5).all()
    assert (stats["operations"], stats["bytes_demand"], cuda.get("copies")) == (3, 6 * PAGE, 3)
    assert stats["bandwidth"] > 0


def test_scattered_copies_are_one_call_with_a_driver_that_has_batches(cuda):
    for refused in (0, 1):
        cuda.reset()
        cuda.set(no_batches=refused)
        far, near = far_memory(1, 8), cuda.pages(8, PAGE)
        with Pinned(far) as regions:
            link = _native.cuda_link(regions)
            link.open(8)
            for _ in range(2):
                near[:] = 0
                # Neighbours in the pages and not in the source.
                link.submit([(page, 0, (7 - page) * PAGE, PAGE, DEMAND) for page in range(8)], near)
                assert collect(link, 8) == dict.fromkeys(range(8), 0)
                assert np.array_equal(near, far[::-1])
            assert link.stats()["operations"] == 16
            assert link.stop(5)
        # Batches are tried once with a driver that refuses them.
        assert (cuda.get("batches"), cuda.get("copies")) == (1 if refused else 2, 16)
        cuda.disown(near.ctypes.data)


def test_batch_copies_use_the_signature_of_driver_13(driver):
    code = """
import numpy as np
from fake_cuda import FakeCuda
from moechat import _native
cuda = FakeCuda()
cuda.set(version=13000)
assert _native.cuda_driver_version() == 13000
far, near = np.arange(4 * 4096, dtype=np.uint8).reshape(4, 4096), cuda.pages(4, 4096)
_native.cuda_pin(far)
link = _native.cuda_link([(far, far.nbytes, True, "", 0)])
link.open(4)
link.submit([(page, 0, (3 - page) * 4096, 4096, 0) for page in range(4)], near)
done = []
while len(done) < 4:
    link.wait(0.1)
    done += link.poll()
assert np.array_equal(near, far[::-1]) and not any(error for _, error in done)
assert link.stop(5)
print(int(cuda.get("batches")), int(cuda.get("copies")))
"""
    environment = os.environ | {
        VARIABLE: str(driver.path),
        "PYTHONPATH": str(SUPPORT),
    }
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, "1 4"), done.stderr


def test_a_stream_reads_a_page_after_its_copy_and_a_copy_waits_for_the_reader(cuda):
    """Invariant 1 on a GPU: no wait by the host, thousands of times, with seeded delays on both streams."""
    far = far_memory(3)
    near = cuda.pages(2, PAGE)
    stream = cuda.stream()
    seen = []
    rng = np.random.default_rng(0)
    cuda.set(latency=20e-6, jitter=100e-6, seed=5, piece=512)
    with Pinned(far) as regions:
        link = _native.cuda_link(regions)
        link.open(2)
        handed = 0
        for turn in range(300):
            slot, page = turn % 2, int(rng.integers(0, 64))
            while handed < turn - 1:  # a slot is used again once its completion was handed out
                link.wait(1)
                handed += len(link.poll())
            link.submit([(slot, 0, page * PAGE, PAGE, DEMAND)], near)
            link.fills_first(stream.handle, slots(slot), 20)
            pause = float(rng.random()) * 100e-6

            def read(slot=slot, page=page, pause=pause):
                before = near[slot].copy()
                time.sleep(pause)
                seen.append(bool((before == far[page]).all() and (near[slot] == far[page]).all()))

            stream.run(read)
            link.reads_first(stream.handle, slots(slot))
        assert stream.synchronize() == 0
        assert link.stop(5)
    stream.close()
    assert seen == [True] * 300


def test_demands_start_at_once_and_prefetches_a_few_at_a_time(cuda):
    far = far_memory(4)
    near = cuda.pages(64, PAGE)
    with Pinned(far) as regions:
        link = _native.cuda_link(regions, in_flight_bytes=3 * PAGE)
        link.open(64)
        cuda.set(latency=0.02)
        link.submit([(slot, 0, slot * PAGE, PAGE, NEXT) for slot in range(32)], near)
        assert 32 - link.stats()["queued"] <= 2
        link.submit([(slot, 0, slot * PAGE, PAGE, DEMAND) for slot in range(32, 64)], near)
        end = time.monotonic() + 10
        while link.stats()["queued"] > 32 and time.monotonic() < end:
            time.sleep(1e-4)  # the thread of the link issues what the call has left
        assert link.stats()["queued"] >= 30  # the prefetches that were: no demand waits in the queue
        assert link.cancel(31)
        assert not link.cancel(40)
        link.promote(30, DEMAND)
        cuda.set(latency=0.0)
        done = collect(link, 63)
        assert link.stop(5)
    assert set(done) == set(range(64)) - {31}
    assert set(done.values()) == {0}
    order = list(done)
    assert order.index(40) < order.index(20)
    assert (near[:31] == far[:31]).all()


@pytest.mark.parametrize("source", ["memory", "file"])
def test_unpinned_memory_is_copied_through_pinned_buffers(cuda, source, tmp_path):
    far = far_memory(5)
    near = cuda.pages(64, PAGE)
    path = tmp_path / "layer.bin"
    path.write_bytes(b"x" * 100 + far.tobytes())
    region = (
        (far, far.nbytes, False, str(path), 0)
        if source == "memory"
        else (None, far.nbytes, False, str(path), 100)
    )
    link = _native.cuda_link([region], buffer_bytes=PAGE, buffers=3, threads=2)
    assert link.name() == "cuda (through pinned buffers)"
    link.open(64)
    stream = cuda.stream()
    cuda.set(jitter=200e-6, seed=1)
    link.submit([(slot, 0, slot * PAGE, PAGE, DEMAND) for slot in range(64)], near)
    equal = []
    link.fills_first(stream.handle, np.arange(64, dtype=np.uint32), 20)
    stream.run(lambda: equal.append(bool((near == far).all())))
    assert stream.synchronize() == 0
    assert equal == [True]
    assert set(collect(link, 64).values()) == {0}
    with pytest.raises(ValueError, match="does not fit into a pinned buffer"):
        link.submit([(0, 0, 0, 2 * PAGE, DEMAND)], cuda.pages(1, 2 * PAGE))
    assert link.stop(5)
    stream.close()
    del link
    assert cuda.get("pinned") == 0


def test_a_region_may_lie_in_pinned_chunks_other_memory_and_a_file(cuda, tmp_path):
    far, near = far_memory(11, 32), cuda.pages(32, PAGE)
    path = tmp_path / "layer.bin"
    path.write_bytes(b"x" * 100 + far.tobytes())
    chunks = [far[:8], far[8:12]]  # neighbours that two calls have pinned
    rest = far[12:20].copy()
    for chunk in chunks:
        _native.cuda_pin(chunk)
    parts = [(chunk, chunk.nbytes, True) for chunk in chunks]
    parts += [(rest, rest.nbytes, False), (None, 12 * PAGE, False)]
    with pytest.raises(ValueError, match="has parts of"):
        _native.cuda_link([(parts, far.nbytes + 1, False, str(path), 100)])
    link = _native.cuda_link([(parts, far.nbytes, False, str(path), 100)], buffer_bytes=2 * PAGE, buffers=3)
    link.open(32)
    try:
        # One copy from each chunk, although all of them are neighbours: no copy reaches into another one.
        link.submit([(slot, 0, slot * PAGE, PAGE, DEMAND) for slot in range(32)], near)
        assert collect(link, 32) == dict.fromkeys(range(32), 0)
        assert np.array_equal(near, far)
        assert link.stats()["operations"] == 2 + 20
        # Transfers that reach from one part into the next.
        pairs = near.reshape(16, 2 * PAGE)
        for page in (7, 11, 19, 3):
            pairs[0] = 0
            link.submit([(0, 0, page * PAGE, 2 * PAGE, NEXT)], pairs)
            assert collect(link, 1) == {0: 0}
            assert np.array_equal(pairs[0], far[page : page + 2].reshape(-1))
    finally:
        assert link.stop(5)
        for chunk in chunks:
            _native.cuda_unpin(chunk)


def test_the_ring_gets_smaller_where_the_system_does_not_pin_all_of_it(cuda):
    far, near = far_memory(12, 16), cuda.pages(16, PAGE)
    cuda.set(pin_limit=3 * PAGE)
    link = _native.cuda_link([(far, far.nbytes, False, "", 0)], buffer_bytes=PAGE, buffers=16)
    assert cuda.get("pinned") == 2 * PAGE
    link.open(16)
    link.submit([(slot, 0, slot * PAGE, PAGE, NEXT) for slot in range(16)], near)
    assert collect(link, 16) == dict.fromkeys(range(16), 0)
    assert np.array_equal(near, far)
    assert link.stop(5)
    del link
    cuda.set(pin_limit=PAGE - 1)
    with pytest.raises(_native.CudaError, match="cuMemHostRegister"):
        _native.cuda_link([(far, far.nbytes, False, "", 0)], buffer_bytes=PAGE)


def test_demands_are_staged_before_prefetches_that_have_not_been_read(cuda):
    far, near = far_memory(13, 40), cuda.pages(40, PAGE)
    link = _native.cuda_link(
        [(far, far.nbytes, False, "", 0)], buffer_bytes=PAGE, buffers=1, threads=1, in_flight_bytes=60 * PAGE
    )
    link.open(40)
    cuda.set(gate=0)
    link.submit([(slot, 0, slot * PAGE, PAGE, NEXT) for slot in range(20)], near)
    link.submit([(slot, 0, slot * PAGE, PAGE, DEMAND) for slot in range(30, 33)], near)
    cuda.set(gate=-1)
    order = list(collect(link, 23))
    assert link.stop(5)
    # The buffer may have been taken for a prefetch already.
    assert set(order[:4]) >= {30, 31, 32}


def test_a_file_that_ends_early_fails_its_blocks_alone(cuda, tmp_path):
    far = far_memory(6)
    near = cuda.pages(4, PAGE)
    path = tmp_path / "layer.bin"
    path.write_bytes(far.tobytes())
    link = _native.cuda_link([(None, far.nbytes, False, str(path), 0)], buffer_bytes=PAGE)
    link.open(4)
    with path.open("r+b") as file:
        file.truncate(2 * PAGE)
    link.submit([(0, 0, 0, PAGE, DEMAND), (1, 0, 5 * PAGE, PAGE, DEMAND)], near)
    assert collect(link, 2) == {0: 0, 1: errno.ENODATA}
    assert link.failure() == ""
    assert (near[0] == far[0]).all()
    assert (near[1] == 0xA5).all()
    assert link.stop(5)


def test_records_read_from_a_file_are_compared_with_their_checksums_and_fail_alone(cuda, tmp_path):
    far = far_memory(8, 16)
    near = cuda.pages(16, PAGE)
    path = tmp_path / "layer.bin"
    path.write_bytes(far.tobytes())
    # The first half lies in memory, which was compared when it was read, and is not read again.
    held = far[:8].copy()
    regions = [([(held, held.nbytes, False), (None, 8 * PAGE, False)], far.nbytes, False, str(path), 0)]
    sums = _native.record_checksums(far, PAGE)
    link = _native.cuda_link(regions, buffer_bytes=PAGE, checksums=[sums], record_bytes=PAGE)
    link.open(16)
    with path.open("r+b") as file:
        for page in (3, 9, 12):
            file.seek(page * PAGE + 7)
            file.write(bytes([far[page, 7] ^ 1]))
    link.submit([(slot, 0, slot * PAGE, PAGE, DEMAND) for slot in range(16)], near)
    damaged = {9, 12}
    assert collect(link, 16) == {slot: errno.EBADMSG if slot in damaged else 0 for slot in range(16)}
    assert link.failure() == ""
    whole = [slot for slot in range(16) if slot not in damaged]
    assert np.array_equal(near[whole], far[whole])
    with pytest.raises(ValueError, match="not whole records"):
        link.submit([(0, 0, 100, PAGE, DEMAND)], near)
    with pytest.raises(ValueError, match="checksums"):
        _native.cuda_link(regions, buffer_bytes=PAGE, checksums=[sums[1:]], record_bytes=PAGE)
    assert link.stop(5)


def test_an_error_of_the_gpu_ends_the_link_with_its_name(cuda):
    far = far_memory(7)
    near = cuda.pages(8, PAGE)
    stream = cuda.stream()
    with Pinned(far) as regions:
        link = _native.cuda_link(regions)
        link.open(8)
        cuda.set(fail_after=2)
        # Neighbours in the pages and not in the source: eight copies.
        link.submit([(slot, 0, (7 - slot) * PAGE, PAGE, DEMAND) for slot in range(8)], near)
        assert set(collect(link, 8).values()) == {errno.EIO}
        assert "CUDA_ERROR_ILLEGAL_ADDRESS (700)" in link.failure()
        with pytest.raises(RuntimeError, match="the link has failed"):
            link.submit([(0, 0, 0, PAGE, DEMAND)], near)
        with pytest.raises(RuntimeError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
            link.fills_first(stream.handle, slots(0), 20)
        assert link.stop(5)
        cuda.reset()
    stream.close()


def test_waiting_for_a_fill_ends_when_the_link_stops(cuda):
    far = far_memory(8)
    near = cuda.pages(32, PAGE)
    stream = cuda.stream()
    with Pinned(far) as regions:
        link = _native.cuda_link(regions, in_flight_bytes=PAGE)
        link.open(32)
        cuda.set(latency=0.3)
        link.submit([(slot, 0, slot * PAGE, PAGE, LATER) for slot in range(32)], near)
        raised = []

        def wait():
            try:
                link.fills_first(stream.handle, slots(31), 20)  # queued behind all others
            except RuntimeError as error:
                raised.append(str(error))

        assert not link.fills_first(stream.handle, slots(31), 0.01)
        waiter = threading.Thread(target=wait)
        waiter.start()
        time.sleep(0.05)
        assert link.stop(5)
        waiter.join(5)
        assert raised == ["the link was stopped"]
    stream.close()


def test_memory_that_cannot_be_pinned_is_refused_with_the_drivers_message(cuda):
    far = far_memory(9)
    cuda.set(pin_limit=PAGE)
    with pytest.raises(
        _native.CudaError, match=r"cuMemHostRegister: CUDA_ERROR_OUT_OF_MEMORY \(2\)"
    ) as caught:
        _native.cuda_pin(far)
    assert (caught.value.code, caught.value.sticky) == (2, False)
    assert cuda.get("pinned") == 0


def test_impossible_regions_and_options_are_refused(cuda, tmp_path):
    far = far_memory(10)
    short = tmp_path / "short.bin"
    short.write_bytes(b"x" * PAGE)
    with pytest.raises(ValueError, match="neither memory nor a file"):
        _native.cuda_link([(None, PAGE, False, "", 0)])
    with pytest.raises(ValueError, match="is an array of"):
        _native.cuda_link([(far, PAGE, True, "", 0)])
    with pytest.raises(ValueError, match="a region ends at byte 8192"):
        _native.cuda_link([(None, PAGE, False, str(short), PAGE)])
    with pytest.raises(FileNotFoundError):
        _native.cuda_link([(None, PAGE, False, str(tmp_path / "none"), 0)])
    with pytest.raises(ValueError, match="threads is 65"):
        _native.cuda_link([(far, far.nbytes, False, "", 0)], threads=65)
    with pytest.raises(_native.CudaUnavailableError, match="there is no GPU 3: the driver knows 1"):
        _native.cuda_link([(far, far.nbytes, True, "", 0)], device=3)
    # No memory stays pinned.
    assert (cuda.get("pinned"), cuda.get("events")) == (0, 0)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_pinned_memory_is_not_copied_for_children(cuda):
    far = _native.huge_empty(8 << 20)
    far[:] = 7

    def in_child():
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGSEGV, signal.SIG_DFL)
            os._exit(0 if int(far[4 << 20]) == 7 else 1)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    assert in_child() == 0
    _native.cuda_pin(far)
    assert in_child() == -signal.SIGSEGV, "it is not there"
    _native.cuda_unpin(far)
    assert in_child() == 0


def test_gpu_memory_is_reported(cuda):
    cuda.set(vram=6e9)
    assert _native.cuda_memory() == (6_000_000_000, 6_000_000_000)


@pytest.mark.parametrize(
    ("library", "message"),
    [
        ("/nowhere/libcuda.so.1", "no NVIDIA driver can be opened"),
        ("libm.so.6", "the NVIDIA driver has no cuInit"),
    ],
)
def test_a_missing_driver_is_reported_with_the_reason(library, message):
    code = (
        "from moechat import _native\n"
        "for _ in range(2):\n"
        "    try:\n        _native.cuda_driver_version()\n"
        "    except _native.CudaUnavailableError as error:\n        print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PATH": "/usr/bin", VARIABLE: library},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    first, second = done.stdout.splitlines()
    assert first == second
    assert message in first
