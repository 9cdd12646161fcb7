"""Reads and writes text files that the user names; writing is atomic and never overwrites others' files."""

from __future__ import annotations

import errno
import os
import re
import stat
import tempfile
from collections.abc import Container
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from moechat.errors import MoechatError, UsageError
from moechat.safe_text import one_line

_MAX_BYTES = 64 << 20
_URL = re.compile(r"https?://", re.IGNORECASE)
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


# First bytes of files that are often given in place of text.
_PICTURES = {b"\x89PNG\r\n\x1a\n": "PNG", b"\xff\xd8\xff": "JPEG", b"GIF87a": "GIF", b"GIF89a": "GIF"}


class Stamp(NamedTuple):
    """Identity of a file's content: detects that the file was changed or replaced.

    Attributes:
        changed_ns: Time of last change in nanoseconds since 1970.
        size: In bytes.
    """

    device: int
    inode: int
    changed_ns: int
    size: int


def path_of(text: str) -> Path:
    """The path that the user typed, with ``~`` expanded.

    Raises:
        UsageError: It is a directory, or there is no such user.
    """
    if text.endswith("/"):
        raise UsageError(f"{one_line(text)} is a directory", hint="give the name of a file in it")
    try:
        return Path(text).expanduser()
    except RuntimeError as error:  # no such user
        raise UsageError(str(error)) from None


def read_text(path: Path) -> str:
    """Read a text file.

    Raises:
        UsageError: It is missing, not a regular file, larger than 64 MiB, a picture, or not UTF-8.
    """
    shown = one_line(str(path))
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise UsageError(f"{shown} is not a file")
        if status.st_size > _MAX_BYTES:
            raise UsageError(f"{shown} has {status.st_size >> 20} MiB, more than any context holds")
        data = path.read_bytes()
    except (OSError, ValueError) as error:
        raise UsageError(f"{shown} cannot be read: {_reason(error)}") from None
    if b"\0" in data:
        refuse_pictures(data, shown)
        raise UsageError(f"{shown} is not text: it holds a zero byte at offset {data.index(0)}")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        refuse_pictures(data, shown)
        raise UsageError(
            f"{shown} is not UTF-8: byte {error.object[error.start]:#04x} at offset {error.start}",
            hint="convert it first, for example with iconv",
        ) from None


def read_named(name: str) -> tuple[str, str]:
    """Name and content of a text for a message.

    Args:
        name: The path of a file, or a URL; an HTML page becomes its text.

    Raises:
        UsageError: See :func:`path_of` and :func:`read_text`; or :func:`moechat.chat.web_text.read_url`.
        OfflineError: The server of the URL cannot be reached.
    """
    if _URL.match(name):
        from moechat.chat.web_text import read_url  # imports httpx

        return read_url(name)
    path = path_of(name)
    return one_line(path.name), read_text(path)


def refuse_pictures(data: bytes, shown: str) -> None:
    """Refuse a picture or a PDF file, which its first bytes tell.

    Args:
        data: What is not text: a text may begin with the same letters.
        shown: Name of its source.

    Raises:
        UsageError: It is one.
    """
    kind = next((name for mark, name in _PICTURES.items() if data.startswith(mark)), "")
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        kind = "WebP"
    if kind:
        raise UsageError(
            f"{shown} is a picture ({kind}); models read text only here",
            hint="give a text file, or describe the picture in the prompt",
        )
    if data.startswith(b"%PDF-"):
        raise UsageError(
            f"{shown} is a PDF file; models read text only here",
            hint="extract its text first, for example with pdftotext",
        )


def write_text(path: Path, text: str, *, replaceable: Container[Stamp] = ()) -> Stamp:
    """Write a new file atomically.

    Args:
        path: Its path; the directory must exist.
        text: Its content.
        replaceable: Existing files that may be overwritten while unchanged.

    Returns:
        The stamp of the file.

    Raises:
        UsageError: The file exists and is not replaceable.
        MoechatError: The file cannot be written.
    """
    shown = one_line(str(path))
    temporary = ""
    try:
        replaces = _is_replaceable(path, replaceable)
        # A short name, because that of the file may have the maximum length. mkstemp() makes the file
        # private, as conversations should be; the user may change that.
        descriptor, temporary = tempfile.mkstemp(prefix=".moechat-", dir=path.parent)
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        if replaces and _is_replaceable(path, replaceable):  # still unchanged
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
    """The stamp of a file; of a symbolic link itself.

    Raises:
        OSError: The file does not exist.
    """
    status = path.lstat()
    return Stamp(status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size)


def _is_replaceable(path: Path, replaceable: Container[Stamp]) -> bool:
    """Whether there is a file that may be overwritten; ``False`` if there is no file.

    Raises:
        FileExistsError: The file must not be overwritten.
    """
    if not os.path.lexists(path):
        return False
    if stamp_of(path) not in replaceable:
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
    return True


def _put_new(temporary: str, path: Path) -> None:
    """Rename a finished file, unless the name exists by now."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links: reserve the name first
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        os.replace(temporary, path)


def _reason(error: OSError | ValueError) -> str:
    return (isinstance(error, OSError) and error.strerror) or str(error)
