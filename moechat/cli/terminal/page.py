"""Builds the text of a result page before any of it is written."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from moechat.cli.terminal.load_progress import format_bytes
from moechat.safe_text import neutralise, one_line

_Case = Mapping[str, Any]
READY_REMARK = (
    "ready: share of the experts of a token that are in memory, or on their way, when it needs them; "
    "--wide shows all columns."
)


class Page:
    """Tables and lines of text: as wide as the terminal, plain and unwrapped in a pipe."""

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
        """The page so far, without trailing spaces."""
        return "\n".join(line.rstrip() for line in self._buffer.getvalue().split("\n"))

    def line(self, text: str = "", style: str = "") -> None:
        """Add a line, never wrapped, with control characters made visible."""
        self.console.print(neutralise(text), style=style or None, soft_wrap=True, markup=False)

    def picture_line(self, line: str) -> None:
        """Add a line with control sequences for colors, as it is."""
        from rich.text import Text

        self.console.print(Text.from_ansi(line), soft_wrap=True)

    def paragraph(self, text: str, style: str = "") -> None:
        """Add text that is wrapped between words."""
        self.console.print(neutralise(text), style=style or None, soft_wrap=False, markup=False)

    def table(
        self,
        title: str,
        columns: Sequence[tuple[str, str]],
        rows: Sequence[Sequence[str]],
        *,
        no_wrap: bool = False,
    ) -> None:
        """Add a table.

        Args:
            title: Printed above it.
            columns: Name and alignment, ``left`` or ``right``.
            rows: Cells.
            no_wrap: Cells are never wrapped.
        """
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
            table.add_column(Text(name), justify=align, no_wrap=no_wrap, overflow="fold")
        for row in rows:
            table.add_row(*(Text(one_line(cell)) for cell in row))
        self.console.print(table)

    def pairs(self, rows: Sequence[tuple[str, str]]) -> None:
        """Add names with values, each pair on one line."""
        from rich.table import Table
        from rich.text import Text

        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim", no_wrap=True)
        table.add_column(overflow="fold")
        for name, text in rows:
            table.add_row(Text(one_line(name)), Text(one_line(text)))
        self.console.print(table)


def render_cases(
    headline: Sequence[str],
    cases: Sequence[_Case],
    nbytes: Callable[[_Case], int],
    columns: Sequence[tuple[str, str]],
    rows: Callable[[Sequence[_Case]], Sequence[Sequence[str]]],
    remarks: Sequence[str],
    *,
    few: Collection[str] | None = None,
) -> str:
    """Systems side by side as text: a table for each share of the experts that fits into memory.

    Args:
        headline: Lines above the tables.
        cases: The results, with their ``fraction``.
        nbytes: Size of the experts that fit, in bytes, for a case.
        columns: As for :meth:`Page.table`.
        rows: Makes the cells of the cases of one fraction.
        remarks: Sentences below the tables.
        few: Names of the only columns to show; ``None``: all.
    """
    page = Page()
    for line in headline:
        page.paragraph(line)
    by_fraction: dict[float, list[_Case]] = {}
    for case in cases:
        by_fraction.setdefault(case["fraction"], []).append(case)
    for fraction, group in by_fraction.items():
        page.line()
        title = f"{fraction:.3g} of the experts in {format_bytes(nbytes(group[0]))}"
        cells = rows(group)
        shown = [number for number, (name, _) in enumerate(columns) if few is None or name in few]
        page.table(
            title,
            [columns[number] for number in shown],
            [[row[number] for number in shown] for row in cells],
            no_wrap=True,
        )
    page.line()
    for sentence in remarks:
        page.paragraph(sentence, style="dim")
    return page.text
