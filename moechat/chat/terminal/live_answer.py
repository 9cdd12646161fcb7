"""Streams an answer to a terminal: finished blocks rendered as markdown, the unfinished rest as plain text.

Plain text is only appended. When its block is finished, one write erases its rows and shows the rendered
block, without flicker. Rows are wrapped here, not by the terminal, so that their number is known. When the
number becomes unknown, because the window became narrower or the text is taller than the window, the block
stays plain.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TextIO

from moechat.chat.terminal.markdown import Renderer
from moechat.chat.terminal.markdown_blocks import BlockSplitter, Unit
from moechat.chat.terminal.output import write_output
from moechat.safe_text import neutralise

_TAB = "    "
_VARIATION_16 = "\ufe0f"


def cells(text: str) -> int:
    """The most cells that any terminal takes for a text; terminals differ on joined emoji."""
    from rich.cells import get_character_cell_size

    # On some terminals the selector makes the previous character wide.
    return sum(1 if char == _VARIATION_16 else get_character_cell_size(char) for char in text)


class Rows:
    """Plain text in rows of at most ``width`` cells, wrapped between words.

    Attributes:
        count: Number of rows; 0 before the first text.
        widest: Cells of the widest row so far.
    """

    def __init__(self, width: int) -> None:
        self._width = max(2, width)
        self._row = ""
        self._cells = 0
        self.count = 0
        self.widest = 0

    def resize(self, width: int) -> None:
        """Wrap at another width from now on; no row may be wider than that."""
        self._width = max(2, width)

    def add(self, text: str) -> str:
        """The output that appends a text on the terminal."""
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
                out.append(self._wrap(taken))
            self._row += char
            self._cells += taken
            self.widest = max(self.widest, self._cells)
            out.append(char)
        return "".join(out)

    def erase(self) -> str:
        """The output that erases all rows and returns the cursor to the start."""
        if self.count == 0:
            return ""
        up = f"\x1b[{self.count - 1}A" if self.count > 1 else ""
        return f"\r{up}\x1b[J"

    def _wrap(self, taken: int) -> str:
        """Start a row, moving the last word into it if the row has others and ``taken`` more cells fit."""
        _, blank, word = self._row.rpartition(" ")
        back = cells(word)
        if not blank or not word or back + taken > self._width:
            return self._next_row("")
        return f"\x1b[{back}D\x1b[K" + self._next_row(word) + word

    def _next_row(self, word: str) -> str:
        self._row, self._cells = word, cells(word)
        self.count += 1
        return "\n"


def wrapping(size: Callable[[], tuple[int, int]]) -> Callable[[str], str]:
    """A function that breaks the lines of a stream of text between words, before the terminal does.

    Args:
        size: Returns columns and rows.
    """
    rows = Rows(size()[0] - 1)

    def wrap(text: str) -> str:
        rows.resize(size()[0] - 1)
        return rows.add(text)

    return wrap


class MarkdownAnswer:
    """Renders an answer as it streams.

    Args:
        stream: A terminal that can move its cursor.
        size: Returns columns and rows.
    """

    # Invariant: the screen shows the finished units, then _rows, which hold the splitter's pending lines and
    # _line. While _stays_plain, these rows cannot be erased any more.
    def __init__(self, stream: TextIO, size: Callable[[], tuple[int, int]] | None = None) -> None:
        self._stream = stream
        self._size = size or (lambda: _size_of(stream))
        self._renderer = Renderer(stream)
        self._splitter = BlockSplitter()
        self._columns = self._size()[0]
        self._rows = Rows(self._columns - 1)
        self._line = ""
        self._stays_plain = False
        self._moved = False  # another program has written to the terminal
        self._last = "\n"

    def moved(self) -> None:
        """Note that the cursor moved to the beginning of another row, for example after Ctrl-Z and ``fg``.

        Unfinished text stays where it is. May be called in a signal handler.
        """
        self._moved = True

    def write(self, text: str) -> None:
        """Show a piece of text at once."""
        if not text:
            return
        self._check_window()
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
        """Render the rest and end the line."""
        self._check_window()
        line, self._line = self._line, ""
        units = self._splitter.end(line)
        if self._stays_plain:
            out = "" if self._last == "\n" else "\n"
        else:
            out = self._rows.erase() + self._render(units)
        self._renderer.restart()
        self._rows, self._stays_plain = Rows(self._columns - 1), False
        self._put(out)
        self._last = "\n"

    def _end_line(self) -> str:
        line, self._line = self._line, ""
        units = self._splitter.line(line)
        if not units:
            # The renderer writes the blank lines between blocks.
            return self._plain("\n") if self._splitter.pending or self._stays_plain else self._erase_rows()
        if self._stays_plain:
            out = self._plain("\n")
            for unit in units:
                self._renderer.skip(unit, gap=bool(line.strip()))
            if not self._splitter.pending:
                self._stays_plain, self._rows = False, Rows(self._columns - 1)
            return out
        out = self._erase_rows() + self._render(units)
        return out + self._plain("".join(f"{kept}\n" for kept in self._splitter.pending))

    def _erase_rows(self) -> str:
        out = self._rows.erase()
        self._rows = Rows(self._columns - 1)
        return out

    def _render(self, units: list[Unit]) -> str:
        return "".join(self._renderer.render(unit, self._columns - 1) for unit in units)

    def _plain(self, text: str) -> str:
        if not text:
            return ""
        self._last = text[-1]
        # The blank line before a block is written with its first character and is never erased.
        gap = not self._rows.count and self._renderer.has_gap(joined=self._splitter.joined)
        out = self._rows.add("\n" + text if gap and not self._stays_plain else text)
        if self._rows.count >= max(2, self._size()[1]):
            self._stays_plain = True  # the first rows are about to leave the screen
        return out

    def _check_window(self) -> None:
        """Adapt to a changed window size and a moved cursor."""
        columns = self._size()[0]
        if self._moved:
            self._moved = False
            # A block without any shown text can still be rendered below.
            self._stays_plain = self._stays_plain or bool(self._rows.count)
            self._rows, self._last = Rows(columns - 1), "\n"
        if columns == self._columns:
            return
        self._columns = columns
        if self._rows.widest >= columns:
            # Some terminals wrap these rows now, others truncate them.
            self._stays_plain = True
        if self._stays_plain:
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
