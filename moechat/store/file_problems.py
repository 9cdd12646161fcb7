"""What the failure of a file operation means to the user: exit status and next step."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from moechat.errors import DoesNotFitError, MoechatError, StoreDamagedError

_TOO_MANY_FILES = (errno.EMFILE, errno.ENFILE)
_MEMORY_HINT = "allow more memory and address space (ulimit -v unlimited), or close other programs"
_RUST_TEXT = re.compile(r"\(os error (\d{1,4})\)")
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


@contextmanager
def failures_explained(store: Path) -> Iterator[None]:
    """Turn what libraries raise in the block, when the system refuses something, into moechat's errors.

    Args:
        store: The store that is loaded, for failures without the name of a file.

    Raises:
        DoesNotFitError: Memory, a thread or an open file was refused.
        StoreDamagedError: The disk fails.
    """
    try:
        yield
    except OSError as problem:
        if not _is_refusal(problem):
            raise
        named = isinstance(problem.filename, str)
        path = Path(problem.filename) if named else store
        raise file_problem(path, problem, StoreDamagedError, "read") from problem
    except MemoryError as problem:
        raise DoesNotFitError(f"the memory ran out while {store} was loaded", hint=_MEMORY_HINT) from problem
    except RuntimeError as problem:
        if str(problem) != "can't start new thread":
            raise
        raise DoesNotFitError(
            f"the system refused a thread while {store} was loaded",
            hint="allow more memory and processes (ulimit -v, ulimit -u), or close other programs",
        ) from problem
    except Exception as problem:
        failure = _of_rust(problem)
        if failure is None or not _is_refusal(failure):
            raise
        raise file_problem(store, failure, StoreDamagedError, "read") from problem


def _is_refusal(problem: OSError) -> bool:
    """Whether the system or the disk failed, and not the request."""
    return lacks_resources(problem) or problem.errno in _DISK_FAILED


def _of_rust(problem: Exception) -> OSError | None:
    """The failure that a library in Rust reports; it raises a plain ``Exception`` with Rust's text."""
    found = _RUST_TEXT.search(str(problem))
    if found is None:
        return None
    number = int(found[1])
    return OSError(number, os.strerror(number))


def _resource_hint(problem: OSError) -> str:
    if problem.errno in _TOO_MANY_FILES:
        return "allow more open files (ulimit -n 4096), or close other programs"
    return _MEMORY_HINT


def access_hint(problem: OSError) -> str | None:
    """The next step if a file may not be read, or its disk fails; ``None`` for other failures."""
    if isinstance(problem, PermissionError):
        return "allow this user to read it: chmod, or chown"
    if problem.errno in _DISK_FAILED:
        return "check the disk that holds it: the system's log (dmesg) says what failed"
    return None
