"""Conversations kept in a SQLite database in the user's state directory.

Every call is one transaction; processes may use the database at the same time.
"""

from __future__ import annotations

import errno
import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import quote

from moechat.config import user_paths
from moechat.errors import (
    SessionNotFoundError,
    SessionsBusyError,
    SessionsFullError,
    SessionsUnavailableError,
)
from moechat.history.conversation import Conversation, Turn, title_of
from moechat.history.database_schema import NewerSchemaError, migrate
from moechat.history.search import by_comparing, by_index
from moechat.safe_text import encodable

_BUSY_TIMEOUT_S = 1.0
_FILE = "sessions.db"
_FULL = (errno.ENOSPC, errno.EDQUOT)
_FULL_HINT = "free some space"
_REPLACE_HINT = "move that file away; a new one is made then"
# Beginnings of SQLite errors that damaged files cause, and clearer messages.
_DAMAGE_ERRORS = {
    "no such table": "",
    "no such column": "",
    "Could not decode": "",
    "user-defined function": "a text in it cannot be read",
}
_HAS_TURNS = "EXISTS (SELECT 1 FROM turns WHERE conversation = conversations.id AND taken_back IS NULL)"


def sessions_path() -> Path:
    """Path of the database."""
    return user_paths().state / _FILE


@dataclass(frozen=True)
class Summary:
    """A conversation in a list.

    Attributes:
        created: Seconds since 1970.
        updated: Time of the last turn, in seconds since 1970.
        turns: Number of turns, without undone ones.
        found: Text around the words of a search; empty without a search.
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
        path: The file; created with its directory, readable for the user alone, unless ``existing``.
        existing: Only read; a missing file is an empty database.

    Raises:
        SessionsUnavailableError: The database is locked, damaged, of a newer version, or cannot be written.
            All other methods raise it too.
    """

    def __init__(self, path: Path, *, existing: bool = False) -> None:
        self._path = path
        with self._translated_errors():
            if path.is_dir():
                raise SessionsUnavailableError(
                    f"{path} is a directory", hint="move it away; a new database is made in its place then"
                )
            if existing and not path.exists():
                self._connection = _set_up(sqlite3.connect(":memory:", isolation_level=None))
                return
            try:
                self._connection = _set_up(self._open())
            except (sqlite3.OperationalError, OSError):
                if not existing or _may_write(path):
                    raise
                self._connection = self._open_to_read()

    def _open_to_read(self) -> sqlite3.Connection:
        """Open a database that cannot be written.

        SQLite's write-ahead log needs files beside the database, except with ``immutable``.
        """
        place = f"file:{quote(str(self._path.absolute()))}?mode=ro"
        try:
            return _set_up(sqlite3.connect(place, uri=True, isolation_level=None))
        except sqlite3.OperationalError:
            return _set_up(sqlite3.connect(f"{place}&immutable=1", uri=True, isolation_level=None))

    def _open(self) -> sqlite3.Connection:
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # SQLite's other files inherit the mode of this one.
        with suppress(FileExistsError):
            os.close(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
        for file in (self._path, *(Path(f"{self._path}{end}") for end in ("-wal", "-shm"))):
            with suppress(OSError):  # not there, or not ours
                if file.stat().st_mode & 0o077:
                    file.chmod(0o600)
        connection = sqlite3.connect(self._path, timeout=_BUSY_TIMEOUT_S, isolation_level=None)
        # Optional: some network disks do not support it.
        with suppress(sqlite3.OperationalError):
            connection.execute("PRAGMA journal_mode = WAL")
        return connection

    def __enter__(self) -> Sessions:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; may be called again."""
        self._connection.close()

    def keep(self, conversation: Conversation) -> bool:
        """Store new turns and changes of a conversation, and set its key and those of its turns.

        Turns are appended after those of other processes; an unchanged title or system prompt does not
        overwrite theirs. A conversation deleted by another process stays deleted: new turns are stored as a
        new conversation.

        Returns:
            Whether the conversation was deleted, so that it continues under a new key.
        """
        now = time.time()
        with self._transaction() as connection:
            key, turns = conversation.key, conversation.turns
            if key is not None and not _has(connection, key):
                if _was_assigned(connection, key):
                    turns = [turn for turn in turns if turn.key is None]
                else:  # the database file was replaced
                    turns = [replace(turn, key=None) for turn in turns]
                key = None
            deleted = key is None and conversation.key is not None
            following = len(turns) < len(conversation.turns)
            if key is None and not turns:
                return False  # no new turns yet
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
                for undone in conversation.undone:
                    connection.execute("UPDATE turns SET taken_back = ? WHERE id = ?", (now, undone))
                changed = {"updated": now, **_changed(heading, conversation.kept)}
                if conversation.undone or any(turn.key is None for turn in turns):
                    changed["model"] = _last_model(connection, key) or encodable(conversation.model)
                if changed.get("title") == "":  # remaining turns, if any, came from other processes
                    changed["title"] = _first_title(connection, key)
                assigned = ", ".join(f"{column} = ?" for column in changed)
                connection.execute(
                    f"UPDATE conversations SET {assigned} WHERE id = ?", (*changed.values(), key)
                )
        before = conversation.turns[: len(conversation.turns) - len(kept)]
        conversation.key, conversation.turns[:], conversation.undone = key, [*before, *kept], []
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
            all_turns: Include undone turns.

        Raises:
            SessionNotFoundError: There is no conversation with this number.
        """
        with self._translated_errors():
            row = self._connection.execute(
                "SELECT title, model, system, created FROM conversations WHERE id = ?", (key,)
            ).fetchone()
            if row is None:
                raise _no_conversation(key)
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
        """The last conversation with this model, else with any model; ``None`` if there is none.

        Conversations with only undone turns do not count, here and in lists.
        """
        with self._translated_errors():
            row = self._connection.execute(
                f"SELECT id FROM conversations WHERE {_HAS_TURNS} "
                "ORDER BY model = ? DESC, updated DESC, id DESC LIMIT 1",
                (model,),
            ).fetchone()
        return None if row is None else self.get(row[0])

    def beginning_with(self, turn: Turn) -> list[int]:
        """The conversations whose first turn has this question and answer, the one used last first."""
        with self._translated_errors():
            rows = self._connection.execute(
                "SELECT conversation FROM turns JOIN conversations ON conversations.id = conversation "
                "WHERE question = ? AND answer = ? AND turns.id = (SELECT min(id) FROM turns AS all_turns "
                "WHERE all_turns.conversation = turns.conversation AND taken_back IS NULL) "
                "ORDER BY updated DESC, conversations.id DESC",
                (encodable(turn.question), encodable(turn.answer)),
            ).fetchall()
        return [row[0] for row in rows]

    def summaries(self, *, limit: int | None = None) -> list[Summary]:
        """All conversations, the one used last first."""
        return self._summaries(_HAS_TURNS, (), limit)

    def summary(self, key: int) -> Summary:
        """One conversation as in a list, also without turns.

        Raises:
            SessionNotFoundError: There is no conversation with this number.
        """
        found = self._summaries("id = ?", (key,), 1)
        if not found:
            raise _no_conversation(key)
        return found[0]

    def _summaries(self, where: str, values: tuple[object, ...], limit: int | None) -> list[Summary]:
        with self._translated_errors():
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
        """Check for bytes in place of text, which SQLite accepts in any column."""
        if any(isinstance(value, bytes) for value in values):
            raise SessionsUnavailableError(
                f"{self._path}: the database is damaged (conversation {key} has bytes in place of a text)",
                hint=f"`moechat sessions rm {key}` deletes that conversation; or {_REPLACE_HINT}",
            )

    def search(self, text: str, *, limit: int | None = None) -> list[Summary]:
        """Conversations with all words in one turn, last used first.

        Prefixes of ASCII words are looked up in SQLite's full-text index, if it has one. Other words are
        found by comparing texts, because the index treats a run of Chinese or Japanese as one word and
        ignores punctuation; so are words that the index does not find.
        """
        words = encodable(text).split()
        if not words:
            return []
        found: dict[int, str] = {}
        if all(word.isalnum() for word in words):
            # Without the module in this SQLite, or write access, there is no index.
            with suppress(SessionsUnavailableError, sqlite3.Error), self._transaction() as connection:
                found = by_index(connection, words)
        if not found or not all(word.isascii() for word in words):
            with self._translated_errors():
                found = by_comparing(self._connection, words) | found
        if not found:
            return []
        marks = ", ".join("?" * len(found))
        summaries = self._summaries(f"id IN ({marks})", tuple(found), limit)
        return [replace(summary, found=found[summary.key]) for summary in summaries]

    def delete(self, key: int) -> str:
        """Delete a conversation, even an unreadable one, without a trace in the file.

        Returns:
            Its title.

        Raises:
            SessionNotFoundError: There is no conversation with this number.
        """
        with self._transaction() as connection:
            with suppress(sqlite3.OperationalError):  # SQLite without full-text indexes
                connection.execute("DROP TABLE IF EXISTS words")  # the next search creates it again
            row = connection.execute("SELECT title FROM conversations WHERE id = ?", (key,)).fetchone()
            connection.execute("DELETE FROM conversations WHERE id = ?", (key,))
        if row is None:
            raise _no_conversation(key)
        with self._translated_errors():  # remove its text from the write-ahead log
            self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        return row[0] if isinstance(row[0], str) else ""

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._translated_errors():
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection
                self._connection.execute("COMMIT")
            except BaseException:
                with suppress(sqlite3.Error):
                    self._connection.execute("ROLLBACK")
                raise

    @contextmanager
    def _translated_errors(self) -> Iterator[None]:
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
            damage = next((start for start in _DAMAGE_ERRORS if reason.startswith(start)), None)
            if damage is not None:
                reason = f"the database is damaged ({_DAMAGE_ERRORS[damage] or reason})"
                hint = _REPLACE_HINT
            elif "full" in reason:
                raise SessionsFullError(f"{self._path}: {reason}", hint=_FULL_HINT) from error
            elif "readonly" in reason or "unable to open" in reason:
                hint = "it and its directory must be writable for you; MOECHAT_HOME moves them elsewhere"
            elif not isinstance(error, sqlite3.OperationalError):
                hint = _REPLACE_HINT
            raise SessionsUnavailableError(f"{self._path}: {reason}", hint=hint) from error
        except OSError as error:
            if error.errno in _FULL:
                raise SessionsFullError(f"{self._path}: {error.strerror}", hint=_FULL_HINT) from error
            raise SessionsUnavailableError(f"{self._path}: {error.strerror}", hint=None) from error


def _no_conversation(key: int) -> SessionNotFoundError:
    return SessionNotFoundError(f"there is no conversation {key}", hint="`moechat sessions` lists them")


def _set_up(connection: sqlite3.Connection) -> sqlite3.Connection:
    """Set up and migrate a connection; closes it on failure."""
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


def _last_model(connection: sqlite3.Connection, key: int | None) -> str | None:
    """The model of the last answer in a conversation, from any process; ``None`` if unknown."""
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


def _was_assigned(connection: sqlite3.Connection, key: int) -> bool:
    """Whether this database ever assigned a number; numbers are never reused."""
    row = connection.execute("SELECT seq FROM sqlite_sequence WHERE name = 'conversations'").fetchone()
    return row is not None and key <= row[0]
