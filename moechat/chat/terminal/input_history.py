"""The history of typed lines, in a private file of limited size."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path

from prompt_toolkit.history import FileHistory, History, InMemoryHistory

from moechat.atomic_file import replacing
from moechat.config import user_paths
from moechat.safe_text import encodable, neutralise, one_line

# A file larger than the first is cut to the second, so cuts are rare.
_MAX_BYTES, _BYTES_AFTER_CUT = 1 << 20, 3 << 18
# Longer entries, such as pasted files, are not stored: they would displace all others.
_MAX_ENTRY_BYTES = 1 << 16
# prompt_toolkit starts an entry with a blank line and its time.
_ENTRY_START = b"\n# "


def open_history(keep: bool, warn: Callable[[str], None]) -> History:
    """The history of earlier chats.

    Args:
        keep: Append new lines.
        warn: Receives messages about failures, which do not stop the chat.
    """
    try:
        path = Path(os.path.realpath(user_paths().state / "history"))
        if keep:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600))
            if path.stat().st_mode & 0o077:
                path.chmod(0o600)
            _limit_size(path)
        elif not path.exists():
            return InMemoryHistory()
    except OSError as error:
        warn(f"(what you type is not remembered: {_reason(error)})")
        return InMemoryHistory()
    return _PrivateHistory(path, keep=keep, warn=warn)


def _limit_size(path: Path) -> None:
    """Remove the oldest entries of a file that is too large, atomically.

    Raises:
        OSError: The file cannot be read or written; it is unchanged.
    """
    if path.stat().st_size <= _MAX_BYTES:
        return
    with path.open("rb") as file:
        file.seek(-_BYTES_AFTER_CUT, os.SEEK_END)
        newest = file.read()
    # Start with a whole entry; a file of another format has none.
    start = newest.find(_ENTRY_START)
    with replacing(path, mode=0o600) as written:
        written.write(newest[start:] if start >= 0 else b"")


class _PrivateHistory(FileHistory):
    """A history file whose failures do not stop the chat."""

    def __init__(self, path: Path, *, keep: bool, warn: Callable[[str], None]) -> None:
        super().__init__(str(path))
        self._path = path
        self._keep = keep
        self._warn = warn

    def load_history_strings(self) -> Iterable[str]:
        """Entries, newest first, neutralised because another program may have written them."""
        try:
            return [neutralise(entry) for entry in super().load_history_strings()]
        except OSError:
            return []

    def store_string(self, string: str) -> None:
        """Append an entry, unless it begins with a space, as in shells."""
        text = encodable(string)
        if not self._keep or string.startswith(" ") or len(text.encode()) > _MAX_ENTRY_BYTES:
            return
        try:
            super().store_string(text)
            _limit_size(self._path)
        except OSError as error:
            self._keep = False
            self._warn(f"(what you type is not remembered: {_reason(error)})")


def _reason(error: OSError) -> str:
    place = "" if error.filename is None else f"{error.filename}: "
    return one_line(f"{place}{error.strerror or error}")
