"""Durable files, and error messages of file operations.

A :class:`DurableFile` is written under a temporary name and hashed meanwhile, synced, renamed, and its
directory is synced. Once :meth:`DurableFile.commit` has returned, the file is complete under its name even
after a power failure; before, that name is unchanged. Leftover temporary files (``*.tmp``) may be deleted at
any time.
"""

from __future__ import annotations

import errno
import hashlib
import mmap
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from moechat import _native
from moechat.atomic_file import TEMPORARY, sync_directory
from moechat.config import HOME_VARIABLE
from moechat.errors import DoesNotFitError, MoechatError, StorageError

_HASH_CHUNK = 4 << 20
# Also of one write.
HUGE_PAGE_BYTES = 2 << 20
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)
_FAULTY_DISK = "look at the system's log (dmesg) for faults of the disk"
_NO_DIRECTORY = (errno.ENOENT, errno.ENOTDIR)


@contextmanager
def explained(doing: str, path: Path) -> Iterator[None]:
    """Convert ``OSError`` in the block to ``StorageError``; a full disk becomes ``DoesNotFitError``.

    Args:
        doing: The operation, for the message: ``"converting"``.
        path: Its target.
    """
    try:
        yield
    except BrokenPipeError:
        raise  # comes from the caller's progress output, not from a file
    except OSError as problem:
        target = problem.filename or path
        if problem.errno in _FULL:
            raise DoesNotFitError(
                f"the disk of {path} is full while {doing}: {problem.strerror}",
                hint="free some space and run the same command again; finished work is kept",
            ) from problem
        hint = (
            "look at the system's log (dmesg) for faults of the disk" if problem.errno == errno.EIO else None
        )
        if _cannot_be_written(problem, path):
            hint = f"set {HOME_VARIABLE} to a directory that can be written to: models are kept there"
        raise StorageError(
            f"{doing} failed at {target}: {problem.strerror or problem}", hint=hint
        ) from problem


def _cannot_be_written(problem: OSError, path: Path) -> bool:
    """Whether the failure is that the directory of ``path`` cannot be created or written."""
    if isinstance(problem.filename, int):  # a descriptor
        return False
    target = path if problem.filename is None else Path(os.fsdecode(problem.filename))
    if problem.errno in _NO_DIRECTORY:
        return target in path.parents  # mkdir in /proc, for example, fails with "no such file"
    return problem.errno in _FORBIDDEN and (path.is_relative_to(target) or target.is_relative_to(path.parent))


def hash_file(
    path: Path,
    advance: Callable[[int], None] | None = None,
    take: Callable[[npt.NDArray[np.uint8]], None] | None = None,
) -> str:
    """SHA-256 of a file in hexadecimal.

    Args:
        path: The file.
        advance: Called after each piece with its number of bytes.
        take: Called with each piece, whose memory is used again.
    """
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(_HASH_CHUNK))
    with open(path, "rb", buffering=0) as file, _read_in_huge_pages(file.fileno()) as fetch:
        done = 0
        while True:
            fetch(done)
            size = file.readinto(buffer)
            if not size:
                return digest.hexdigest()
            done += size
            digest.update(buffer[:size])
            if take is not None:
                take(np.frombuffer(buffer[:size], np.uint8))
            if advance is not None:
                advance(size)


@contextmanager
def _read_in_huge_pages(descriptor: int) -> Iterator[Callable[[int], None]]:
    """Yield a function that reads the piece at an offset into the page cache, in huge pages if supported.

    Later mappings of the file then use huge pages; plain reads would leave small ones. The mapping here is
    never dereferenced, so a file that shrinks meanwhile is harmless, and at most one piece is resident in
    this process. A file that cannot be mapped is only read.
    """
    size = os.fstat(descriptor).st_size
    mapping = _mapped(descriptor, size) if size >= HUGE_PAGE_BYTES else None
    if mapping is None:
        yield lambda _: None
        return
    views: list[npt.NDArray[np.uint8]] = []

    def fetch(begin: int) -> None:
        if begin:
            before = begin // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES - _HASH_CHUNK
            mapping.madvise(mmap.MADV_DONTNEED, max(0, before), _HASH_CHUNK)
        if begin < size:
            _native.read_ahead(views[0][begin : begin + _HASH_CHUNK])

    try:
        views.append(np.frombuffer(mapping, np.uint8))
        _native.prefer_huge_pages(views[0])
        yield fetch
    finally:
        views.clear()
        # A mapping cannot be closed while views of it exist, and frames of an interrupt may hold one. Then
        # it is closed with the last view.
        with suppress(BufferError):
            mapping.close()


