"""The result of ``moechat compare``, measured or simulated."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import Any, Literal

from moechat.bench.advice import Advice, Cell, advise
from moechat.bench.entries import Entry


@dataclass(frozen=True)
class Compared:
    """The result of ``moechat compare``.

    Attributes:
        kind: Whether times are measured or simulated.
        complete: Whether it ended without an interrupt.
        model: Facts about the model, for JSON; ``name`` and ``all_expert_bytes`` among them.
        machine: Facts about the machine; ``name`` among them.
        tokens: How many tokens of which kind; ``timed`` among them.
        entries: The systems.
        cells: Their times.
        floor: Milliseconds per token with all experts in memory, for each run; empty: not known.
        assumptions: Sentences for people.
    """

    kind: Literal["measured", "simulated"]
    complete: bool
    model: dict[str, Any]
    machine: dict[str, Any]
    tokens: dict[str, Any]
    entries: tuple[Entry, ...]
    cells: tuple[Cell, ...]
    floor: tuple[float, ...]
    assumptions: tuple[str, ...]

    @property
    def exact(self) -> bool:
        """Whether the times are without noise."""
        return self.kind == "simulated"

    @property
    def floor_ms(self) -> float | None:
        """Median milliseconds per token with all experts in memory."""
        return statistics.median(self.floor) if self.floor else None

    @property
    def fractions(self) -> tuple[float, ...]:
        """Shares of the experts, ascending."""
        return tuple(sorted({cell.fraction for cell in self.cells}))

    def at(self, fraction: float) -> tuple[Cell, ...]:
        """The cells of one share."""
        return tuple(cell for cell in self.cells if cell.fraction == fraction)

    def advice(self) -> tuple[Advice, ...]:
        """The advice for each share."""
        return tuple(advise(self.at(share), self.floor_ms, exact=self.exact) for share in self.fractions)

    def ranked(self) -> tuple[Entry, ...]:
        """The entries that have times, the fastest first: by the mean of their ratios to the fastest."""
        best = {share: min(cell.ms for cell in self.at(share)) for share in self.fractions}

        def slowness(entry: Entry) -> float:
            ratios = [
                math.log(cell.ms / best[cell.fraction]) for cell in self.cells if cell.system == entry.system
            ]
            return sum(ratios) / len(ratios)

        timed = {cell.system for cell in self.cells}
        return tuple(sorted((entry for entry in self.entries if entry.system in timed), key=slowness))

    def to_json(self) -> dict[str, Any]:
        """The result as JSON types; the help of the command describes its keys."""
        floor = self.floor_ms
        return {
            "format": 1,
            "kind": self.kind,
            "complete": self.complete,
            "model": self.model,
            "machine": self.machine,
            "tokens": self.tokens,
            "floor": None if floor is None else {"ms": floor, "runs": list(self.floor)},
            "systems": [{"system": entry.system, "also": list(entry.also)} for entry in self.entries],
            "cases": [
                {
                    "system": cell.system,
                    "fraction": cell.fraction,
                    "bytes": cell.nbytes,
                    "ms": cell.ms,
                    "low": cell.low,
                    "high": cell.high,
                    "runs": list(cell.runs),
                    "first_token_s": cell.first_token_s,
                    "ready": cell.ready,
                }
                for cell in self.cells
            ],
            "advice": [
                {
                    "fraction": each.fraction,
                    "use": each.use,
                    "ms": each.ms,
                    "equal": list(each.equal),
                    "next": each.following,
                    "faster_by": each.faster_by,
                    "over_floor": each.over_floor,
                }
                for each in self.advice()
            ],
            "assumptions": list(self.assumptions),
        }
