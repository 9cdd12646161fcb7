"""Text of others made harmless for the user's terminal."""

from __future__ import annotations

# C0 without tab and newline, DEL, and C1: what can move the cursor, change the title or the keyboard, or
# start an escape sequence. C0 and DEL are shown as their Unicode pictures, C1 (which has none) as the
# replacement character.
_VISIBLE = {code: 0x2400 + code for code in range(0x20) if code not in (0x09, 0x0A)}
_VISIBLE[0x7F] = 0x2421
_VISIBLE |= dict.fromkeys(range(0x80, 0xA0), 0xFFFD)
# Embeddings, overrides and isolates of bidirectional text: what follows them would be read in another order
# than it is written. The marks (U+061C, U+200E, U+200F) only help neighbours, as Arabic and Hebrew need; but
# in a name they may mislead.
_VISIBLE |= dict.fromkeys([*range(0x202A, 0x202F), *range(0x2066, 0x206A)], 0xFFFD)
_ONE_LINE = {0x09: 0x2409, 0x0A: 0x240A, 0x2028: 0x240A, 0x2029: 0x240A}
_ONE_LINE |= dict.fromkeys([0x061C, 0x200E, 0x200F], 0xFFFD)


def neutralise(text: str) -> str:
    """The text with every control character but newline and tab, also those that turn the direction of text,
    replaced by a visible one.
    """
    return text.translate(_VISIBLE)


def one_line(text: str) -> str:
    """The same for what must stay on one line, such as names of files: newlines and tabs are shown too."""
    return neutralise(text).translate(_ONE_LINE)


def encodable(text: str) -> str:
    """The text with lone surrogates, which stand for bytes that are not UTF-8, as replacement characters."""
    return text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
