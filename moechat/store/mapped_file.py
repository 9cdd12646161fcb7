"""What every mapped file of weights needs: opened without surprises, known again, its pages let go."""

from __future__ import annotations

import mmap
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from moechat.errors import MoechatError


@contextmanager
def opened_regular(path: Path, error: type[MoechatError]) -> Iterator[tuple[int, os.stat_result]]:
    """A regular file for reading, closed at the end: its descriptor and its status.

    Raises:
        MoechatError: Of class ``error``; the file is missing, unreadable or not a regular one, or the block
            cannot read it.
    """
    try:
        # O_NONBLOCK: opening a FIFO must not wait for a writer; it has no effect on regular files.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as problem:
        raise error(f"{path} cannot be opened: {problem.strerror}") from problem
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise error(f"{path} is not a regular file")
        yield descriptor, status
    except OSError as problem:
        raise error(f"{path} cannot be read: {problem.strerror}") from problem
    finally:
        os.close(descriptor)


def file_identity(status: os.stat_result) -> tuple[int, ...]:
    """Tells a file from another one of its name, and from itself after a change."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def release_pages(mapping: mmap.mmap, start: int, end: int) -> None:
    """Drop the mapped pages of bytes ``[start, end)`` from this process; the page cache keeps them."""
    first = start // mmap.PAGESIZE * mmap.PAGESIZE
    if end > first:
        mapping.madvise(mmap.MADV_DONTNEED, first, min(end, len(mapping)) - first)
