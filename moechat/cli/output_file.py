"""Checks files that commands write results to."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from moechat.errors import UsageError


def require_writable(path: Path) -> Path:
    """Check, before minutes of work, that their result can be written; returns the path.

    Raises:
        UsageError: The file cannot be written.
    """
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            # Opening and closing a named pipe would look like the end of data to its reader.
            if not os.access(path, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            return path
        try:
            path.open("xb").close()
        except FileExistsError:
            path.open("ab").close()
        else:
            path.unlink()  # created by this check
    except OSError as problem:
        raise UsageError(f"{path} cannot be written: {problem.strerror}") from problem
    return path
