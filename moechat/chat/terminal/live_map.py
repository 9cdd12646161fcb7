"""A map of experts that stays below the text of an answer while the answer is written."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Any, TextIO, cast

from moechat.errors import MoechatError

if TYPE_CHECKING:
    from moechat.steps import Step

# At most 8 maps a second, and at most a fiftieth of the time for them.
_LEAST_PAUSE_S, _PAUSE_PER_COST = 0.125, 50.0
# Less than half of the window is for the map; with fewer rows there is none.
_LEAST_WINDOW_ROWS = 8
_BLANK_ROWS = 1  # between text and map
# Whatever may leave the row of the cursor: newlines, and control sequences other than colors.
_LEAVES_ROW = re.compile(r"[\n\r]|\x1b(?!\[[0-9;]*m)")
_ERASE_BELOW, _SAVE, _RESTORE, _DOWN = "\x1b[J", "\x1b7", "\x1b8", "\x1bD"

Draw = Callable[[int, int], Sequence[str]]


class LiveMap:
    """Draws the map below the cursor and puts the cursor back.

    Text of the same terminal has to go through :meth:`over`: the map moves down with it. Rows of text must be
    broken before the terminal does it, at a column less than its width.

    Args:
        stream: A terminal that can move its cursor.
        draw: Returns the lines of the map now, given most columns and most rows; each ends with normal
            colors.
        keep: Leave the last map below the answer; otherwise it is erased.
        size: Returns columns and rows of the window.
        clock: Seconds.
    """

    # Invariant: between two calls, the rows below the cursor hold a blank row and _lines, or nothing of ours
    # if _lines is empty; the window has these rows below the cursor.
    def __init__(
        self,
        stream: TextIO,
        draw: Draw,
        *,
        keep: bool,
        size: Callable[[], tuple[int, int]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream = stream
        self._draw = draw
        self._keep = keep
        self._window = size or (lambda: _size_of(stream))
        self._clock = clock
        self._drawn_for = (0, 0)
        self._lines: list[str] = []
        self._due = 0.0

    def over(self, inner: TextIO) -> TextIO:
        """A stream whose text stays above the map; the stream itself if it is no terminal or another one."""
        if not _same_terminal(inner, self._stream):
            return inner
        return cast(TextIO, _Above(inner, self))

    def size(self) -> tuple[int, int]:
        """Columns of the window, and its rows that the map leaves to the text."""
        columns, rows = self._window()
        return columns, max(2, rows - self._taken)

    def following(self, steps: Iterator[Step]) -> Generator[Step]:
        """The steps, with the map refreshed after each one is shown."""
        with closing(cast("Generator[Step]", steps)) as open_steps:
            for step in open_steps:
                yield step
                self.refresh()

    def refresh(self) -> None:
        """Draw the map as it is now, unless that was done a moment ago."""
        started = self._clock()
        if started < self._due:
            return
        columns, rows = window = self._window()
        most = (rows - 1) // 2 - _BLANK_ROWS
        try:
            lines = list(self._draw(columns - 1, most)) if rows >= _LEAST_WINDOW_ROWS else []
        except MoechatError:  # a server that has the model may be gone; its answer will say so
            lines = []
        if window != self._drawn_for or len(lines) != len(self._lines):
            out = _ERASE_BELOW + _below(lines)
        else:
            out = _changes(self._lines, lines)
        self._lines, self._drawn_for = lines, window
        self._put(out)
        ended = self._clock()
        self._due = ended + max(_LEAST_PAUSE_S, _PAUSE_PER_COST * (ended - started))

    def above(self, text: str) -> str:
        """The output that writes a text where the cursor is, and has the map below it."""
        if not self._lines or not _LEAVES_ROW.search(text):
            return text
        return _ERASE_BELOW + text + _below(self._lines)

    def moved(self) -> None:
        """Note that another program has moved the cursor. May be called in a signal handler."""
        self._lines, self._due = [], 0.0

    def end(self) -> None:
        """Leave the last map behind or erase it; may be called again.

        The cursor must be at the beginning of a row.
        """
        if not self._lines:
            return
        lines, self._lines = self._lines, []
        self._due = float("inf")
        self._put(_ERASE_BELOW + ("".join(f"{line}\n" for line in ["", *lines]) if self._keep else ""))

    @property
    def _taken(self) -> int:
        return len(self._lines) + _BLANK_ROWS if self._lines else 0

    def _put(self, text: str) -> None:
        # stdout may still be open when the terminal is closed.
        with suppress(OSError, ValueError):
            if text:
                self._stream.write(text)
                self._stream.flush()


def live_map(
    find_map: Callable[[], Any], format_map: Callable[[Any, int, int], Sequence[str]], *, keep: bool
) -> LiveMap:
    """A map of an engine's experts on stderr; see :class:`LiveMap`.

    Args:
        find_map: Returns where its experts are now; ``None``: nothing is known about that.
        format_map: Returns the lines of a map within most columns and most rows.
        keep: Leave the last map below the answer.
    """

    def draw(columns: int, rows: int) -> Sequence[str]:
        found = find_map()
        return [] if found is None else format_map(found, columns, rows)

    return LiveMap(sys.stderr, draw, keep=keep)


class _Above:
    """A terminal's stream whose text has a map below it."""

    def __init__(self, inner: TextIO, live: LiveMap) -> None:
        self._inner = inner
        self._live = live

    def write(self, text: str) -> int:
        self._inner.write(self._live.above(text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def _below(lines: Sequence[str]) -> str:
    """Draw lines below the cursor, which stays; the window scrolls where it has too few rows."""
    if not lines:
        return ""
    count = len(lines) + _BLANK_ROWS
    body = "".join(f"\r\n{line}\x1b[K" for line in [*[""] * _BLANK_ROWS, *lines])
    return f"{_DOWN * count}\x1b[{count}A{_SAVE}{body}{_RESTORE}"


def _changes(before: Sequence[str], lines: Sequence[str]) -> str:
    """Draw the lines that have changed."""
    out, at = "", 0  # rows below the text's
    for row, (old, line) in enumerate(zip(before, lines, strict=True), 1 + _BLANK_ROWS):
        if line != old:
            out += f"\r\x1b[{row - at}B{line}\x1b[K"
            at = row
    return f"{_SAVE}{out}{_RESTORE}" if out else ""


def _same_terminal(one: TextIO, other: TextIO) -> bool:
    if one is other:
        return True
    try:
        return one.isatty() and os.fstat(one.fileno()).st_rdev == os.fstat(other.fileno()).st_rdev
    except (OSError, ValueError):
        return False


def _size_of(stream: TextIO) -> tuple[int, int]:
    try:
        size = os.get_terminal_size(stream.fileno())
    except (OSError, ValueError):
        return 80, 24
    return size.columns or 80, size.lines or 24
