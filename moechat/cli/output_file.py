"""Files that a command is to write its result to."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from moechat.errors import UsageError


def writable(path: Path) -> Path:
    """The path; found out before minutes of work that their result could not be kept.

    Raises:
        UsageError: It cannot be written.
    """
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            # Who reads from a pipe would take opening and closing it for the end.
            if not os.access(path, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            return path
        try:
            path.open("xb").close()
        except FileExistsError:
            path.open("ab").close()
        else:
            path.unlink()  # there is nothing to keep yet
    except OSError as problem:
        raise UsageError(f"{path} cannot be written: {problem.strerror}") from problem
    return path
