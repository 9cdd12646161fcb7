"""Read-only mapped files: safe opening, change detection, release of mapped pages."""

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
    """Open a regular file for reading and yield its descriptor and status; close it at the end.

    Raises:
        MoechatError: Of class ``error``; the file is missing, unreadable or not a regular file, or a read in
            the block fails.
    """
    try:
        # Not opened first: opening a FIFO lets a writer go on, and opening a device may do anything.
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise error(f"{path} is not a regular file")
        # O_NONBLOCK: if it has just become a FIFO, do not wait for a writer; no effect on regular files.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as problem:
        raise error(f"{path} cannot be opened: {problem.strerror}", hint=access_hint(problem)) from problem
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise error(f"{path} is not a regular file")
        yield descriptor, status
    except OSError as problem:
        raise error(f"{path} cannot be read: {problem.strerror}", hint=access_hint(problem)) from problem
    finally:
        os.close(descriptor)


def access_hint(problem: OSError) -> str | None:
    """The next step if a file may not be read; ``None`` for other failures."""
    return "allow this user to read it: chmod, or chown" if isinstance(problem, PermissionError) else None


def other_kind(beginning: bytes) -> str:
    """What a file holds that is often saved in place of a model, for messages; empty if it is none of these.

    Args:
        beginning: The first bytes of the file, at least 16.
    """
    if beginning.startswith(b"version https://"):
        return "a pointer of Git LFS to the file, not the file: git lfs pull fetches it"
    if beginning.lstrip()[:1] == b"<":
        return "a web page, not the file: download it by the link to the file itself"
    return ""


def place_of(path: Path, tensor: str) -> str:
    """A tensor for messages, by the name that it has in its file: ``FILE: tensor 'NAME'``."""
    return f"{path}: tensor {tensor[:200]!r}"


class MappedFile:
    """A file mapped read-only.

    Attributes:
        path: The file.
    """

    def __init__(self, path: Path, mapping: mmap.mmap, status: os.stat_result) -> None:
        """Keep a mapping and the status that its file had when it was opened."""
        self.path = path
        self._mapping = mapping
        self._identity = _identity(status)

    def is_current(self) -> bool:
        """Whether the path still names the opened file, unchanged as far as size and mtime show.

        Raises:
            OSError: The file no longer exists.
        """
        return _identity(os.stat(self.path)) == self._identity

    def place(self, name: str) -> str:
        """See :class:`moechat.store.tensors.TensorFile`."""
        return place_of(self.path, name)

    def release(self, start: int, end: int) -> None:
        """Drop the mapped pages of bytes ``[start, end)`` from this process; the page cache keeps them."""
        first = start // mmap.PAGESIZE * mmap.PAGESIZE
        if end > first:
            self._mapping.madvise(mmap.MADV_DONTNEED, first, min(end, len(self._mapping)) - first)


def _identity(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
