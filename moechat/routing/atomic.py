"""Atomic replacement of files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

TEMPORARY = ".tmp"


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Write a file that durably replaces ``path`` at the end of the block.

    After an exception ``path`` is unchanged. A killed process leaves ``.NAME.PID.tmp`` in the directory. A
    pipe or device is written directly; for a symbolic link its target is replaced.

    Raises:
        OSError: The file cannot be written.
    """
    if path.exists() and not path.is_file():
        with open(path, "wb") as file:
            yield file
        return
    target = Path(os.path.realpath(path))
    temporary = target.with_name(f".{target.name}.{os.getpid()}{TEMPORARY}")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise
    directory = os.open(target.parent, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
