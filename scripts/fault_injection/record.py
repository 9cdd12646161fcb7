"""Results of a campaign: written as they come, continued, counted."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fault_injection.phase import Outcome, Phase

_SHOWN = 3  # commands of a cause


class Record:
    """Results in a file of JSON lines; the first line has the seed.

    Args:
        path: The file; continued if it is there.
        seed: For a new file.

    Attributes:
        path: The same.
        seed: Of the file.
        done: Cases with a result.
        covered: How much of all that there is has been tried, in words, by phase.
    """

    def __init__(self, path: Path, seed: int) -> None:
        self.path = path
        self.seed = seed
        self.done: set[str] = set()
        self.covered: dict[str, str] = {}
        self._counts: dict[str, Counter[str]] = defaultdict(Counter)
        self._fell: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
        lines = path.read_text().splitlines() if path.exists() else []
        if lines:
            self.seed = int(json.loads(lines[0])["seed"])
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({"seed": seed}) + "\n")
        for line in lines[1:]:
            try:
                self._count(json.loads(line))
            except ValueError:  # the end of an interrupted campaign
                continue
        self._file = open(path, "a")  # noqa: SIM115 - open until close
        if lines and not path.read_bytes().endswith(b"\n"):
            self._file.write("\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def add(self, phase: Phase, case: str, outcome: Outcome) -> None:
        """Write a result."""
        entry = {"kind": phase.kind, "phase": phase.name, "case": case, **asdict(outcome)}
        self._file.write(json.dumps(entry) + "\n")
        self._file.flush()
        self._count(entry)

    def _count(self, entry: dict[str, Any]) -> None:
        self.done.add(f"{entry['phase']}:{entry['case']}")
        counts = self._counts[f"{entry['kind']} / {entry['phase']}"]
        counts["tried"] += entry["count"]
        counts["fell" if entry["fell"] else "held"] += 1 if entry["fell"] else entry["count"]
        if entry["fell"]:
            self._fell[entry["phase"], entry["fell"]].append(entry)

    def has_fallen(self) -> bool:
        """Whether a case fell."""
        return bool(self._fell)

    def table(self) -> str:
        """Counts by class and phase, then what fell by cause, with the commands that repeat it."""
        lines = [f"{'class / phase':<32}{'tried':>12}{'held':>12}{'fell':>8}"]
        total: Counter[str] = Counter()
        for title, counts in sorted(self._counts.items()):
            lines.append(f"{title:<32}{counts['tried']:>12}{counts['held']:>12}{counts['fell']:>8}")
            total.update(counts)
        lines.append(f"{'all':<32}{total['tried']:>12}{total['held']:>12}{total['fell']:>8}")
        if self.covered:
            lines.append("")
            lines += [f"{phase:<20} {covered}" for phase, covered in sorted(self.covered.items())]
        for (phase, fell), entries in sorted(
            self._fell.items(), key=lambda item: (item[0][0], -len(item[1]))
        ):
            lines.append(f"\n{phase}: {fell}  ({len(entries)})")
            lines += [f"    {command(entry['phase'], entry['case'])}" for entry in entries[:_SHOWN]]
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """The same as JSON."""
        return {
            "seed": self.seed,
            "counts": {title: dict(counts) for title, counts in sorted(self._counts.items())},
            "covered": dict(sorted(self.covered.items())),
            "fell": [
                {
                    "phase": phase,
                    "fell": fell,
                    "count": len(entries),
                    "detail": entries[0]["detail"],
                    "commands": [command(phase, entry["case"]) for entry in entries[:_SHOWN]],
                }
                for (phase, fell), entries in sorted(self._fell.items())
            ],
        }


def command(phase: str, case: str) -> str:
    """The command that tries a case again."""
    return f"scripts/faults --case '{phase}:{case}'"
