"""What was typed in chats, in a file of the user's that only they can read and that stays small."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from prompt_toolkit.history import FileHistory, History, InMemoryHistory

from moechat.chat.neutral import encodable, neutralise, one_line
from moechat.config import user_paths

# A file that has grown beyond the first is cut to the second: seldom, and to what people still look for.
_MOST_BYTES, _KEPT_BYTES = 1 << 20, 3 << 18
# What is longer is no line that anybody would type again, and would push out all that is.
_MOST_BYTES_OF_ONE = 1 << 16
# How prompt_toolkit begins an entry: a blank line, then its time.
_BEGINNING = b"\n# "


def typed_before(keep: bool, tell: Callable[[str], None]) -> History:
    """What was typed in earlier chats.

    Args:
        keep: What is typed now goes there too.
        tell: Called with what goes wrong, which stops nothing.
    """
    try:
        path = Path(os.path.realpath(user_paths().state / "history"))
        if keep:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600))
            if path.stat().st_mode & 0o077:
                path.chmod(0o600)
            _bound(path)
        elif not path.exists():
            return InMemoryHistory()
    except OSError as error:
        tell(f"(what you type is not remembered: {one_line(str(error))})")
        return InMemoryHistory()
    return _PrivateHistory(path, keep=keep, tell=tell)


def _bound(path: Path) -> None:
    """Leave the newest entries of a file that has become too large; whole or not at all.

    Raises:
        OSError: It cannot be read or written; it is as it was.
    """
    if path.stat().st_size <= _MOST_BYTES:
        return
    with path.open("rb") as file:
        file.seek(-_KEPT_BYTES, os.SEEK_END)
        newest = file.read()
    # An entry that is cut through is left out; a file of other things has no beginning of one.
    start = newest.find(_BEGINNING)
    descriptor, temporary = tempfile.mkstemp(prefix=".history-", dir=path.parent)  # readable for us alone
    try:
        with open(descriptor, "wb") as file:
            file.write(newest[start:] if start >= 0 else b"")
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise


class _PrivateHistory(FileHistory):
    """A file of what was typed; where it cannot be read or written the chat goes on without."""

    def __init__(self, path: Path, *, keep: bool, tell: Callable[[str], None]) -> None:
        super().__init__(str(path))
        self._path = path
        self._keep = keep
        self._tell = tell

    def load_history_strings(self) -> Iterable[str]:
        """Entries, the newest first; another program may have put anything there."""
        try:
            return [neutralise(entry) for entry in super().load_history_strings()]
        except OSError:
            return []

    def store_string(self, string: str) -> None:
        """Append an entry; like a shell's, it forgets what begins with a blank."""
        text = encodable(string)
        if not self._keep or string.startswith(" ") or len(text.encode()) > _MOST_BYTES_OF_ONE:
            return
        try:
            super().store_string(text)
            _bound(self._path)
        except OSError as error:
            self._keep = False
            self._tell(f"(what you type is not remembered: {one_line(str(error))})")
