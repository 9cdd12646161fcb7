"""Full-text search in stored conversations."""

from __future__ import annotations

import sqlite3
import unicodedata


def by_index(connection: sqlite3.Connection, words: list[str]) -> dict[int, str]:
    """Search with SQLite's full-text index.

    Args:
        connection: The database, in a writing transaction.
        words: Prefixes of words, of letters and digits.

    Returns:
        Conversations with all words in one turn, with the text around them, the best match last.

    Raises:
        sqlite3.Error: This SQLite has no full-text index, or the database cannot be read or written.
    """
    query = " ".join(f'"{word}"*' for word in words)
    # Turns never change and their numbers are never reused, so the index only needs new turns. It is filled
    # here, so that a SQLite without full-text search can write the same database.
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
    """Like :func:`by_index` by comparing every text: finds any characters, also inside words.

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
    """Normalise case, width and composition of characters."""
    return unicodedata.normalize("NFKC", text.casefold())


def _around(text: str, word: str) -> str:
    place = max(0, text.lower().find(word.lower()))
    start, end = max(0, place - 30), place + 50
    return ("…" if start else "") + " ".join(text[start:end].split()) + ("…" if end < len(text) else "")
