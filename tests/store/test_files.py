"""Durable files: what is written, in which pieces, and what is left when writing ends early."""

from __future__ import annotations

import errno
import hashlib
import os
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moechat.errors import DoesNotFitError
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
def test_every_cut_of_the_data_gives_the_same_file(
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


def test_writes_that_the_system_cuts_short_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_file_that_shrinks_while_it_is_hashed_ends_early(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(6 * HUGE_PAGE))
    kept = path.read_bytes()[: 3 * HUGE_PAGE]

    def shrink(_: int) -> None:
        os.truncate(path, len(kept))

    assert hash_file(path, shrink) == hashlib.sha256(kept).hexdigest()
