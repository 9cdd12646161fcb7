"""Prints where every expert of a model is: a row for each layer, a character for each expert."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from moechat.cli.terminal.consoles import console

if TYPE_CHECKING:
    from rich.text import Text

    from moechat.offload.expert_map import ExpertMap

# For each place, in the order of the legend: title, color, and character where there are no colors. The
# colors are Okabe and Ito's, which people tell apart who do not see all colors.
_LOOKS = {
    "m": ("in memory", "#0072b2", "#"),
    "p": ("partly in memory", "#56b4e9", "+"),
    "w": ("on its way", "#e69f00", ">"),
    "c": ("computed by the CPU", "#cc79a7", "c"),
    ".": ("not in memory", "#6c757d", "."),
}
_CELL = "█"
_LEAST_COLUMNS = 8


def print_map(found: ExpertMap) -> None:
    """Print a map to stderr, no wider than the terminal."""
    output = console()
    colored = output.color_system is not None and not output.no_color
    for line in map_lines(found, output.width, colored=colored):
        output.print(line)


def map_lines(found: ExpertMap, width: int, *, colored: bool) -> list[Text]:
    """The lines of a map.

    Experts that do not fit beside each other share a character: that of the place that most of them have.

    Args:
        found: The map.
        width: Columns of the terminal.
        colored: Show places by colors; else by characters.
    """
    from rich.text import Text

    label = len(str(max(found.layers)))
    room = max(_LEAST_COLUMNS, width - label - 1)
    experts = len(found.places[0])
    pooled = -(-experts // room)
    lines = []
    for layer, places in zip(found.layers, found.places, strict=True):
        line = Text(f"{layer:>{label}} ", style="dim")
        for start in range(0, experts, pooled):
            _, color, mark = _LOOKS[_most(places[start : start + pooled])]
            line.append(_CELL if colored else mark, style=f"not dim {color}" if colored else "not dim")
        lines.append(line)
    return [*lines, *_legend(found, pooled, width, colored=colored)]


def _most(places: str) -> str:
    """The place that most experts have; of several, the first of the legend."""
    counts = Counter(places)
    return max(_LOOKS, key=lambda place: counts[place])


def _legend(found: ExpertMap, pooled: int, width: int, *, colored: bool) -> list[Text]:
    from rich.text import Text

    lines = [Text("")]
    for place, (title, color, mark) in _LOOKS.items():
        count = sum(row.count(place) for row in found.places)
        if not count:
            continue
        entry = Text(_CELL if colored else mark, style=color if colored else "")
        entry.append(f" {count:,} {title}", style="default")
        if len(lines[-1]) and len(lines[-1]) + 3 + len(entry) > width:
            lines.append(Text(""))
        if len(lines[-1]):
            lines[-1].append("   ")
        lines[-1].append_text(entry)
    if pooled > 1:
        lines.append(Text(f"a character is {pooled} experts", style="dim"))
    return lines
