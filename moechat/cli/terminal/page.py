"""Results for people, made as a whole before any of it is written."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from typing import Any

from moechat.chat.neutral import neutralise, one_line


class Page:
    """Tables and lines for people: as wide as the terminal, plain and unwrapped under a pipe."""

    def __init__(self) -> None:
        from rich.console import Console

        terminal = sys.stdout.isatty()
        self._buffer = io.StringIO()
        self.console = Console(
            file=self._buffer,
            width=None if terminal else 200,
            force_terminal=terminal or None,
            highlight=False,
            soft_wrap=False,
            legacy_windows=False,
        )

    @property
    def text(self) -> str:
        """Everything so far, without blanks at the ends of lines."""
        return "\n".join(line.rstrip() for line in self._buffer.getvalue().split("\n"))

    def line(self, text: str = "", style: str = "") -> None:
        """A line of its own, never broken, its control characters shown."""
        self.console.print(neutralise(text), style=style or None, soft_wrap=True, markup=False)

    def table(self, title: str, columns: Sequence[tuple[str, str]], rows: Sequence[Sequence[str]]) -> None:
        """A titled table; of each column its name and ``left`` or ``right``."""
        from rich.table import Table
        from rich.text import Text

        table = Table(
            title=Text(title, style="bold"),
            title_justify="left",
            box=None,
            pad_edge=False,
            header_style="dim",
        )
        for name, justify in columns:
            align: Any = justify
            table.add_column(Text(name), justify=align, overflow="fold")
        for row in rows:
            table.add_row(*(Text(one_line(cell)) for cell in row))
        self.console.print(table)

    def pairs(self, rows: Sequence[tuple[str, str]]) -> None:
        """Names and what belongs to them, each on a line of its own whatever it holds."""
        from rich.table import Table
        from rich.text import Text

        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim", no_wrap=True)
        table.add_column(overflow="fold")
        for name, text in rows:
            table.add_row(Text(one_line(name)), Text(one_line(text)))
        self.console.print(table)
