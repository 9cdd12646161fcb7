"""Durable files: their content, the pieces of their writes, and the result of a write that ends early."""

from __future__ import annotations

import errno
import hashlib
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moechat import _native
from moechat.errors import DoesNotFitError
from moechat.store import files
from moechat.store.files import DurableFile, explained, hash_file

HUGE_PAGE = 2 << 20


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of all writes to files."""
    sizes: list[int] = []
    real = os.write

    def write(descriptor: int, data: memoryview) -> int:
        sizes.append(len(data))
        return real(descriptor, data)

    monkeypatch.setattr(os, "write", write)
    return sizes


def test_files_are_written_in_whole_huge_pages_whatever_the_pieces_are(
    tmp_path: Path, writes: list[int]
) -> None:
    data = os.urandom(4 * HUGE_PAGE + 12_345)
    cuts = [0, 4096, 4097, HUGE_PAGE - 1, HUGE_PAGE, 3 * HUGE_PAGE + 7, len(data)]
    with DurableFile(tmp_path / "file") as file:
        for begin, end in pairwise(cuts):
            file.write(data[begin:end])
        size, digest = file.commit()
    assert (tmp_path / "file").read_bytes() == data
    assert (size, digest) == (len(data), hashlib.sha256(data).hexdigest())
    assert all(count % HUGE_PAGE == 0 for count in writes[:-1])
    assert writes[-1] == 12_345


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 3 * HUGE_PAGE), max_size=6))
def test_every_division_into_writes_gives_the_same_file(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int]
) -> None:
    path = tmp_path_factory.mktemp("cuts") / "file"
    data = bytes(range(251)) * (sum(sizes) // 251 + 1)
    done = 0
    with DurableFile(path) as file:
        for size in sizes:
            file.write(data[done : done + size])
            done += size
        assert file.commit() == (done, hashlib.sha256(data[:done]).hexdigest())
    assert path.read_bytes() == data[:done]
    assert hash_file(path) == hashlib.sha256(data[:done]).hexdigest()


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: real(descriptor, data[: 1 + len(data) // 3]))
    data = os.urandom(HUGE_PAGE + 999)
    with DurableFile(tmp_path / "file") as file:
        file.write(data[:1000])
        file.write(data[1000:])
        file.commit()
    assert (tmp_path / "file").read_bytes() == data


def test_a_disk_that_is_full_at_the_last_piece_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int, data: memoryview) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)

    def write() -> None:
        with explained("writing", tmp_path), DurableFile(tmp_path / "file") as file:
            file.write(b"some bytes")
            file.commit()

    with pytest.raises(DoesNotFitError, match="is full while writing"):
        write()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("problem", [OSError(errno.ENODEV, "no"), OSError(errno.ENOMEM, "no"), ValueError()])
def test_a_file_that_cannot_be_mapped_is_still_hashed(
    problem: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise problem

    path = tmp_path / "file"
    path.write_bytes(os.urandom(2 * HUGE_PAGE + 5))
    monkeypatch.setattr(files.mmap, "mmap", refuse)
    assert hash_file(path) == hashlib.sha256(path.read_bytes()).hexdigest()


def test_hashing_requests_read_ahead_of_every_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    huge: list[int] = []
    real = _native.read_ahead
    monkeypatch.setattr(_native, "prefer_huge_pages", lambda data: huge.append(data.nbytes))
    monkeypatch.setattr(_native, "read_ahead", lambda data: sizes.append(data.nbytes) or real(data))
    path = tmp_path / "file"
    path.write_bytes(os.urandom(5 * HUGE_PAGE + 5))
    hash_file(path)
    assert huge == [5 * HUGE_PAGE + 5]
    assert sizes == [2 * HUGE_PAGE, 2 * HUGE_PAGE, HUGE_PAGE + 5]


def test_a_hashed_file_does_not_stay_in_the_memory_of_the_process(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with path.open("wb") as file:
        for _ in range(32):
            file.write(os.urandom(HUGE_PAGE))
    child = (
        "import resource, sys\nfrom pathlib import Path\nfrom moechat.store.files import hash_file\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "before = peak()\nhash_file(Path(sys.argv[1]))\nprint(peak() - before)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", child, str(path)], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < 20 << 10


def test_a_file_that_shrinks_while_it_is_hashed_ends_early(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(6 * HUGE_PAGE))
    kept = path.read_bytes()[: 3 * HUGE_PAGE]

    def shrink(_: int) -> None:
        os.truncate(path, len(kept))

    assert hash_file(path, shrink) == hashlib.sha256(kept).hexdigest()
