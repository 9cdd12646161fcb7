"""What the failure of a file operation means to the user: exit status and next step."""

from __future__ import annotations

import errno
from pathlib import Path

from moechat.errors import DoesNotFitError, MoechatError

_TOO_MANY_FILES = (errno.EMFILE, errno.ENFILE)
_DISK_FAILED = (errno.EIO, errno.ENODATA, errno.EUCLEAN, errno.ENXIO, errno.ESTALE, errno.ETIMEDOUT)


def file_problem(path: Path, problem: OSError, error: type[MoechatError], done: str) -> MoechatError:
    """The error for a file that the system refuses to open, map or read.

    Args:
        path: The file.
        problem: The failure.
        error: Class of the error, unless it is the process or the machine that lacks something:
            ``DoesNotFitError`` then.
        done: The operation, as in "cannot be opened".
    """
    fact = f"{path} cannot be {done}: {problem.strerror or problem}"
    if lacks_resources(problem):
        return DoesNotFitError(fact, hint=_resource_hint(problem))
    return error(fact, hint=access_hint(problem))


def lacks_resources(problem: OSError) -> bool:
    """Whether it failed for want of memory or descriptors, and not because of the file."""
    return problem.errno in (*_TOO_MANY_FILES, errno.ENOMEM, errno.EAGAIN, errno.ENOBUFS)


def _resource_hint(problem: OSError) -> str:
    if problem.errno in _TOO_MANY_FILES:
        return "allow more open files (ulimit -n 4096), or close other programs"
    return "allow more memory and address space (ulimit -v unlimited), or close other programs"


def access_hint(problem: OSError) -> str | None:
    """The next step if a file may not be read, or its disk fails; ``None`` for other failures."""
    if isinstance(problem, PermissionError):
        return "allow this user to read it: chmod, or chown"
    if problem.errno in _DISK_FAILED:
        return "check the disk that holds it: the system's log (dmesg) says what failed"
    return None
