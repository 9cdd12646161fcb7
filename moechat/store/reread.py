"""Reads small files of a source twice: a byte that is read wrongly once would decide a store for good."""

from __future__ import annotations

import hashlib
from pathlib import Path

from moechat.errors import CheckpointError
from moechat.store.file_problems import file_problem


def read_twice(path: Path) -> bytes:
    """Content of a file.

    Raises:
        CheckpointError: The second read gave other bytes, or the disk fails.
        DoesNotFitError: The system refuses memory, or an open file.
    """
    try:
        content = path.read_bytes()
        require_digest(path, hashlib.sha256(content).hexdigest())
    except OSError as problem:
        raise file_problem(path, problem, CheckpointError, "read") from problem
    return content


def require_digest(path: Path, digest: str) -> None:
    """Read a file again and compare its SHA-256.

    Args:
        path: The file.
        digest: Of what was read first, in hexadecimal.

    Raises:
        CheckpointError: The two differ.
        OSError: It cannot be read.
    """
    with open(path, "rb") as file:
        again = hashlib.file_digest(file, "sha256").hexdigest()
    if again != digest:
        raise CheckpointError(
            f"{path} was read twice with different bytes",
            hint="run the command again; if it stays so, check the disk (dmesg)",
        )
