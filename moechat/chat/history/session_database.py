"""Conversations kept in a SQLite database in the user's state directory.

Every call is one transaction; processes may use the database at the same time.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import quote

from moechat.chat.conversation import Conversation, Turn, title_of
from moechat.chat.neutral import encodable
from moechat.chat.schema import NewerSchemaError, migrate
from moechat.chat.searching import by_comparing, by_index
from moechat.config import user_paths
from moechat.errors import SessionNotFoundError, SessionsBusyError, SessionsUnavailableError

_PATIENCE_S = 1.0
_FILE = "sessions.db"
_ANEW = "move that file away; a new one is made then"
# How SQLite's errors begin that come of a damaged file, though they do not say so.
_DAMAGES = {
    "no such table": "",
    "no such column": "",
    "Could not decode": "",
    "user-defined function": "a text in it cannot be read",
}
_HAS_TURNS = "EXISTS (SELECT 1 FROM turns WHERE conversation = conversations.id AND taken_back IS NULL)"


def sessions_path() -> Path:
    """Where conversations are kept."""
    return user_paths().state / _FILE


@dataclass(frozen=True)
class Summary:
    """A line of a list of conversations.

    Attributes:
        created: Seconds since 1970; so is ``updated``, when its last turn came.
        turns: Questions with their answers; those taken back do not count.
        found: Where a search found its words, else empty.
    """

    key: int
    title: str
    model: str
    created: float
    updated: float
    turns: int
    found: str = ""


class Sessions:
    """The database; a context manager.

    Args:
        path: Its file; made with its directory, readable for the user alone, unless ``existing``.
        existing: Only read what is there: where there is no file there are no conversations.

    Raises:
        SessionsUnavailableError: It is locked, damaged, of a newer version, or cannot be written. Every other
            method raises it too.
    """

    def __init__(self, path: Path, *, existing: bool = False) -> None:
        self._path = path
        with self._explained():
            if path.is_dir():
                raise SessionsUnavailableError(
                    f"{path} is a directory", hint="move it away; a new database is made in its place then"
                )
            if existing and not path.exists():
                self._connection = _prepared(sqlite3.connect(":memory:", isolation_level=None))
                return
            try:
                self._connection = _prepared(self._open())
            except (sqlite3.OperationalError, OSError):
                if not existing or _may_write(path):
                    raise
                self._connection = self._open_to_read()

    def _open_to_read(self) -> sqlite3.Connection:
        """Where nothing can be written: SQLite's log of changes needs files beside the database, unless it is
        told that nobody writes.
        """
        place = f"file:{quote(str(self._path.absolute()))}?mode=ro"
        try:
            return _prepared(sqlite3.connect(place, uri=True, isolation_level=None))
        except sqlite3.OperationalError:
            return _prepared(sqlite3.connect(f"{place}&immutable=1", uri=True, isolation_level=None))

    def _open(self) -> sqlite3.Connection:
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # SQLite gives its other files the mode of this one.
        with suppress(FileExistsError):
            os.close(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
        for file in (self._path, *(Path(f"{self._path}{end}") for end in ("-wal", "-shm"))):
            with suppress(OSError):  # not there, or not ours
                if file.stat().st_mode & 0o077:
                    file.chmod(0o600)
        connection = sqlite3.connect(self._path, timeout=_PATIENCE_S, isolation_level=None)
        with suppress(
            sqlite3.OperationalError
        ):  # where it cannot be, as on some network disks, it works without
            connection.execute("PRAGMA journal_mode = WAL")
        return connection

    def __enter__(self) -> Sessions:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; harmless when repeated."""
        self._connection.close()

    def keep(self, conversation: Conversation) -> bool:
        """Write what is new or changed of a conversation, and give it and its turns their keys.

        Turns are appended to what other processes have appended meanwhile; a title and a system prompt that
        did not change here stay as these have left them. What somebody has deleted stays deleted: turns that
        follow are kept as a conversation of their own.

        Returns:
            Whether it is another conversation from now on, because it was deleted.
        """
        now = time.time()
        with self._transaction() as connection:
            key, turns = conversation.key, conversation.turns
            if key is not None and not _has(connection, key):
                if _gave(connection, key):
                    turns = [turn for turn in turns if turn.key is None]
                else:  # another file has taken the place of the one that it was kept in
                    turns = [replace(turn, key=None) for turn in turns]
                key = None
            deleted = key is None and conversation.key is not None
            following = len(turns) < len(conversation.turns)
            if key is None and not turns:
                return False  # nothing follows yet
            title = title_of(turns[0].question) if following else conversation.title
            system = None if conversation.system is None else encodable(conversation.system)
            heading = {"title": encodable(title), "system": system}
            new = key is None
            if key is None:
                created = now if following else conversation.created
                key = connection.execute(
                    "INSERT INTO conversations (title, model, system, updated, created) "
                    "VALUES (?, ?, ?, ?, ?)",
                    (heading["title"], encodable(conversation.model), system, now, created),
                ).lastrowid
            kept = [
                turn if turn.key is not None else self._insert(connection, key or 0, turn) for turn in turns
            ]
            if not new:
                for taken in conversation.taken_back:
                    connection.execute("UPDATE turns SET taken_back = ? WHERE id = ?", (now, taken))
                changed = {"updated": now, **_changed(heading, conversation.kept)}
                if conversation.taken_back or any(turn.key is None for turn in turns):
                    changed["model"] = _answered_last(connection, key) or encodable(conversation.model)
                if changed.get("title") == "":  # what is left, if anything, others have appended
                    changed["title"] = _first_title(connection, key)
                assigned = ", ".join(f"{column} = ?" for column in changed)
                connection.execute(
                    f"UPDATE conversations SET {assigned} WHERE id = ?", (*changed.values(), key)
                )
        before = conversation.turns[: len(conversation.turns) - len(kept)]
        conversation.key, conversation.turns[:], conversation.taken_back = key, [*before, *kept], []
        conversation.title, conversation.kept = title, heading
        return deleted and following

    @staticmethod
    def _insert(connection: sqlite3.Connection, key: int, turn: Turn) -> Turn:
        texts = [
            encodable(text) for text in (turn.question, turn.answer, turn.thinking, turn.mark, turn.model)
        ]
        added = connection.execute(
            "INSERT INTO turns (conversation, question, answer, thinking, mark, model, created) "
            "VALUES (?, ?, ?, ?, ?, ?, ?)",
            (key, *texts, turn.created or time.time()),
        )
        return replace(turn, key=added.lastrowid)

    def get(self, key: int, *, all_turns: bool = False) -> Conversation:
        """A conversation with its turns.

        Args:
            key: Its number.
            all_turns: Those that were taken back too.

        Raises:
            SessionNotFoundError: There is none of this number.
        """
        with self._explained():
            row = self._connection.execute(
                "SELECT title, model, system, created FROM conversations WHERE id = ?", (key,)
            ).fetchone()
            if row is None:
                raise SessionNotFoundError(
                    f"there is no conversation {key}", hint="`moechat sessions` lists them"
                )
            rows = self._connection.execute(
                "SELECT question, answer, thinking, mark, model, created, id FROM turns "
                "WHERE conversation = ? AND (taken_back IS NULL OR ?) ORDER BY id",
                (key, all_turns),
            ).fetchall()
            for values in (row, *rows):
                self._require_texts(key, values)
            turns = [Turn(*values) for values in rows]
        title, model, system, created = row
        kept = {"title": title, "system": system}
        return Conversation(turns, system, key=key, title=title, model=model, created=created, kept=kept)

    def last(self, model: str) -> Conversation | None:
        """The conversation with this model that was used last, else with any; ``None`` if there is none.

        Those of which every turn was taken back do not count, here and in lists.
        """
        with self._explained():
            row = self._connection.execute(
                f"SELECT id FROM conversations WHERE {_HAS_TURNS} "
                "ORDER BY model = ? DESC, updated DESC, id DESC LIMIT 1",
                (model,),
            ).fetchone()
        return None if row is None else self.get(row[0])

    def summaries(self, *, limit: int | None = None) -> list[Summary]:
        """All conversations, the one used last first."""
        return self._summaries(_HAS_TURNS, (), limit)

    def _summaries(self, where: str, values: tuple[object, ...], limit: int | None) -> list[Summary]:
        with self._explained():
            rows = self._connection.execute(
                "SELECT id, title, model, created, updated, (SELECT count(*) FROM turns "
                "WHERE conversation = conversations.id AND taken_back IS NULL) FROM conversations "
                f"WHERE {where} ORDER BY updated DESC, id DESC LIMIT ?",
                (*values, -1 if limit is None else limit),
            ).fetchall()
        for row in rows:
            self._require_texts(row[0], row)
        return [Summary(*row) for row in rows]

    def _require_texts(self, key: int, values: tuple[object, ...]) -> None:
        """Bytes, which SQLite keeps as they are in a column of texts too, are none."""
        if any(isinstance(value, bytes) for value in values):
            raise SessionsUnavailableError(
                f"{self._path}: the database is damaged (conversation {key} has bytes in place of a text)",
                hint=f"`moechat sessions rm {key}` deletes that conversation; or {_ANEW}",
            )

    def search(self, text: str, *, limit: int | None = None) -> list[Summary]:
        """Conversations in which all words occur in one turn, the one used last first.

        Words of ASCII letters and digits are looked up in SQLite's index of words where it has one (they may
        be cut short at their end). Others (the index takes a run of Chinese or Japanese for one word, and
        knows no punctuation), and what that does not find, are found by comparing texts.
        """
        words = encodable(text).split()
        if not words:
            return []
        found: dict[int, str] = {}
        if all(word.isalnum() for word in words):
            # No such module in this SQLite, or the file cannot be written: then there is no index.
            with suppress(SessionsUnavailableError, sqlite3.Error), self._transaction() as connection:
                found = by_index(connection, words)
        if not found or not all(word.isascii() for word in words):
            with self._explained():
                found = by_comparing(self._connection, words) | found
        if not found:
            return []
        marks = ", ".join("?" * len(found))
        summaries = self._summaries(f"id IN ({marks})", tuple(found), limit)
        return [replace(summary, found=found[summary.key]) for summary in summaries]

    def delete(self, key: int) -> str:
        """Delete a conversation for good, even one that cannot be read.

        Returns:
            Its title.

        Raises:
            SessionNotFoundError: There is none of this number.
        """
        with self._transaction() as connection:
            with suppress(sqlite3.OperationalError):  # a SQLite without such indexes
                connection.execute("DROP TABLE IF EXISTS words")  # the next search makes it anew
            row = connection.execute("SELECT title FROM conversations WHERE id = ?", (key,)).fetchone()
            connection.execute("DELETE FROM conversations WHERE id = ?", (key,))
        if row is None:
            raise SessionNotFoundError(
                f"there is no conversation {key}", hint="`moechat sessions` lists them"
            )
        with self._explained():  # its text is not to stay in the log of changes
            self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        return row[0] if isinstance(row[0], str) else ""

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._explained():
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection
                self._connection.execute("COMMIT")
            except BaseException:
                with suppress(sqlite3.Error):
                    self._connection.execute("ROLLBACK")
                raise

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except NewerSchemaError as error:
            raise SessionsUnavailableError(
                f"{self._path} was written by a newer moechat: {error}", hint="use that version"
            ) from error
        except sqlite3.Error as error:
            hint = None
            reason = str(error)
            if "locked" in reason:
                raise SessionsBusyError(
                    f"{self._path}: {error}", hint="another program is using it; run the same command again"
                ) from error
            damage = next((start for start in _DAMAGES if reason.startswith(start)), None)
            if damage is not None:
                reason = f"the database is damaged ({_DAMAGES[damage] or reason})"
                hint = _ANEW
            elif "full" in reason:
                hint = "free some space"
            elif "readonly" in reason or "unable to open" in reason:
                hint = "it and its directory must be writable for you; MOECHAT_HOME moves them elsewhere"
            elif not isinstance(error, sqlite3.OperationalError):
                hint = _ANEW
            raise SessionsUnavailableError(f"{self._path}: {reason}", hint=hint) from error
        except OSError as error:
            raise SessionsUnavailableError(f"{self._path}: {error.strerror}", hint=None) from error


