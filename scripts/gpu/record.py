"""Results of ``scripts/gpu_check``, written as they come, so that a run that is cut off can be continued.

A stage is a list of cells; a cell is the smallest thing that is measured, or checked, as a whole. The file is
replaced after every cell.
"""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moechat.atomic_file import replacing

FORMAT = 2
Say = Callable[[str], None]


@dataclass(frozen=True)
class Cell:
    """One thing to measure or to check.

    Attributes:
        name: Within its stage.
        run: Does it; returns plain values. A value ``ok`` that is false marks a failure, like an exception.
        seconds: About how long it takes: it is not begun with less time left.
    """

    name: str
    run: Callable[[], dict[str, Any]]
    seconds: float = 30.0


class Record:
    """The results so far.

    Args:
        path: File that they are kept in; ``None``: nowhere.
        deadline: Time of ``time.monotonic`` after which no cell is begun.
        say: Takes a line for each cell.
        again: Cells that are done are done again.

    Raises:
        ValueError: The file is not one of results.
    """

    def __init__(
        self,
        path: Path | None,
        *,
        deadline: float = float("inf"),
        say: Say = lambda _: None,
        again: bool = False,
    ) -> None:
        self._path = path
        self._deadline = deadline
        self._say = say
        self._again = again
        self.values: dict[str, Any] = {"format": FORMAT, "facts": {}, "stages": {}}
        if path is not None and path.exists():
            read = json.loads(path.read_text("utf-8"))
            if not isinstance(read, dict) or read.get("format") != FORMAT:
                raise ValueError(f"{path} holds no results of this version; name another file")
            self.values = read

    @property
    def failed(self) -> list[str]:
        """Cells that failed, as ``stage/cell``."""
        return [
            f"{stage}/{name}"
            for stage, cells in self.values["stages"].items()
            for name, cell in cells.items()
            if not cell["ok"]
        ]

    def facts(self, facts: dict[str, Any]) -> None:
        """Note the machine.

        Raises:
            ValueError: The results so far are of another GPU or another version.
        """
        known = self.values["facts"]
        for name in ("gpu", "commit"):
            if known and known.get(name) != facts.get(name):
                raise ValueError(
                    f"the results are of {name} {known.get(name)}, this is {facts.get(name)}; "
                    "name another file"
                )
        self.values["facts"] = {**known, **facts}
        self._write()

    def run(self, stage: str, cells: Sequence[Cell]) -> list[str]:
        """Run the cells of a stage that are not done; returns those for which no time was left."""
        done = self.values["stages"].setdefault(stage, {})
        left = []
        for cell in cells:
            if cell.name in done and done[cell.name]["ok"] and not self._again:
                continue
            if time.monotonic() + cell.seconds > self._deadline:
                left.append(cell.name)
                continue
            begun = time.monotonic()
            try:
                found = cell.run()
            except Exception as error:  # the other cells have a right to their results
                trace = traceback.format_exc().strip().splitlines()
                found = {"ok": False, "error": f"{type(error).__name__}: {error}", "trace": trace[-12:]}
            found = {"ok": True, **found, "seconds": round(time.monotonic() - begun, 1)}
            done[cell.name] = found
            self._write()
            shown = found.get("error", "ok") if found["ok"] or "error" in found else "FAILED"
            self._say(f"{stage}/{cell.name}: {shown} ({found['seconds']:.1f} s)")
        return left

    def _write(self) -> None:
        if self._path is None:
            return
        with replacing(self._path) as file:
            file.write(json.dumps(self.values, indent=1).encode() + b"\n")
