"""A Unix socket that only programs of the same user can reach."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

# Bytes of a socket's path, with the byte that ends it; the smallest of the systems' limits.
_MOST_PATH = 104
_BACKLOG = 64
_PREFIX = "moechat-"


@contextmanager
def private_socket(directory: Path) -> Iterator[socket.socket | None]:
    """Listen on a socket in a directory of the user, until the end of the block.

    Args:
        directory: Made if it is missing, readable by its owner alone. Where its path is too long for a
            socket, a directory for temporary files takes its place.

    Returns:
        ``None`` where no socket can be made: on systems without them, or in a directory that cannot be
            written.
    """
    kind = getattr(socket, "AF_UNIX", None)
    with ExitStack() as stack:
        listening = None
        if kind is not None:
            with suppress(OSError):
                listening = _listen(kind, directory, stack)
        yield listening


def remove_temporary(path: str) -> None:
    """Remove the directory that took the place of a long one, of a process that was killed."""
    directory = Path(path).parent
    if path and directory.parent == Path(tempfile.gettempdir()) and directory.name.startswith(_PREFIX):
        with suppress(OSError):
            Path(path).unlink(missing_ok=True)
            directory.rmdir()


def _listen(kind: int, directory: Path, stack: ExitStack) -> socket.socket:
    path = directory / f"{os.getpid()}.sock"
    if len(os.fsencode(path)) >= _MOST_PATH:
        temporary = tempfile.mkdtemp(prefix=_PREFIX)  # readable by its owner alone
        stack.callback(shutil.rmtree, temporary, ignore_errors=True)
        path = Path(temporary) / "socket"
    else:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        directory.chmod(0o700)
        path.unlink(missing_ok=True)  # of a process that had the same number
    listening = stack.enter_context(socket.socket(kind, socket.SOCK_STREAM))
    listening.bind(str(path))
    stack.callback(path.unlink, missing_ok=True)
    path.chmod(0o600)
    listening.listen(_BACKLOG)
    return listening
