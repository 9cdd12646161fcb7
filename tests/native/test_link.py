"""Links: real files and simulated ones. Stress and races: ``native/tests/link_test.cc``."""

import errno
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from moechat import _native

PAGE = 4096
PAGES = 64
DEMAND, NEXT, LATER = 0, 1, 2

U8 = npt.NDArray[np.uint8]


def far_pages(seed: int) -> U8:
    """Random bytes, [PAGES, PAGE]."""
    return np.random.default_rng(seed).integers(0, 256, (PAGES, PAGE), np.uint8)


def target_pages(slots: int) -> U8:
    """Zeroed pages, [slots, PAGE], at an address that direct reads take."""
    raw = np.zeros((slots + 1) * PAGE, np.uint8)
    start = -raw.ctypes.data % PAGE
    return raw[start : start + slots * PAGE].reshape(slots, PAGE)


def collect(link: _native.Link, count: int, limit: float = 10.0) -> dict[int, int]:
    """Slot -> error of the next ``count`` completions."""
    done: dict[int, int] = {}
    end = time.monotonic() + limit
    while len(done) < count:
        assert time.monotonic() < end, f"{len(done)} of {count} transfers have finished"
        link.wait(0.1)
        for slot, error in link.poll():
            assert slot not in done
            done[slot] = error
    return done


def page(slot: int, far: int, priority: int = DEMAND, region: int = 0) -> tuple[int, int, int, int, int]:
    return slot, region, far * PAGE, PAGE, priority


def make_file_link(regions: list[tuple[str, int, int]], io: str, *, direct: bool = True) -> _native.Link:
    try:
        return _native.file_link(regions, io=io, direct=direct)
    except OSError as error:
        if io == "uring" and error.filename == "io_uring":
            pytest.skip(f"io_uring is not to be had: {error.strerror}")
        raise


