"""Strict access to tables of a TOML file: unknown keys are errors."""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, get_args

from moechat.errors import UsageError
from moechat.hardware.profile import LEAST_VALUE, MOST_VALUE, Figure, Origin


class StrictTable:
    """A table that records which of its keys were read.

    Every method that takes a key raises :class:`UsageError`, naming file and key, if the key is missing or
    its value has the wrong type or range.

    Args:
        path: The file, for messages.
        place: Dotted keys of the table; empty for the whole file.
        values: Parsed content.
        sources: Texts that ``@name`` refers to.
    """

    def __init__(self, path: Path, place: str, values: Mapping[str, Any], sources: Mapping[str, str]) -> None:
        self.path = path
        self.place = place
        self.values = values
        self.sources = sources
        self._read: set[str] = set()

    def error(self, key: str, fact: str, *, hint: str | None = None) -> UsageError:
        """An error about a key of this table, or about the table itself if ``key`` is empty."""
        where = ".".join(filter(None, [self.place, key]))
        return UsageError(f"{self.path}: {where}: {fact}", hint=hint)

    def text(self, key: str) -> str:
        """A string that is not empty."""
        found = str(self._value(key, (str,), "a text")).strip()
        if not found:
            raise self.error(key, "is empty")
        return found

    def number(self, key: str, choices: range | tuple[int, ...]) -> int:
        """An integer, one of ``choices``."""
        found = int(self._value(key, (int,), "a whole number"))
        if found not in choices:
            shown = f"{choices[0]} to {choices[-1]}" if isinstance(choices, range) else f"one of {choices}"
            raise self.error(key, f"is {found}, not {shown}")
        return found

    def table(self, key: str) -> StrictTable:
        """A table inside this one."""
        found = self._value(key, (dict,), "a table")
        return StrictTable(self.path, ".".join(filter(None, [self.place, key])), found, self.sources)

    def optional(self, key: str) -> StrictTable | None:
        """A table inside this one, or ``None``."""
        self._read.add(key)
        return self.table(key) if key in self.values else None

    def figure(self, key: str, scale: float) -> Figure:
        """A table with value, origin, source and perhaps ``low`` and ``high``; numbers are multiplied by
        ``scale``.
        """
        entry = self.table(key)
        value = entry._scaled("value", scale)
        low = high = None
        if "low" in entry.values or "high" in entry.values:
            low, high = entry._scaled("low", scale), entry._scaled("high", scale)
            if not low <= value <= high:
                whole = f"is outside of its range, {low / scale:g} to {high / scale:g}"
                raise entry.error("value", f"{value / scale:g} {whole}")
        origin = entry.text("origin")
        if origin not in get_args(Origin):
            raise entry.error("origin", f"is {origin!r}", hint=f"choose from: {', '.join(get_args(Origin))}")
        source = entry.cited("source")
        entry.finish()
        return Figure(value, origin, source, low, high)  # type: ignore[arg-type]

    def cited(self, key: str) -> str:
        """A string; a leading ``@name`` is replaced by that source."""
        text = self.text(key)
        if not text.startswith("@"):
            return text
        name, _, rest = text[1:].partition(" ")
        if name not in self.sources:
            raise self.error(key, f"[sources] has no {name!r}", hint=_near(name, self.sources))
        return f"{rest.strip()} ({self.sources[name]})" if rest.strip() else self.sources[name]

    def keyed(
        self, pattern: re.Pattern[str], example: str, meaning: Callable[[re.Match[str]], int]
    ) -> list[tuple[int, str]]:
        """All keys, which must match a pattern, with their numbers, ascending.

        Args:
            pattern: Pattern for a full match of a key.
            example: Example of a key, for the hint.
            meaning: Gives the number of a key.
        """
        found: dict[int, str] = {}
        for key in self.values:
            if not (match := pattern.fullmatch(key)):
                raise self.error(key, "is not known", hint=f"write keys like {example}")
            number = meaning(match)
            if number in found:
                raise self.error(key, f"says the same as {found[number]}")
            found[number] = key
        if not found:
            raise self.error("", "is empty")
        return sorted(found.items())

    def finish(self) -> None:
        """Raise an error for a key that was not read."""
        for key in self.values:
            if key not in self._read:
                raise self.error(key, "is not known", hint=_near(key, self._read))

    def _scaled(self, key: str, scale: float) -> float:
        value = self._value(key, (int, float), "a number")
        # TOML integers can be too large for a float.
        if not (0 < value < sys.float_info.max and LEAST_VALUE <= float(value) * scale <= MOST_VALUE):
            raise self.error(key, f"is {str(value)[:20]}; it must be above 0 and of a possible size")
        return float(value) * scale

    def _value(self, key: str, kinds: tuple[type, ...], what: str) -> Any:
        self._read.add(key)
        if key not in self.values:
            unknown = [other for other in self.values if other not in self._read]
            near = difflib.get_close_matches(key, unknown, n=1)
            raise self.error(key, "is missing", hint=f"there is {near[0]} instead" if near else None)
        found = self.values[key]
        # bool is a subclass of int.
        if not isinstance(found, kinds) or isinstance(found, bool):
            raise self.error(key, f"is {found!r}, not {what}")
        return found


def _near(name: str, known: Iterable[str]) -> str:
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=3)
    return f"do you mean {' or '.join(near)}?" if near else f"known: {', '.join(names) or 'none'}"