def _mapped(descriptor: int, size: int) -> mmap.mmap | None:
    try:
        return mmap.mmap(descriptor, size, access=mmap.ACCESS_READ)
    except (OSError, ValueError):  # mapping unsupported, no address space, or the file has shrunk
        return None


class DurableFile:
    """A file being written; use as a context manager and call :meth:`commit` at the end of the block.

    Without a commit the temporary file is removed.

    Writes are whole pieces of :data:`HUGE_PAGE_BYTES`, which some file systems then cache as huge pages;
    experts mapped from those are read 10 to 20 % faster.

    Invariant: :meth:`write` received ``_bytes`` bytes; all were written to the file except the last
    ``_buffered``, fewer than a piece, which are at the beginning of ``_piece``.
    """

    def __init__(self, path: Path, mode: int = 0o644) -> None:
        """Create ``<path>.tmp``, replacing a leftover of an interrupted run.

        Args:
            path: The final name.
            mode: Permissions, which the process's umask restricts.
        """
        self._path = path
        self._temporary = path.with_name(path.name + TEMPORARY)
        self._digest = hashlib.sha256()
        self._bytes = 0
        self._piece = memoryview(bytearray(HUGE_PAGE_BYTES))
        self._buffered = 0
        self._temporary.unlink(missing_ok=True)  # it may have other permissions
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        self._descriptor = os.open(self._temporary, flags, mode)

    def write(self, data: Any) -> None:
        """Append bytes (any C-contiguous buffer)."""
        view = memoryview(data).cast("B")
        self._digest.update(view)
        self._bytes += view.nbytes
        if self._buffered:
            count = min(view.nbytes, HUGE_PAGE_BYTES - self._buffered)
            self._piece[self._buffered : self._buffered + count] = view[:count]
            self._buffered += count
            view = view[count:]
            if self._buffered < HUGE_PAGE_BYTES:
                return
            self._flush()
        whole = view.nbytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
        self._write(view[:whole])
        rest = view[whole:]
        self._piece[: rest.nbytes] = rest
        self._buffered = rest.nbytes

    def _flush(self) -> None:
        buffered, self._buffered = self._buffered, 0
        self._write(self._piece[:buffered])

    def _write(self, view: memoryview) -> None:
        while view.nbytes:
            view = view[os.write(self._descriptor, view) :]

    def commit(self) -> tuple[int, str]:
        """Sync, rename to the final name, sync the directory.

        Returns:
            Size in bytes and SHA-256 in hexadecimal.
        """
        self._flush()
        os.fsync(self._descriptor)
        self._close()
        os.replace(self._temporary, self._path)
        sync_directory(self._path.parent)
        return self._bytes, self._digest.hexdigest()

    def _close(self) -> None:
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            os.close(descriptor)

    def __enter__(self) -> DurableFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()
        self._temporary.unlink(missing_ok=True)


def write_durably(path: Path, data: bytes) -> tuple[int, str]:
    """Write a small file; see :class:`DurableFile`.

    Returns:
        Size in bytes and SHA-256 in hexadecimal.
    """
    with DurableFile(path) as file:
        file.write(data)
        return file.commit()


def format_bytes(count: int) -> str:
    """``1.5 GiB``, ``12 KiB``, ``7 bytes``."""
    if count < 1024:
        return f"{count} bytes"
    value = float(count)
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        value /= 1024
        if value < 1024 or unit == "TiB":
            break
    return f"{value:.3g} {unit}" if value < 100 else f"{value:.0f} {unit}"


@contextmanager
def called(directory: Path, title: str, parts: Mapping[str, str] | None = None) -> Iterator[None]:
    """Replace the path of a temporary directory in errors of the block, as it means nothing to the user.

    Args:
        directory: The temporary directory.
        title: Name of the model whose files it holds.
        parts: By the name of a file that was made, what of the model it was made of.
    """
    path = re.compile(re.escape(str(directory)) + r"(?:/([\w.-]+))?")
    try:
        yield
    except MoechatError as error:
        names = parts or {}
        message = path.sub(
            lambda found: f"{names.get(found[1], found[1])} of {title}" if found[1] else title, str(error)
        )
        error.args = (message, *error.args[1:])
        raise
