"""An answer on a terminal as it streams: finished blocks rendered, the unfinished rest as plain text.

The rest is only ever appended to. When its block is finished, its rows are taken off the screen and the
rendered block is put there, in one write, so that nothing flickers. Rows are folded here and not by the
terminal, so that their number is known; where it no longer is, because the window became narrower or the rest
is taller than it, the block stays as plain text.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TextIO

from moechat.chat.blocks import BlockSplitter, Unit
from moechat.chat.markdown import Renderer
from moechat.chat.neutral import neutralise
from moechat.chat.output import write_output

_TAB = "    "
_VARIATION_16 = "\ufe0f"


def cells(text: str) -> int:
    """Most cells that a terminal may take for a text; terminals differ about joined emoji."""
    from rich.cells import get_character_cell_size

    # The selector makes the character before it wide, on the terminals that know it.
    return sum(1 if char == _VARIATION_16 else get_character_cell_size(char) for char in text)


class Rows:
    """Plain text in rows of at most ``width`` cells, folded between words.

    Attributes:
        count: Rows begun; 0 before anything was written.
        widest: Cells of the widest row so far.
    """

    def __init__(self, width: int) -> None:
        self._width = max(2, width)
        self._row = ""
        self._cells = 0
        self.count = 0
        self.widest = 0

    def resize(self, width: int) -> None:
        """Fold at another width from now on; no row may be wider than it."""
        self._width = max(2, width)

    def add(self, text: str) -> str:
        """What to write to the terminal so that the text stands there too."""
        out: list[str] = []
        for char in text.replace("\t", _TAB):
            if self.count == 0:
                self.count = 1
            if char == "\n":
                out.append(self._next_row(""))
                continue
            taken = cells(char)
            if self._cells + taken > self._width:
                if char == " ":
                    out.append(self._next_row(""))
                    continue
                out.append(self._fold(taken))
            self._row += char
            self._cells += taken
            self.widest = max(self.widest, self._cells)
            out.append(char)
        return "".join(out)

    def erase(self) -> str:
        """What to write to take everything off the screen; the cursor is then where it was at first."""
        if self.count == 0:
            return ""
        up = f"\x1b[{self.count - 1}A" if self.count > 1 else ""
        return f"\r{up}\x1b[J"

    def _fold(self, taken: int) -> str:
        """Begin a row with the word that the last one ends with, if that is not all of it and fits beside a
        character of so many cells.
        """
        _, blank, word = self._row.rpartition(" ")
        back = cells(word)
        if not blank or not word or back + taken > self._width:
            return self._next_row("")
        return f"\x1b[{back}D\x1b[K" + self._next_row(word) + word

    def _next_row(self, word: str) -> str:
        self._row, self._cells = word, cells(word)
        self.count += 1
        return "\n"


class MarkdownAnswer:
    """Renders an answer as it streams.

    Args:
        stream: A terminal that can move its cursor.
        size: Gives columns and rows.
    """

    # Invariant: the screen shows, from top to bottom, the finished units and then _rows, which hold the
    # splitter's pending lines and _line; with _as_it_is they cannot be taken back any more, and stay.
    def __init__(self, stream: TextIO, size: Callable[[], tuple[int, int]] | None = None) -> None:
        self._stream = stream
        self._size = size or (lambda: _size_of(stream))
        self._renderer = Renderer(stream)
        self._splitter = BlockSplitter()
        self._columns = self._size()[0]
        self._rows = Rows(self._columns - 1)
        self._line = ""
        self._as_it_is = False
        self._moved = False  # somebody else has written to the terminal
        self._last = "\n"

    def moved(self) -> None:
        """Take notice that the cursor is elsewhere, at the beginning of a row: the program was stopped and
        goes on, say. What is unfinished stays where it was. May be called in a handler of signals.
        """
        self._moved = True

    def write(self, text: str) -> None:
        """Show a piece of text at once."""
        if not text:
            return
        self._resized()
        out: list[str] = []
        *lines, rest = neutralise(text).split("\n")
        for line in lines:
            self._line += line
            out.append(self._plain(line))
            out.append(self._end_line())
        self._line += rest
        out.append(self._plain(rest))
        self._put("".join(out))

    def end(self) -> None:
        """Render what is left, and end the line."""
        self._resized()
        line, self._line = self._line, ""
        units = self._splitter.end(line)
        if self._as_it_is:
            out = "" if self._last == "\n" else "\n"
        else:
            out = self._rows.erase() + self._render(units)
        self._renderer.begin_anew()
        self._rows, self._as_it_is = Rows(self._columns - 1), False
        self._put(out)
        self._last = "\n"

    def _end_line(self) -> str:
        line, self._line = self._line, ""
        units = self._splitter.line(line)
        if not units:
            # Blank lines between blocks are the renderer's.
            return self._plain("\n") if self._splitter.pending or self._as_it_is else self._rows_gone()
        if self._as_it_is:
            out = self._plain("\n")
            for unit in units:
                self._renderer.skip(unit, gap=bool(line.strip()))
            if not self._splitter.pending:
                self._as_it_is, self._rows = False, Rows(self._columns - 1)
            return out
        out = self._rows_gone() + self._render(units)
        return out + self._plain("".join(f"{kept}\n" for kept in self._splitter.pending))

    def _rows_gone(self) -> str:
        out = self._rows.erase()
        self._rows = Rows(self._columns - 1)
        return out

    def _render(self, units: list[Unit]) -> str:
        return "".join(self._renderer.render(unit, self._columns - 1) for unit in units)

    def _plain(self, text: str) -> str:
        if not text:
            return ""
        self._last = text[-1]
        # The blank line before a block comes with its first character, and stays where it is.
        gap = not self._rows.count and self._renderer.has_gap(joined=self._splitter.joined)
        out = self._rows.add("\n" + text if gap and not self._as_it_is else text)
        if self._rows.count >= max(2, self._size()[1]):
            self._as_it_is = True  # the first rows are about to leave the screen
        return out

    def _resized(self) -> None:
        """Take notice of the window's size, and of a cursor that was moved."""
        columns = self._size()[0]
        if self._moved:
            self._moved = False
            # A block of which nothing was shown yet begins below, as ever.
            self._as_it_is = self._as_it_is or bool(self._rows.count)
            self._rows, self._last = Rows(columns - 1), "\n"
        if columns == self._columns:
            return
        self._columns = columns
        if self._rows.widest >= columns:
            # Some terminals fold these rows now, others cut them off.
            self._as_it_is = True
        if self._as_it_is:
            self._rows = Rows(columns - 1)
        else:
            self._rows.resize(columns - 1)

    def _put(self, text: str) -> None:
        if text:
            write_output(self._stream, text)


def _size_of(stream: TextIO) -> tuple[int, int]:
    try:
        size = os.get_terminal_size(stream.fileno())
    except (OSError, ValueError):
        return 80, 24
    return size.columns or 80, size.lines or 24
