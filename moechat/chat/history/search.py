"""Words in conversations that are kept."""

from __future__ import annotations

import sqlite3
import unicodedata


def by_index(connection: sqlite3.Connection, words: list[str]) -> dict[int, str]:
    """Conversations in which one turn has all words, with where, the best last; by SQLite's index of words.

    Args:
        connection: The database, in a transaction that may write.
        words: Letters and digits; they may be cut short at their end.

    Raises:
        sqlite3.Error: There is no such index in this SQLite, or the database cannot be read or written.
    """
    query = " ".join(f'"{word}"*' for word in words)
    # Turns never change and their numbers are never given twice, so that the index needs no more than this;
    # versions of SQLite without it can write the same database.
    connection.execute("CREATE VIRTUAL TABLE IF NOT EXISTS words USING fts5 (text, tokenize = 'unicode61')")
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
    return dict(rows)


def by_comparing(connection: sqlite3.Connection, words: list[str]) -> dict[int, str]:
    """The same for whatever words are, within others too; every text is looked at.

    Raises:
        sqlite3.Error: The database cannot be read.
    """
    shape = " AND ".join(["instr(folded(question || char(10) || answer), ?)"] * len(words))
    connection.create_function("folded", 1, _folded, deterministic=True)
    rows = connection.execute(
        "SELECT conversation, question || char(10) || answer FROM turns "
        f"WHERE taken_back IS NULL AND {shape} ORDER BY id",
        [_folded(word) for word in words],
    ).fetchall()
    return {key: _around(text, words[0]) for key, text in rows}


def _folded(text: str) -> str:
    """A text without what readers do not tell apart: capitals, wide letters, composed marks."""
    return unicodedata.normalize("NFKC", text.casefold())


def _around(text: str, word: str) -> str:
    place = max(0, text.lower().find(word.lower()))
    start, end = max(0, place - 30), place + 50
    return ("…" if start else "") + " ".join(text[start:end].split()) + ("…" if end < len(text) else "")
