"""Scratch file for measuring the file link; it has no name, so it disappears however the process ends."""

from __future__ import annotations

import errno
import mmap
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from moechat.errors import MoechatError

_ALIGNMENT = 4096
_PIECE = 8 << 20
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP)
# A file with a lower share of allocated blocks is compressed or sparse, and reading it is too fast.
_LEAST_STORED = 0.9


@dataclass(frozen=True)
class Extent:
    """A part of a file.

    Attributes:
        path: The file.
        offset: Multiple of 4096.
        nbytes: Multiple of 4096.
    """

    path: str
    offset: int
    nbytes: int


class NoRoomError(MoechatError):
    """No scratch file of a useful size can be written."""


def stored_files(library: Path, wanted: int, least_each: int) -> list[Extent]:
    """Files of finished stores, largest first, with at least ``wanted`` bytes in total; empty if they have
    less.

    Args:
        library: The directory of stores.
        wanted: Total bytes.
        least_each: Smallest file.
    """
    sizes: list[tuple[int, str]] = []
    try:
        stores = [entry.path for entry in os.scandir(library) if entry.is_dir() and entry.name[:1] != "."]
        for store in stores:
            for entry in os.scandir(store):
                if not entry.is_file(follow_symlinks=False) or not entry.name.endswith(".safetensors"):
                    continue
                status = entry.stat()
                if status.st_size >= least_each and 512 * status.st_blocks >= _LEAST_STORED * status.st_size:
                    sizes.append((status.st_size, entry.path))
    except OSError:
        return []  # another process is removing a store
    chosen: list[Extent] = []
    for size, path in sorted(sizes, reverse=True):
        chosen.append(Extent(path, 0, size // _ALIGNMENT * _ALIGNMENT))
        if sum(extent.nbytes for extent in chosen) >= wanted:
            return chosen
    return []


@contextmanager
def scratch_file(
    directory: Path,
    nbytes: int,
    *,
    least: int,
    keep_free: int,
    seconds: float,
    report: Callable[[str], None] = lambda _: None,
) -> Iterator[Extent]:
    """Create a file of random bytes without a name, which disappears with the process.

    Args:
        directory: Its directory; created if necessary.
        nbytes: Its size; less if the disk is too small or too slow.
        least: Smallest useful size.
        keep_free: Bytes that stay free on the disk.
        seconds: Time after which writing stops, if the file has the least size.
        report: Called if it is smaller than ``nbytes``.

    Raises:
        NoRoomError: The disk has too little space, or the directory cannot be written.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        free = os.statvfs(directory)
        room = (free.f_bavail * free.f_frsize - keep_free) // _PIECE * _PIECE
        if room < least:
            raise NoRoomError(
                f"only {max(0, room + keep_free) >> 20} MiB are free at {directory}; reading needs a file of "
                f"{least >> 20} MiB there, and {keep_free >> 20} MiB stay free"
            )
        if room < nbytes:
            report(f"the disk has room for {room >> 20} MiB of {nbytes >> 20}")
        descriptor = _nameless(directory)
    except OSError as problem:
        raise NoRoomError(f"nothing can be written in {directory}: {problem.strerror}") from problem
    try:
        written = _fill(descriptor, min(nbytes, room), least, seconds)
        yield Extent(f"/proc/self/fd/{descriptor}", 0, written)
    finally:
        os.close(descriptor)


def _nameless(directory: Path) -> int:
    """Open a new file without a name."""
    flags = os.O_RDWR | os.O_CLOEXEC
    try:
        return os.open(directory, flags | os.O_TMPFILE, 0o600)
    except OSError as problem:
        if problem.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL):
            raise
    # O_TMPFILE is not supported: create a file and unlink it at once.
    path = directory / f".profile-{os.getpid()}.tmp"
    try:
        return os.open(path, flags | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    finally:
        path.unlink(missing_ok=True)


def _fill(descriptor: int, nbytes: int, least: int, seconds: float) -> int:
    """Write random bytes, with direct I/O if possible; returns the number of bytes."""
    generator = np.random.default_rng()
    piece = np.ndarray((_PIECE,), dtype=np.uint8, buffer=mmap.mmap(-1, _PIECE))
    direct = set_direct(descriptor, True)
    written, started = 0, time.perf_counter()
    try:
        while written < nbytes and (written < least or time.perf_counter() - started < seconds):
            # New random data for every piece, because file systems and disks compress and deduplicate.
            piece.view(np.uint64)[:] = generator.integers(0, 1 << 64, _PIECE // 8, dtype=np.uint64)
            view = memoryview(piece.data)
            while view.nbytes:
                try:
                    done = os.write(descriptor, view)
                except OSError as problem:
                    if not (direct and problem.errno in _NO_DIRECT):
                        raise
                    direct = set_direct(descriptor, False)
                    continue
                view = view[done:]
            written += _PIECE
            if not direct:
                os.fdatasync(descriptor)  # else only the write to the page cache would be timed
    except OSError as problem:
        if problem.errno not in _FULL or written < least:
            raise NoRoomError(
                f"writing {nbytes >> 20} MiB to read from failed after {written >> 20}: {problem.strerror}"
            ) from problem
    os.fsync(descriptor)
    return written


def set_direct(descriptor: int, wanted: bool) -> bool:
    """Switch direct I/O of a descriptor on or off; returns the resulting state."""
    import fcntl

    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT if wanted else flags & ~os.O_DIRECT)
    except OSError:
        return False
    return wanted


def reads_direct(path: str) -> bool:
    """Whether the file system supports direct reads of this file.

    Raises:
        OSError: It cannot be opened or read.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    except OSError as problem:
        if problem.errno not in _NO_DIRECT:
            raise
        return False
    try:
        os.preadv(descriptor, [mmap.mmap(-1, _ALIGNMENT)], 0)
    except OSError as problem:
        if problem.errno not in _NO_DIRECT:
            raise
        return False
    finally:
        os.close(descriptor)
    return True


def drop_cached(path: str) -> None:
    """Drop a file from the page cache."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
