"""Checksums of records: CRC-32C in every way, records that rot under a link, reads that went wrong once."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from preloaded_shim import built_shim

from moechat import _native

PAGE = 4096
RECORDS = 24
RECORD = 3 * PAGE
U8 = npt.NDArray[np.uint8]

# RFC 3720, B.4, and the check value of the polynomial.
KNOWN = {
    b"": 0,
    b"123456789": 0xE3069283,
    bytes(32): 0x8A9136AA,
    b"\xff" * 32: 0x62A8AB43,
    bytes(range(32)): 0x46DD794E,
    bytes(range(31, -1, -1)): 0x113FDB5C,
}


def as_array(data: bytes) -> U8:
    return np.frombuffer(data, np.uint8)


def bit_by_bit(data: bytes) -> int:
    """CRC-32C from its definition."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def test_this_processor_computes_checksums_in_hardware() -> None:
    flags = set(Path("/proc/cpuinfo").read_text().split())
    expected = ["portable"]
    if "sse4_2" in flags:
        expected.append("sse4.2")
        if {"avx512f", "vpclmulqdq"} <= flags:
            expected.append("avx512")
    assert _native.crc32c_ways() == expected
    with pytest.raises(ValueError, match="'abacus'"):
        _native.crc32c(as_array(b"x"), way="abacus")


@pytest.mark.parametrize("way", _native.crc32c_ways())
def test_known_checksums(way: str) -> None:
    for data, value in KNOWN.items():
        assert _native.crc32c(as_array(data), way=way) == value


@settings(max_examples=150)
@given(data=st.binary(max_size=300), cut=st.integers(0, 300))
def test_every_way_computes_the_polynomial_and_goes_on_from_any_byte(data: bytes, cut: int) -> None:
    expected = bit_by_bit(data)
    for way in _native.crc32c_ways():
        assert _native.crc32c(as_array(data), way=way) == expected
        first = _native.crc32c(as_array(data[:cut]), way=way)
        assert _native.crc32c(as_array(data[cut:]), first, way) == expected


@settings(max_examples=80)
@given(seed=st.integers(0, 2**32 - 1), size=st.integers(0, 60_000), start=st.integers(0, 63))
def test_all_ways_agree_on_long_data_at_any_alignment(seed: int, size: int, start: int) -> None:
    data = np.random.default_rng(seed).integers(0, 256, size + start, np.uint8)[start:]
    values = {_native.crc32c(data, way=way) for way in _native.crc32c_ways()}
    assert len(values) == 1


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32 - 1), place=st.integers(0, 20_000), width=st.integers(1, 31))
def test_every_burst_of_errors_changes_the_checksum(seed: int, place: int, width: int) -> None:
    data = np.random.default_rng(seed).integers(0, 256, 20_008, np.uint8)
    before = _native.crc32c(data)
    bits = np.unpackbits(data[place : place + 8])
    bits[:width] ^= 1
    data[place : place + 8] = np.packbits(bits)
    assert _native.crc32c(data) != before


def test_checksums_of_records() -> None:
    data = np.random.default_rng(1).integers(0, 256, (5, 700), np.uint8)
    assert _native.record_checksums(data, 700).tolist() == [_native.crc32c(record) for record in data]
    with pytest.raises(ValueError, match="not whole records of 699"):
        _native.record_checksums(data, 699)


# ---- links


def records(seed: int = 1) -> U8:
    return np.random.default_rng(seed).integers(0, 256, (RECORDS, RECORD), np.uint8)


def target_records(slots: int) -> U8:
    raw = np.zeros(slots * RECORD + PAGE, np.uint8)
    start = -raw.ctypes.data % PAGE
    return raw[start : start + slots * RECORD].reshape(slots, RECORD)


def checked_link(path: Path, sums: npt.NDArray[np.uint32], io: str, *, direct: bool = True) -> _native.Link:
    try:
        return _native.file_link(
            [(str(path), 0, RECORDS * RECORD)],
            io=io,
            direct=direct,
            checksums=[sums],
            record_bytes=RECORD,
        )
    except OSError as error:
        if io == "uring" and error.filename == "io_uring":
            pytest.skip(f"io_uring is not to be had: {error.strerror}")
        raise


def fetch(link: _native.Link, target: U8) -> dict[int, int]:
    """Slot -> error, of all records."""
    count = len(target)
    link.submit([(slot, 0, slot * RECORD, RECORD, slot % 3) for slot in range(count)], target)
    done: dict[int, int] = {}
    while len(done) < count:
        assert link.wait(10.0)
        done.update(link.poll())
    return done


def rot(path: Path, place: int, bits: int) -> None:
    """Change a byte, and nothing that stat shows but ctime."""
    before = path.stat()
    descriptor = os.open(path, os.O_RDWR)
    byte = os.pread(descriptor, 1, place)[0]
    os.pwrite(descriptor, bytes([byte ^ bits]), place)
    os.fsync(descriptor)
    os.close(descriptor)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("io", ["uring", "threads"])
