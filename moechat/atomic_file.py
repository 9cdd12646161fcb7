"""Atomic replacement of files."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

TEMPORARY = ".tmp"


@contextmanager
def replacing(path: Path, *, mode: int = 0o666) -> Iterator[IO[bytes]]:
    """Write a file that durably replaces ``path`` at the end of the block.

    After an exception ``path`` is unchanged. A killed process leaves ``.NAME.THREAD.PID.tmp`` in the
    directory. A pipe or device is written directly; for a symbolic link its target is replaced.

    Args:
        path: The file.
        mode: Permissions of the new file, which the umask limits.

    Raises:
        OSError: The file cannot be written.
    """
    if path.exists() and not path.is_file():
        with open(path, "wb") as file:
            yield file
        return
    target = Path(os.path.realpath(path))
    # A name of its own for every thread and process: several may write the same file at a time.
    writer = f"{threading.get_native_id()}.{os.getpid()}"
    temporary = target.with_name(f".{target.name}.{writer}{TEMPORARY}")
    try:
        with open(temporary, "wb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise
    sync_directory(target.parent)


def sync_directory(path: Path) -> None:
    """Make created and renamed files of a directory durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