@pytest.fixture(params=["disk", "tmpfs"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    if request.param == "disk":
        yield tmp_path
        return
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        pytest.skip("no tmpfs to write to")
    with tempfile.TemporaryDirectory(prefix="moechat-test-", dir=memory) as path:
        yield Path(path)


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("io", ["auto", "uring", "threads"])
def test_files_arrive_exactly(folder: Path, io: str, direct: bool) -> None:
    first, second = far_pages(1), far_pages(2)
    path = folder / "layer.bin"
    path.write_bytes(first.tobytes() + second.tobytes())
    link = make_file_link(
        [(str(path), 0, first.size), (str(path), first.size, second.size)], io, direct=direct
    )
    assert link.name().startswith("file")
    assert link.regions() == 2
    assert link.region_bytes(1) == second.size
    assert link.describe(1, PAGE) == f"{path} at byte {first.size + PAGE}"
    target = target_pages(2 * PAGES)
    link.open(2 * PAGES)
    order = np.random.default_rng(3).permutation(PAGES)
    link.submit([page(slot, int(far), slot % 3, 0) for slot, far in enumerate(order)], target)
    link.submit([page(PAGES + far, far, NEXT, 1) for far in range(PAGES)], target)
    assert set(collect(link, 2 * PAGES).values()) == {0}
    assert np.array_equal(target[:PAGES], first[order])
    assert np.array_equal(target[PAGES:], second)
    stats = link.stats()
    moved = stats["bytes_demand"] + stats["bytes_next"] + stats["bytes_later"]
    assert moved == 2 * PAGES * PAGE
    assert stats["operations"] < 2 * PAGES  # neighbours were read together
    assert stats["bandwidth"] > 0
    assert stats["queued"] == stats["in_flight"] == stats["errors"] == 0
    assert link.stop(1.0)


@pytest.mark.parametrize("io", ["uring", "threads"])
def test_a_file_cut_short_is_an_error_of_its_transfers(tmp_path: Path, io: str) -> None:
    data = far_pages(1)
    path = tmp_path / "layer.bin"
    path.write_bytes(data.tobytes())
    link = make_file_link([(str(path), 0, data.size)], io)
    os.truncate(path, 3 * PAGE + 100)
    target = target_pages(6)
    link.open(6)
    link.submit([page(slot, slot) for slot in range(6)], target)
    assert collect(link, 6) == {0: 0, 1: 0, 2: 0, 3: errno.ENODATA, 4: errno.ENODATA, 5: errno.ENODATA}
    assert np.array_equal(target[:3], data[:3])
    assert link.failure() == ""
    link.submit([page(0, 2)], target)  # the link goes on
    assert collect(link, 1) == {0: 0}


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    path = str(tmp_path / "layer.bin")
    with pytest.raises(FileNotFoundError) as caught:
        _native.file_link([(path, 0, PAGE)])
    assert caught.value.filename == path
    assert caught.value.errno == errno.ENOENT
    with pytest.raises(IsADirectoryError):
        _native.file_link([(str(tmp_path), 0, PAGE)])


def test_impossible_file_links_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "layer.bin"
    path.write_bytes(bytes(2 * PAGE))
    for offset, size in [(1, PAGE), (0, 100), (-PAGE, PAGE), (0, 0)]:
        with pytest.raises(ValueError, match=r"layer\.bin: both must be multiples of 4096"):
            _native.file_link([(str(path), offset, size)])
    with pytest.raises(ValueError, match=r"layer\.bin: the file has 8192 bytes"):
        _native.file_link([(str(path), PAGE, 2 * PAGE)])
    good = [(str(path), 0, PAGE)]
    with pytest.raises(ValueError, match="'auto', 'uring' or 'threads'"):
        _native.file_link(good, io="aio")
    for option in ("in_flight_bytes", "operation_bytes", "reader_threads"):
        with pytest.raises(ValueError, match=f"{option} is -1"):
            _native.file_link(good, **{option: -1})


def test_impossible_transfers_are_refused_and_nothing_is_queued() -> None:
    link = _native.sim_link([far_pages(1)])
    target = target_pages(4)
    link.open(4)
    with pytest.raises(RuntimeError, match="open already"):
        link.open(4)
    good = page(0, 0)
    for bad, why in [
        (page(0, 1), "has a transfer already"),
        (page(4, 1), "target has 4 pages"),
        (page(1, 1, region=1), "there are 1 regions"),
        (page(1, PAGES), "the region has"),
        ((1, 0, 0, 2 * PAGE, DEMAND), "but a page has 4096"),
        (page(1, 1, priority=3), "priority is 3"),
    ]:
        with pytest.raises(ValueError, match=why):
            link.submit([good, bad], target)
    assert link.stats()["queued"] == 0
    assert not link.wait(0.0)
    for region in (-1, 1):
        with pytest.raises(IndexError, match=f"region {region} of a link with 1"):
            link.region_bytes(region)
        with pytest.raises(IndexError, match=f"region {region} of a link with 1"):
            link.describe(region, 0)
    frozen = target_pages(4)
    frozen.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        link.submit([good], frozen)


def test_priorities_cancel_and_promote() -> None:
    data = far_pages(1)
    link = _native.sim_link([data], latency=0.02, in_flight_bytes=PAGE)
    target = target_pages(8)
    link.open(8)
    link.submit([page(slot, slot, LATER) for slot in range(4)], target)
    link.submit([page(4, 4, NEXT), page(5, 5, DEMAND)], target)
    assert not link.cancel(0)  # on its way
    assert link.cancel(1)
    link.promote(3, NEXT)
    order: list[int] = []
    while len(order) < 5:
        assert link.wait(5.0)
        order += [slot for slot, error in link.poll() if error == 0]
    assert order == [0, 5, 4, 3, 2]
    assert np.array_equal(target[2:6], data[2:6])
    assert not target[1].any()
    assert link.stats()["cancelled"] == 1


def test_wait_honours_its_limit() -> None:
    link = _native.sim_link([far_pages(1)], stall_after=0)
    target = target_pages(1)
    link.open(1)
    link.submit([page(0, 0)], target)
    start = time.monotonic()
    assert not link.wait(0.05)
    assert 0.04 < time.monotonic() - start < 2.0
    assert link.stop(5.0)
    assert collect(link, 1) == {0: errno.ECANCELED}
    assert not link.wait(60.0)  # a stopped link does not wait
    with pytest.raises(RuntimeError, match="stopped"):
        link.submit([page(0, 0)], target)
    with pytest.raises(ValueError, match="must not be negative"):
        link.wait(-1.0)


def test_simulated_faults() -> None:
    data = far_pages(1)
    target = target_pages(PAGES)
    transfers = [page(slot, slot) for slot in range(PAGES)]

    link = _native.sim_link([data], fault_rate=0.5, seed=1)
    link.open(PAGES)
    link.submit(transfers, target)
    done = collect(link, PAGES)
    assert set(done.values()) == {0, errno.EIO}
    for slot, error in done.items():
        assert np.array_equal(target[slot], data[slot]) == (error == 0)
    assert link.failure() == ""

    link = _native.sim_link([data], fail_after=5)
    link.open(PAGES)
    link.submit(transfers, target)
    done = collect(link, PAGES)
    assert sorted(done.values()) == [0] * 5 + [errno.EIO] * (PAGES - 5)
    assert "failed after 5 transfers" in link.failure()
    with pytest.raises(RuntimeError, match="failed after 5 transfers"):
        link.submit([page(0, 0)], target)


def test_a_simulated_link_has_the_requested_speed() -> None:
    data = far_pages(1)
    link = _native.sim_link([data], bandwidth=4e6, copy=False)
    target = target_pages(PAGES)
    link.open(PAGES)
    start = time.monotonic()
    link.submit([page(slot, slot) for slot in range(PAGES)], target)
    collect(link, PAGES)
    assert time.monotonic() - start > data.size / 4e6
    assert not target.any()
    assert link.stats()["bandwidth"] == pytest.approx(4e6, rel=0.6)


def test_impossible_simulations_are_refused() -> None:
    data = far_pages(1)
    for options in (
        {"bandwidth": -1.0},
        {"latency": -0.1},
        {"jitter": float("nan")},
        {"reorder": 0},
        {"fault_rate": 2.0},
        {"in_flight_bytes": -1},
    ):
        with pytest.raises(ValueError, match=next(iter(options))):
            _native.sim_link([data], **options)
    with pytest.raises(ValueError, match="C-contiguous"):
        _native.sim_link([data[:, ::2]])
    with pytest.raises(ValueError, match="dtype"):
        _native.sim_link([data.astype(np.int32)])


def test_memory_lives_as_long_as_the_link() -> None:
    link = _native.sim_link([far_pages(1)], latency=0.05)
    expected = far_pages(1)
    target = target_pages(1)
    link.open(1)
    view = target[:]
    link.submit([page(0, 7)], view)
    del view
    assert collect(link, 1) == {0: 0}
    assert np.array_equal(target[0], expected[7])
    link.submit([page(0, 8)], target_pages(1))
    del link  # waits for what is on its way
