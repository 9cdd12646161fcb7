"""Makes untrusted text safe to print on a terminal."""

from __future__ import annotations

# C0 without tab and newline, DEL, and C1 can move the cursor, change title or keyboard, or start an escape
# sequence. C0 and DEL become their Unicode pictures, C1, which has none, the replacement character.
_VISIBLE = {code: 0x2400 + code for code in range(0x20) if code not in (0x09, 0x0A)}
_VISIBLE[0x7F] = 0x2421
_VISIBLE |= dict.fromkeys(range(0x80, 0xA0), 0xFFFD)
# Embeddings, overrides and isolates of bidirectional text change the order in which following text is read.
# The marks (U+061C, U+200E, U+200F) only affect neighbours, which Arabic and Hebrew need; in a name they may
# mislead.
_VISIBLE |= dict.fromkeys([*range(0x202A, 0x202F), *range(0x2066, 0x206A)], 0xFFFD)
_ONE_LINE = {0x09: 0x2409, 0x0A: 0x240A, 0x2028: 0x240A, 0x2029: 0x240A}
_ONE_LINE |= dict.fromkeys([0x061C, 0x200E, 0x200F], 0xFFFD)


def neutralise(text: str) -> str:
    """Replace control characters, except newline and tab, and direction changes by visible characters."""
    return text.translate(_VISIBLE)


def one_line(text: str) -> str:
    """Like :func:`neutralise`, also replacing newlines and tabs, for names and other single lines."""
    return neutralise(text).translate(_ONE_LINE)


def encodable(text: str) -> str:
    """Replace lone surrogates, which stand for invalid UTF-8, by replacement characters."""
    return text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