@settings(max_examples=12)
@given(damage=st.dictionaries(st.integers(0, RECORDS * RECORD - 1), st.integers(1, 255), max_size=6))
def test_records_that_rot_fail_alone_and_all_others_arrive(
    io: str, direct: bool, tmp_path_factory: pytest.TempPathFactory, damage: dict[int, int]
) -> None:
    path = tmp_path_factory.mktemp("rot") / "layer"
    data = records()
    path.write_bytes(data.tobytes())
    link = checked_link(path, _native.record_checksums(data, RECORD), io, direct=direct)
    link.open(RECORDS)
    for place, bits in damage.items():
        rot(path, place, bits)
    target = target_records(RECORDS)
    done = fetch(link, target)
    damaged = {place // RECORD for place in damage}
    assert done == {slot: errno.EBADMSG if slot in damaged else 0 for slot in range(RECORDS)}
    for slot in set(range(RECORDS)) - damaged:
        assert np.array_equal(target[slot], data[slot])
    assert link.stats()["rereads"] == link.stats()["errors"] == len(damaged)
    assert link.failure() == ""
    for place, bits in damage.items():
        rot(path, place, bits)
    assert set(fetch(link, target).values()) == {0}
    assert np.array_equal(target, data)
    path.unlink()


def test_checksums_have_to_fit_and_transfers_are_whole_records(tmp_path: Path) -> None:
    path = tmp_path / "layer"
    path.write_bytes(records().tobytes())
    region = (str(path), 0, RECORDS * RECORD)
    sums = np.zeros(RECORDS, np.uint32)
    for checksums, size in ([sums[:-1]], RECORD), ([sums], RECORD - 1), ([sums], 0), ([sums, sums], RECORD):
        with pytest.raises(ValueError, match="checksums"):
            _native.file_link([region], checksums=checksums, record_bytes=size)
    with pytest.raises(ValueError, match="uint32"):
        _native.file_link([region], checksums=[sums.astype(np.int64)], record_bytes=RECORD)  # type: ignore[list-item]
    link = _native.file_link([region], checksums=[sums], record_bytes=RECORD)
    link.open(1)
    with pytest.raises(ValueError, match="not whole records of 12288 bytes"):
        link.submit([(0, 0, PAGE, RECORD, 0)], target_records(1))
    unchecked = _native.file_link([region, region], checksums=[None, sums], record_bytes=RECORD)
    unchecked.open(2)
    target = target_records(2)
    unchecked.submit([(0, 0, 0, RECORD, 0), (1, 1, 0, RECORD, 0)], target)
    done: dict[int, int] = {}
    while len(done) < 2:
        assert unchecked.wait(10.0)
        done.update(unchecked.poll())
    assert done == {0: 0, 1: errno.EBADMSG}


# Flips a bit of what the first preadv of a file named "layer" gives, as a bus or a controller may.
SHIM = """\
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include <stdio.h>
#include <sys/uio.h>
#include <unistd.h>
static int left;
__attribute__((constructor)) static void begin(void) { left = atoi(getenv("SPOIL")); }
static ssize_t spoil(const char *name, int fd, const struct iovec *v, int n, off_t at) {
  ssize_t (*real)(int, const struct iovec *, int, off_t) =
      (ssize_t (*)(int, const struct iovec *, int, off_t))dlsym(RTLD_NEXT, name);
  ssize_t got = real(fd, v, n, at);
  char link[64], path[4096];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t length = readlink(link, path, sizeof path - 1);
  /* Several threads read. */
  if (got > 100 && length > 5 && memcmp(path + length - 5, "layer", 5) == 0 &&
      __atomic_fetch_sub(&left, 1, __ATOMIC_SEQ_CST) > 0)
    ((unsigned char *)v[0].iov_base)[50] ^= 4;
  return got;
}
ssize_t preadv(int fd, const struct iovec *v, int n, off_t at) { return spoil("preadv", fd, v, n, at); }
ssize_t preadv64(int fd, const struct iovec *v, int n, off_t at) { return spoil("preadv64", fd, v, n, at); }
"""
READ = """\
import json, sys
import numpy as np
from pathlib import Path
from moechat import _native
import test_checksums as t
data = t.records()
link = t.checked_link(Path(sys.argv[1]), _native.record_checksums(data, t.RECORD), "threads")
link.open(t.RECORDS)
target = t.target_records(t.RECORDS)
done = t.fetch(link, target)
right = all(np.array_equal(target[slot], data[slot]) for slot, error in done.items() if error == 0)
failed = sorted(error for error in done.values() if error)
print(json.dumps({"failed": failed, "right": right, "rereads": link.stats()["rereads"]}))
"""


@pytest.mark.parametrize("spoiled", [0, 1])
def test_a_read_that_went_wrong_once_is_made_again(tmp_path: Path, spoiled: int) -> None:
    shim = built_shim(SHIM, tmp_path)
    path = tmp_path / "layer"
    path.write_bytes(records().tobytes())
    done = subprocess.run(
        [sys.executable, "-c", READ, str(path)],
        capture_output=True,
        text=True,
        env={
            **os.environ,
            "LD_PRELOAD": str(shim),
            "SPOIL": str(spoiled),
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)]),
        },
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"failed": [], "right": True, "rereads": spoiled}
