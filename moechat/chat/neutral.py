"""Text of others made harmless for the user's terminal."""

from __future__ import annotations

# C0 without tab and newline, DEL, and C1: what can move the cursor, change the title or the keyboard, or
# start an escape sequence. C0 and DEL are shown as their Unicode pictures, C1 (which has none) as the
# replacement character.
_VISIBLE = {code: 0x2400 + code for code in range(0x20) if code not in (0x09, 0x0A)}
_VISIBLE[0x7F] = 0x2421
_VISIBLE |= dict.fromkeys(range(0x80, 0xA0), 0xFFFD)
_ONE_LINE = {0x09: 0x2409, 0x0A: 0x240A, 0x2028: 0x240A, 0x2029: 0x240A}


def neutralise(text: str) -> str:
    """The text with every control character but newline and tab replaced by a visible one."""
    return text.translate(_VISIBLE)


def one_line(text: str) -> str:
    """The same for what must stay on one line, such as names of files: newlines and tabs are shown too."""
    return neutralise(text).translate(_ONE_LINE)


def encodable(text: str) -> str:
    """The text with lone surrogates, which stand for bytes that are not UTF-8, as replacement characters."""
    return text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
