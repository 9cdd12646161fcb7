"""What is remembered of verified stores, checks of single files, and what they leave in the page cache."""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import json
import mmap
import os
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rotten import flip, record_place
from store_support import mixtral_plan, write_mixtral

from moechat import _native
from moechat.store import file_check
from moechat.store.checkpoint import Checkpoint
from moechat.store.convert import convert
from moechat.store.file_check import ExpertRecords, FileCheck, RecordSums
from moechat.store.manifest import FileRecord
from moechat.store.stamps import VerificationRecord, VerifiedFile, record_path
from moechat.store.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    source = write_mixtral(tmp_path / "source", layers=2, experts=3, hidden=64, intermediate=128, dtype="F16")
    checkpoint = Checkpoint.open(source)
    return convert(checkpoint, mixtral_plan(checkpoint), tmp_path / "made", bits=4, source_name="tiny")


@settings(max_examples=60)
@given(
    cuts=st.lists(st.integers(0, 5000), max_size=12),
    offset=st.integers(0, 900),
    size=st.integers(1, 700),
    records=st.integers(1, 6),
    rest=st.integers(0, 300),
)
def test_checksums_of_records_do_not_depend_on_the_pieces_a_file_is_read_in(
    cuts: list[int], offset: int, size: int, records: int, rest: int
) -> None:
    data = np.random.default_rng(5).integers(0, 256, offset + records * size + rest, np.uint8)
    sums = RecordSums(ExpertRecords(0, offset, records, 1, size))
    places = sorted({0, len(data), *(min(cut, len(data)) for cut in cuts)})
    for begin, end in itertools.pairwise(places):
        sums.update(data[begin:end])
    expected = _native.record_checksums(data[offset : offset + records * size].copy(), size)
    assert sums.values.tolist() == expected.tolist()


def test_a_verified_store_knows_the_checksums_of_its_records(store: Store, tmp_path: Path) -> None:
    assert store.record_checksums(0) is None
    store.ensure_verified(tmp_path / "state")
    again = Store.open(store.path)
    assert again.ensure_verified(tmp_path / "state") is False
    for layer in (0, 1):
        expected = _native.record_checksums(store.expert_layer(layer), store.geometry.record_bytes)
        for one in (store, again):
            sums = one.record_checksums(layer)
            assert sums is not None
            assert sums.tolist() == expected.tolist()


def test_a_record_is_kept_exactly_and_any_changed_byte_of_it_is_found(tmp_path: Path) -> None:
    sums = np.arange(5, dtype=np.uint32) * 0x3FFFFFFF
    files = {
        "manifest.json": VerifiedFile((1, 2, 3, 4), "", 5.0),
        "experts": VerifiedFile((10, 20, 30, 40), "ab" * 32, 1234.5, sums),
    }
    path = tmp_path / "state" / "record.json"
    VerificationRecord("cd" * 32, files).write(path)
    read = VerificationRecord.read(path)
    assert read is not None
    assert read.manifest == "cd" * 32
    assert read.files["manifest.json"] == files["manifest.json"]
    found = read.files["experts"]
    assert (found.status, found.sha256, found.at) == ((10, 20, 30, 40), "ab" * 32, 1234.5)
    assert found.checksums is not None
    assert found.checksums.tolist() == sums.tolist()
    data = path.read_bytes()
    for place in range(len(data)):
        path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        assert VerificationRecord.read(path) is None
    for content in (b"", b"[]", b"null", b"{}", b'{"checksum": 1}', b'{"files": {"a": 1}, "manifest": ""}'):
        path.write_bytes(content)
        assert VerificationRecord.read(path) is None


def test_times_in_the_future_are_not_recent() -> None:
    now = time.time()
    assert VerifiedFile((), "", now - 5).is_recent(10)
    assert not VerifiedFile((), "", now - 15).is_recent(10)
    assert not VerifiedFile((), "", now + 1000).is_recent(10)


@pytest.mark.parametrize("way", ["at once", "in pieces"])
def test_a_damaged_file_is_described_by_layer_and_expert(
    store: Store, tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_check, "_PIECE", 1000)
    store.ensure_verified(tmp_path / "state")
    name = store.layers[1].file

    def check() -> FileCheck:
        return store.file_check(name, store.verification(tmp_path / "state"))

    def result() -> file_check.Damage | None:
        one = check()
        return one.run() if way == "at once" else list(one.steps())[-1]

    assert result() is None
    for expert in (0, 2):
        flip(*record_place(store, 1, expert, block=1))
    damage = result()
    assert damage is not None
    assert (damage.layer, damage.experts) == (1, (0, 2))
    assert damage.message.endswith("(layer 1, experts 0, 2)")
    assert name in damage.message
    os.unlink(store.path / name)
    damage = result()
    assert damage is not None
    assert "cannot be read: No such file" in damage.message


def cached_pages(path: Path) -> int:
    """Pages of a file in the page cache."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        mapping = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
    view = np.frombuffer(mapping, np.uint8)
    pages = -(-size // mmap.PAGESIZE)
    there = (ctypes.c_ubyte * pages)()
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mincore(ctypes.c_void_p(view.ctypes.data), ctypes.c_size_t(size), there) == 0
    return sum(flag & 1 for flag in there)


@pytest.mark.parametrize("cached", [True, False])
def test_a_pass_in_pieces_leaves_the_page_cache_as_it_was(tmp_path: Path, cached: bool) -> None:
    path = tmp_path / "file"
    data = os.urandom(5 << 20)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
    os.write(descriptor, data)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    if cached:
        assert len(os.pread(descriptor, len(data), 0)) == len(data)
    os.close(descriptor)
    before = cached_pages(path)
    if before not in (0, len(data) // mmap.PAGESIZE):
        pytest.skip("the file system keeps its pages by its own rules")
    check = FileCheck(path, FileRecord(len(data), hashlib.sha256(data).hexdigest()), None, None)
    assert list(check.steps())[-1] is None
    assert cached_pages(path) == before


def test_an_examination_forgets_only_what_is_damaged(store: Store, tmp_path: Path) -> None:
    state = tmp_path / "state"
    assert store.examine(state) == []
    assert store.is_verified(state)
    flip(*record_place(store, 0, 1))
    [damage] = store.examine(state)
    assert (damage.layer, damage.experts) == (0, (1,))
    assert not store.is_verified(state)
    [again] = store.examine(state)
    assert again.experts == (1,), "the checksums stay, so that experts can be named"
    flip(*record_place(store, 0, 1))
    assert store.examine(state) == []
    assert store.is_verified(state)
    content = json.loads(record_path(store.path, state).read_text())
    assert "crc32c" in content["files"][store.layers[0].file]
