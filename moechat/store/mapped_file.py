"""Read-only mapped files: safe opening, change detection, release of mapped pages."""

from __future__ import annotations

import mmap
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from moechat import _native
from moechat.errors import MoechatError
from moechat.store.file_problems import file_problem
from moechat.store.range_sums import checksum

_SUMMED_BYTES = 32 << 20


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
        raise file_problem(path, problem, error, "opened") from problem
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise error(f"{path} is not a regular file")
        yield descriptor, status
    except OSError as problem:
        raise file_problem(path, problem, error, "read") from problem
    finally:
        os.close(descriptor)


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


class GuardedMapping(mmap.mmap):
    """A read-only mapping that the process survives when its file becomes shorter or cannot be read.

    What is lost then reads as zeros, so whoever uses the content asks for :attr:`lost` afterwards.
    """

    _guard: _native.MappedGuard | None = None

    @classmethod
    def of(cls, descriptor: int, nbytes: int, offset: int = 0) -> GuardedMapping:
        """Map a part of an open file.

        Raises:
            OSError: It cannot be mapped.
            ValueError: The file is shorter.
        """
        mapping = cls(descriptor, nbytes, access=mmap.ACCESS_READ, offset=offset)
        mapping._guard = _native.MappedGuard(mapping)
        return mapping

    @property
    def lost(self) -> int | None:
        """Offset in the mapping of the first byte that could not be read; ``None``: all could."""
        lost = -1 if self._guard is None else self._guard.lost()
        return None if lost < 0 else lost

    def close(self) -> None:
        """Unmap."""
        super().close()
        self._guard = None


class MappedFile:
    """A file mapped read-only.

    Attributes:
        path: The file.
    """

    def __init__(self, path: Path, mapping: GuardedMapping, status: os.stat_result) -> None:
        """Keep a mapping and the status that its file had when it was opened."""
        self.path = path
        self._mapping = mapping
        self._identity = _identity(status)

    @property
    def mapping(self) -> GuardedMapping:
        """The mapping of the whole file."""
        return self._mapping

    @property
    def lost(self) -> int | None:
        """See :attr:`GuardedMapping.lost`."""
        return self._mapping.lost

    def is_current(self) -> bool:
        """Whether the path still names the opened file, unchanged as far as size and mtime show.

        Raises:
            OSError: The file no longer exists.
        """
        return _identity(os.stat(self.path)) == self._identity

    def place(self, name: str) -> str:
        """See :class:`moechat.store.tensors.TensorFile`."""
        return place_of(self.path, name)

    def checksum(self, start: int, end: int) -> int:
        """CRC-32C of bytes ``[start, end)``; their pages are dropped as by :meth:`release`."""
        found = 0
        with memoryview(self._mapping) as view:
            for begin in range(start, end, _SUMMED_BYTES):
                last = min(begin + _SUMMED_BYTES, end)
                with view[begin:last] as part:
                    found = checksum(part, found)
                self.release(begin, last)
        return found

    def release(self, start: int, end: int) -> None:
        """Drop the mapped pages of bytes ``[start, end)`` from this process; the page cache keeps them."""
        first = start // mmap.PAGESIZE * mmap.PAGESIZE
        if end > first:
            self._mapping.madvise(mmap.MADV_DONTNEED, first, min(end, len(self._mapping)) - first)


def _identity(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
