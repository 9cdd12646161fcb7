"""Files hashed and written by threads: their content, buffers that change, failures of a thread."""

from __future__ import annotations

import errno
import hashlib
import os
import threading
from pathlib import Path

import pytest

from moechat.errors import DoesNotFitError
from moechat.store.files import HUGE_PAGE_BYTES, explained
from moechat.store.pipelined_file import PipelinedFile


@pytest.mark.parametrize("size", [0, 1, HUGE_PAGE_BYTES, 4096, 3 * HUGE_PAGE_BYTES + 77])
def test_files_hold_what_the_buffer_had_at_each_write(size: int, tmp_path: Path) -> None:
    buffer = bytearray(size)
    parts = []
    with PipelinedFile(tmp_path / "file") as file:
        for _ in range(5):
            buffer[:] = os.urandom(size)
            parts.append(bytes(buffer))
            file.write(buffer)
        found = file.commit()
    data = b"".join(parts)
    assert (tmp_path / "file").read_bytes() == data
    assert found == (len(data), hashlib.sha256(data).hexdigest())
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("pieces", [1, 3, 40])
def test_a_disk_that_becomes_full_is_reported_and_leaves_nothing(
    pieces: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.write
    written = 0

    def write(descriptor: int, data: memoryview) -> int:
        nonlocal written
        if written >= (pieces // 2) * HUGE_PAGE_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written += len(data)
        return real(descriptor, data)

    monkeypatch.setattr(os, "write", write)
    data = bytes(HUGE_PAGE_BYTES)

    def fill() -> None:
        with explained("converting", tmp_path), PipelinedFile(tmp_path / "file") as file:
            for _ in range(pieces):
                file.write(data)
            file.commit()

    with pytest.raises(DoesNotFitError, match="is full while converting"):
        fill()
    assert not list(tmp_path.iterdir())


def test_an_interrupted_write_ends_its_threads_and_leaves_nothing(tmp_path: Path) -> None:
    before = set(threading.enumerate())

    def fill() -> None:
        with PipelinedFile(tmp_path / "file") as file:
            file.write(bytes(3 * HUGE_PAGE_BYTES))
            assert len(set(threading.enumerate()) - before) == 2
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fill()
    assert set(threading.enumerate()) <= before
    assert not list(tmp_path.iterdir())
