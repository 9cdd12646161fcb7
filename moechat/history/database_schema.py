"""The schema of the database of conversations, and migrations from older ones."""

from __future__ import annotations

import sqlite3

# Entry N migrates from schema N to N + 1. Released entries must never change.
MIGRATIONS: list[str] = [
    """
    CREATE TABLE conversations (
        id INTEGER PRIMARY KEY AUTOINCREMENT,  -- never reused: people write them down
        title TEXT NOT NULL,
        model TEXT NOT NULL,                   -- of the last answer
        system TEXT,
        created REAL NOT NULL,                 -- seconds since 1970, as all times here
        updated REAL NOT NULL
    );
    CREATE TABLE turns (
        id INTEGER PRIMARY KEY AUTOINCREMENT,  -- never reused: the full-text index relies on it
        conversation INTEGER NOT NULL REFERENCES conversations (id) ON DELETE CASCADE,
        question TEXT NOT NULL,
        answer TEXT NOT NULL,
        thinking TEXT NOT NULL,
        mark TEXT NOT NULL,                    -- why the answer is incomplete; empty if it is not
        model TEXT NOT NULL,
        created REAL NOT NULL,
        taken_back REAL                        -- when the user undid it; the row stays
    );
    CREATE INDEX turns_of_conversation ON turns (conversation, id);
    CREATE INDEX conversations_by_time ON conversations (updated);
    """,
]


class NewerSchemaError(sqlite3.DatabaseError):
    """The database was written by a newer version."""


def migrate(connection: sqlite3.Connection) -> None:
    """Migrate a database to the current schema in one transaction; safe with concurrent processes.

    Raises:
        NewerSchemaError: A newer version wrote its schema.
        sqlite3.Error: The database is locked, damaged or cannot be written.
    """
    if _version(connection) == len(MIGRATIONS):
        return
    connection.execute("BEGIN IMMEDIATE")
    try:
        version = _version(connection)
        if version > len(MIGRATIONS):
            raise NewerSchemaError(f"it has schema {version}, this version knows {len(MIGRATIONS)}")
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
    """Split a script into statements; ``executescript()`` would commit the transaction."""
    statements, begun = [], ""
    for line in script.splitlines(keepends=True):
        begun += line
        if sqlite3.complete_statement(begun):
            statements.append(begun)
            begun = ""
    return statements
