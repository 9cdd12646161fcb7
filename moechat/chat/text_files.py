"""Files that users name: text that is read, and results that are written whole or not at all."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from collections.abc import Container
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from moechat.chat.neutral import one_line
from moechat.errors import MoechatError, UsageError

_MOST_BYTES = 64 << 20
_HINTS = {
    errno.ENOSPC: "free some space, or choose another place",
    errno.EDQUOT: "free some space, or choose another place",
    errno.EACCES: "choose another place",
    errno.EPERM: "choose another place",
    errno.EROFS: "choose another place",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.ENOENT: "make the directory first, or choose another place",
    errno.ENOTDIR: "choose another place",
}


class Stamp(NamedTuple):
    """Tells a file as it was left from one that somebody has changed or put in its place.

    Attributes:
        changed_ns: When its content changed last, in nanoseconds since 1970.
        size: In bytes.
    """

    device: int
    inode: int
    changed_ns: int
    size: int


def path_of(text: str) -> Path:
    """The path that a user has written; ``~`` is a home.

    Raises:
        UsageError: There is no such user, or it names a directory.
    """
    if text.endswith("/"):
        raise UsageError(f"{one_line(text)} is a directory", hint="give the name of a file in it")
    try:
        return Path(text).expanduser()
    except RuntimeError as error:  # no such user
        raise UsageError(str(error)) from None


def read_text(path: Path) -> str:
    """A file of text that a user named.

    Raises:
        UsageError: It is not there, no plain file, larger than 64 MiB, or not UTF-8 text.
    """
    shown = one_line(str(path))
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise UsageError(f"{shown} is not a file")
        if status.st_size > _MOST_BYTES:
            raise UsageError(f"{shown} has {status.st_size >> 20} MiB, more than any context holds")
        data = path.read_bytes()
    except (OSError, ValueError) as error:
        raise UsageError(f"{shown} cannot be read: {_reason(error)}") from None
    if b"\0" in data:
        raise UsageError(f"{shown} is not text: it holds a zero byte at offset {data.index(0)}")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{shown} is not UTF-8: byte {error.object[error.start]:#04x} at offset {error.start}",
            hint="convert it first, for example with iconv",
        ) from None


def write_text(path: Path, text: str, *, replaceable: Container[Stamp] = ()) -> Stamp:
    """Write a file whole or not at all; what was there stays.

    Args:
        path: Its name; its directory is there already.
        text: Its content.
        replaceable: Files that it may take the place of, as long as nobody has changed them.

    Returns:
        What tells the file from others.

    Raises:
        UsageError: It exists already.
        MoechatError: It cannot be written.
    """
    shown = one_line(str(path))
    temporary = ""
    try:
        replaces = _is_replaceable(path, replaceable)
        # A name of its own length: that of the file may be as long as names can be. Conversations are for
        # their owner's eyes, which is the mode it is made with; the user may widen that.
        descriptor, temporary = tempfile.mkstemp(prefix=".moechat-", dir=path.parent)
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        if replaces and _is_replaceable(path, replaceable):  # nor changed while this was written
            os.replace(temporary, path)
        else:
            _put_new(temporary, path)
        return stamp_of(path)
    except FileExistsError:
        raise UsageError(f"{shown} exists already; it was not written", hint="choose another name") from None
    except (OSError, ValueError) as error:
        hint = _HINTS.get(error.errno or 0) if isinstance(error, OSError) else None
        raise MoechatError(f"{shown} cannot be written: {_reason(error)}", hint=hint) from error
    finally:
        if temporary:
            with suppress(OSError):
                os.unlink(temporary)


def stamp_of(path: Path) -> Stamp:
    """What tells a file from others; of a link, what it is itself.

    Raises:
        OSError: It is not there.
    """
    status = path.lstat()
    return Stamp(status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size)


def _is_replaceable(path: Path, replaceable: Container[Stamp]) -> bool:
    """Whether a file is to make room; ``False`` where there is none.

    Raises:
        FileExistsError: There is another.
    """
    if not os.path.lexists(path):
        return False
    if stamp_of(path) not in replaceable:
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
    return True


def _put_new(temporary: str, path: Path) -> None:
    """Give a finished file its name, if nobody has taken that name meanwhile."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        raise
    except OSError:  # file systems without hard links: the name is taken first
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        os.replace(temporary, path)


def _reason(error: OSError | ValueError) -> str:
    return (isinstance(error, OSError) and error.strerror) or str(error)
