"""Advisory file locks; the kernel drops them when their holder exits or crashes."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from moechat.errors import MoechatError

_POLL_SECONDS = 0.1


@contextmanager
def exclusive_lock(path: Path, waiting: Callable[[], None] | None = None) -> Iterator[None]:
    """Hold the lock file ``path`` for the block.

    The file is created when needed and removed at the end. A file left by a dead process does not block.
    Waiting can be interrupted from the keyboard.

    Args:
        path: The lock file; its directory must exist, and nothing may rename or replace the file.
        waiting: Called about ten times a second while another process holds the lock.

    Raises:
        MoechatError: The file system cannot lock files.
        OSError: The file cannot be created.
    """
    descriptor = _acquire(path, waiting)
    try:
        yield
    finally:
        # Unlink while holding the lock: a process that waits on this inode sees that its name is gone and
        # starts over.
        with suppress(OSError):
            os.unlink(path)
        os.close(descriptor)


def hold_shared(path: Path) -> int | None:
    """Mark a file as in use, shared with other users of it; closing the descriptor ends the use.

    Args:
        path: An existing file; nothing is written to it.

    Returns:
        A descriptor; ``None`` if the file cannot be locked, so that other processes cannot see its use.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


@contextmanager
def unless_in_use(path: Path) -> Iterator[bool]:
    """Prevent other processes from starting to use a file during the block.

    Yields:
        ``False`` if the file is in use (:func:`hold_shared`) or exclusively locked, else ``True``, also for
        a file that is missing or cannot be locked at all.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        yield True
        return
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            free = True
        except OSError as problem:
            free = problem.errno not in (errno.EWOULDBLOCK, errno.EACCES)
        yield free
    finally:
        os.close(descriptor)


def _acquire(path: Path, waiting: Callable[[], None] | None) -> int:
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            while not _try_lock(descriptor, path):
                if waiting is not None:
                    waiting()
                time.sleep(_POLL_SECONDS)
            if _same_file(descriptor, path):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _try_lock(descriptor: int, path: Path) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as problem:
        if problem.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        raise MoechatError(
            f"{path} cannot be locked: {problem.strerror}",
            hint="keep the model library on a local file system (MOECHAT_HOME)",
        ) from problem
    return True


def _same_file(descriptor: int, path: Path) -> bool:
    try:
        named = os.stat(path)
    except FileNotFoundError:
        return False
    held = os.fstat(descriptor)
    return (named.st_dev, named.st_ino) == (held.st_dev, held.st_ino)
