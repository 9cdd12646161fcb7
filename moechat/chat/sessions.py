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

from moechat.chat.conversation import Conversation, Turn, title_of
from moechat.chat.neutral import encodable
from moechat.chat.schema import NewerSchemaError, migrate
from moechat.config import user_paths
from moechat.errors import SessionNotFoundError, SessionsUnavailableError

_PATIENCE_S = 1.0
_FILE = "sessions.db"


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
            if existing and not path.exists():
                self._connection = sqlite3.connect(":memory:", isolation_level=None)
            else:
                self._connection = self._open()
            try:
                self._connection.execute("PRAGMA foreign_keys = ON")
                self._connection.execute("PRAGMA secure_delete = ON")
                migrate(self._connection)
            except BaseException:
                self._connection.close()
                raise

    def _open(self) -> sqlite3.Connection:
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # SQLite gives its other files the mode of this one.
        with suppress(FileExistsError):
            os.close(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
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

    def keep(self, conversation: Conversation) -> None:
        """Write what is new or changed of a conversation, and give it and its turns their keys.

        Turns are appended to what other processes have appended meanwhile.
        """
        now = time.time()
        system = None if conversation.system is None else encodable(conversation.system)
        values = (encodable(conversation.title), encodable(conversation.model), system, now)
        with self._transaction() as connection:
            key = conversation.key
            # Another process may have deleted it; then it is kept anew, whole.
            if key is not None:
                found = connection.execute(
                    "UPDATE conversations SET title = ?, model = ?, system = ?, updated = ? WHERE id = ?",
                    (*values, key),
                )
                key = key if found.rowcount else None
            fresh = key is None
            if key is None:
                key = connection.execute(
                    "INSERT INTO conversations (title, model, system, updated, created) "
                    "VALUES (?, ?, ?, ?, ?)",
                    (*values, conversation.created),
                ).lastrowid
            turns = [
                turn if turn.key is not None and not fresh else self._insert(connection, key or 0, turn)
                for turn in conversation.turns
            ]
            for taken in conversation.taken_back:
                connection.execute("UPDATE turns SET taken_back = ? WHERE id = ?", (now, taken))
        conversation.key, conversation.turns[:], conversation.taken_back = key, turns, []

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
            turns = [
                Turn(*values)
                for values in self._connection.execute(
                    "SELECT question, answer, thinking, mark, model, created, id FROM turns "
                    "WHERE conversation = ? AND (taken_back IS NULL OR ?) ORDER BY id",
                    (key, all_turns),
                )
            ]
        title, model, system, created = row
        return Conversation(turns, system, key=key, title=title or title_of(""), model=model, created=created)

    def last(self, model: str) -> Conversation | None:
        """The conversation with this model that was used last, else with any; ``None`` if there is none."""
        with self._explained():
            row = self._connection.execute(
                "SELECT id FROM conversations ORDER BY model = ? DESC, updated DESC, id DESC LIMIT 1",
                (model,),
            ).fetchone()
        return None if row is None else self.get(row[0])

    def summaries(self, *, limit: int | None = None) -> list[Summary]:
        """All conversations, the one used last first."""
        return self._summaries("", (), limit)

    def _summaries(self, where: str, values: tuple[object, ...], limit: int | None) -> list[Summary]:
        with self._explained():
            rows = self._connection.execute(
                "SELECT id, title, model, created, updated, (SELECT count(*) FROM turns "
                "WHERE conversation = conversations.id AND taken_back IS NULL) FROM conversations "
                f"{where} ORDER BY updated DESC, id DESC LIMIT ?",
                (*values, -1 if limit is None else limit),
            ).fetchall()
        return [Summary(*row) for row in rows]

    def search(self, text: str, *, limit: int | None = None) -> list[Summary]:
        """Conversations in which all words occur in one turn, the one used last first.

        With SQLite's index of words where it has one (words may be cut short at their end), else, and where
        that finds nothing, by comparing texts.
        """
        words = encodable(text).split()
        if not words:
            return []
        found = self._by_index(words)
        if not found:
            found = self._by_comparing(words)
        if not found:
            return []
        marks = ", ".join("?" * len(found))
        summaries = self._summaries(f"WHERE id IN ({marks})", tuple(found), limit)
        return [replace(summary, found=found[summary.key]) for summary in summaries]

    def _by_index(self, words: list[str]) -> dict[int, str]:
        query = " ".join('"' + word.replace('"', '""') + '"*' for word in words)
        try:
            with self._transaction() as connection:
                # Turns never change and their numbers are never given twice, so that the index needs no more
                # than this; versions of SQLite without it can write the same database.
                connection.execute(
                    "CREATE VIRTUAL TABLE IF NOT EXISTS words USING fts5 (text, tokenize = 'unicode61')"
                )
                connection.execute(
                    "INSERT INTO words (rowid, text) SELECT id, question || char(10) || answer FROM turns "
                    "WHERE id > (SELECT coalesce(max(rowid), 0) FROM words) ORDER BY id"
                )
                rows = connection.execute(
                    "SELECT turns.conversation, snippet(words, 0, '', '', '…', 12) FROM words "
                    "JOIN turns ON turns.id = words.rowid AND turns.taken_back IS NULL "
                    "WHERE words MATCH ? ORDER BY rank DESC",
                    (query,),
                ).fetchall()
        except (SessionsUnavailableError, sqlite3.Error):  # no such module, or the file cannot be written
            return {}
        return dict(rows)

    def _by_comparing(self, words: list[str]) -> dict[int, str]:
        shape = " AND ".join(["(question || char(10) || answer) LIKE ? ESCAPE '!'"] * len(words))
        masks = ["%" + "".join("!" + c if c in "!%_" else c for c in word) + "%" for word in words]
        with self._explained():
            rows = self._connection.execute(
                "SELECT conversation, question || char(10) || answer FROM turns "
                f"WHERE taken_back IS NULL AND {shape} ORDER BY id",
                masks,
            ).fetchall()
        return {key: _around(text, words[0]) for key, text in rows}

    def delete(self, key: int) -> None:
        """Delete a conversation for good.

        Raises:
            SessionNotFoundError: There is none of this number.
        """
        with self._transaction() as connection:
            with suppress(sqlite3.OperationalError):  # a SQLite without such indexes
                connection.execute("DROP TABLE IF EXISTS words")  # the next search makes it anew
            gone = connection.execute("DELETE FROM conversations WHERE id = ?", (key,)).rowcount
        if not gone:
            raise SessionNotFoundError(
                f"there is no conversation {key}", hint="`moechat sessions` lists them"
            )
        with self._explained():  # its text is not to stay in the log of changes
            self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")

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
            if "locked" in str(error):
                hint = "another program is using it; it is tried again with the next answer"
            elif not isinstance(error, sqlite3.OperationalError):
                hint = "move that file away; a new one is made then"
            raise SessionsUnavailableError(f"{self._path}: {error}", hint=hint) from error
        except OSError as error:
            raise SessionsUnavailableError(f"{self._path}: {error.strerror}", hint=None) from error


def _around(text: str, word: str) -> str:
    place = max(0, text.lower().find(word.lower()))
    start, end = max(0, place - 30), place + 50
    return ("…" if start else "") + " ".join(text[start:end].split()) + ("…" if end < len(text) else "")