def _prepared(connection: sqlite3.Connection) -> sqlite3.Connection:
    """The connection, in the current form; closed if that cannot be."""
    try:
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute("PRAGMA secure_delete = ON")
        migrate(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def _may_write(path: Path) -> bool:
    return all(os.access(place, os.W_OK, effective_ids=True) for place in (path, path.parent))


def _has(connection: sqlite3.Connection, key: int) -> bool:
    return connection.execute("SELECT 1 FROM conversations WHERE id = ?", (key,)).fetchone() is not None


def _changed(now: dict[str, str | None], before: dict[str, str | None]) -> dict[str, str | None]:
    return {name: value for name, value in now.items() if name not in before or before[name] != value}


def _answered_last(connection: sqlite3.Connection, key: int | None) -> str | None:
    """Whose answer is the last in a conversation, whichever process has appended it; ``None``: nobody's."""
    row = connection.execute(
        "SELECT model FROM turns WHERE conversation = ? AND taken_back IS NULL AND model <> '' "
        "ORDER BY id DESC LIMIT 1",
        (key,),
    ).fetchone()
    return None if row is None else row[0]


def _first_title(connection: sqlite3.Connection, key: int | None) -> str:
    row = connection.execute(
        "SELECT question FROM turns WHERE conversation = ? AND taken_back IS NULL ORDER BY id LIMIT 1", (key,)
    ).fetchone()
    return "" if row is None or not isinstance(row[0], str) else title_of(row[0])


def _gave(connection: sqlite3.Connection, key: int) -> bool:
    """Whether this database has given a number once; they are never given twice."""
    row = connection.execute("SELECT seq FROM sqlite_sequence WHERE name = 'conversations'").fetchone()
    return row is not None and key <= row[0]
