"""Text of bench/choice: rows with a cell for each share, the slow cells in words, and the summary."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any

from choice_rows import AUTO, ORACLE, Cell, Row

_NAME, _CELL = 26, 20


def share_text(share: float) -> str:
    """A share as a quotient, such as 1/8, if it is one of small numbers."""
    near = Fraction(share).limit_denominator(64)
    return str(near) if abs(near - share) < 1e-9 else f"{share:g}"


def heading(shares: Sequence[float]) -> str:
    """The line above the rows of one trace and model."""
    return f"{'':{_NAME}}" + "".join(f"{share_text(share):>{_CELL}}" for share in shares)


def row_lines(row: Row, limit: float) -> Iterator[str]:
    """A row, then a line for each cell in which auto is slow or the oracle is beaten.

    Args:
        row: The row.
        limit: Ratio above which auto counts as slow.
    """
    if row.problem:
        yield f"{row.profile:{_NAME}} left out: {row.problem}"
        return
    yield f"{row.profile:{_NAME}}" + "".join(f"{_ratios(cell):>{_CELL}}" for cell in row.cells)
    for cell in row.cells:
        remarks = list(_remarks(cell, limit))
        if remarks:
            yield f"    {share_text(cell.share)}: auto {cell.times[AUTO]:.2f} ms; {', '.join(remarks)}"


def _ratios(cell: Cell) -> str:
    against = (cell.best_preset, cell.best_fixed, ORACLE)
    return " ".join(f"{cell.against(system):.3f}" for system in against)


def _remarks(cell: Cell, limit: float) -> Iterator[str]:
    for system in (cell.best_preset, cell.best_fixed):
        if cell.against(system) > limit:
            yield f"{system} {cell.times[system]:.2f} ms"
    if cell.oracle_beaten:
        yield f"oracle {cell.times[ORACLE]:.2f} ms, slower than {cell.fastest}"


@dataclass(frozen=True)
class Summary:
    """Totals of all rows.

    Attributes:
        cells: Simulated cells.
        left_out: Rows that cannot be simulated.
        limit: Ratio above which auto counts as slow.
        above_presets: Cells in which auto is slow beside the best preset.
        above_fixed: The same for the best fixed strategy.
        above: Cells in which it is slow beside either.
        oracle_beaten: Cells in which something is faster than the oracle.
        worst: Largest ratio of auto to the best preset or fixed strategy; 0 without cells.
        worst_cell: Where that is, and the name of the best there; empty without cells.
        seconds: Time of all simulations on the clock.
    """

    cells: int
    left_out: int
    limit: float
    above_presets: int
    above_fixed: int
    above: int
    oracle_beaten: int
    worst: float
    worst_cell: str
    seconds: float

    @classmethod
    def of(cls, rows: Sequence[Row], limit: float, seconds: float) -> Summary:
        """Count the cells of all rows."""
        cells = [(row, cell) for row in rows for cell in row.cells]
        worst, where = 0.0, ""
        for row, cell in cells:
            if cell.against(cell.best) > worst:
                worst = cell.against(cell.best)
                where = f"{row.input}, {row.profile}, {share_text(cell.share)}: {cell.best}"
        return cls(
            cells=len(cells),
            left_out=sum(bool(row.problem) for row in rows),
            limit=limit,
            above_presets=sum(cell.against(cell.best_preset) > limit for _, cell in cells),
            above_fixed=sum(cell.against(cell.best_fixed) > limit for _, cell in cells),
            above=sum(cell.against(cell.best) > limit for _, cell in cells),
            oracle_beaten=sum(cell.oracle_beaten for _, cell in cells),
            worst=worst,
            worst_cell=where,
            seconds=seconds,
        )

    def __str__(self) -> str:
        parts = [
            f"{self.cells} cells: auto above {self.limit:g} in {self.above_presets} against presets, in "
            f"{self.above_fixed} against fixed strategies; the oracle is beaten in {self.oracle_beaten}"
        ]
        if self.cells:
            parts.append(f"worst {self.worst:.3f} ({self.worst_cell})")
            parts.append(f"{self.cells / self.seconds:.2f} cells a second")
        if self.left_out:
            parts.append(f"{self.left_out} rows left out")
        return "; ".join(parts)

    def to_json(self) -> dict[str, Any]:
        """The totals."""
        return asdict(self)
