"""The form of the database of conversations, and how older forms become it."""

from __future__ import annotations

import sqlite3

# Each entry takes the form of its index to the next; entries that were ever shipped stay as they are.
MIGRATIONS: list[str] = [
    """
    CREATE TABLE conversations (
        id INTEGER PRIMARY KEY AUTOINCREMENT,  -- never given twice: people write them down
        title TEXT NOT NULL,
        model TEXT NOT NULL,                   -- who answered last
        system TEXT,
        created REAL NOT NULL,                 -- seconds since 1970, as all times here
        updated REAL NOT NULL
    );
    CREATE TABLE turns (
        id INTEGER PRIMARY KEY AUTOINCREMENT,  -- the index of words relies on it: never given twice
        conversation INTEGER NOT NULL REFERENCES conversations (id) ON DELETE CASCADE,
        question TEXT NOT NULL,
        answer TEXT NOT NULL,
        thinking TEXT NOT NULL,
        mark TEXT NOT NULL,                    -- why the answer is not whole; empty if it is
        model TEXT NOT NULL,
        created REAL NOT NULL,
        taken_back REAL                        -- when the user took it back; kept all the same
    );
    CREATE INDEX turns_of_conversation ON turns (conversation, id);
    CREATE INDEX conversations_by_time ON conversations (updated);
    """,
]


class NewerSchemaError(sqlite3.DatabaseError):
    """The database was written by a newer version."""


def migrate(connection: sqlite3.Connection) -> None:
    """Bring a database to the current form, all steps or none; two processes may try at once.

    Raises:
        NewerSchemaError: Its form is of a newer version.
        sqlite3.Error: It is locked, damaged or cannot be written.
    """
    if _version(connection) == len(MIGRATIONS):
        return
    connection.execute("BEGIN IMMEDIATE")
    try:
        version = _version(connection)
        if version > len(MIGRATIONS):
            raise NewerSchemaError(f"it has form {version}, this version knows {len(MIGRATIONS)}")
        for script in MIGRATIONS[version:]:
            for statement in _statements(script):
                connection.execute(statement)
        connection.execute(f"PRAGMA user_version = {len(MIGRATIONS)}")
        connection.execute("COMMIT")
    except BaseException:
        connection.execute("ROLLBACK")
        raise


def _version(connection: sqlite3.Connection) -> int:
    return int(connection.execute("PRAGMA user_version").fetchone()[0])


def _statements(script: str) -> list[str]:
    """The statements of a script; executescript() would commit what has begun."""
    statements, begun = [], ""
    for line in script.splitlines(keepends=True):
        begun += line
        if sqlite3.complete_statement(begun):
            statements.append(begun)
            begun = ""
    return statements
