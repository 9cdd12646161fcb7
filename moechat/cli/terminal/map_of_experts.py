"""Shows where every expert of a model is: a row for each layer, a character for each expert."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
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
_DIM, _PLAIN = "dim", ""
_LEAST_COLUMNS = 8
_LEAST_ROWS = 3
# A text and its look: a place, dim or plain.
_Piece = tuple[str, str]
_Line = list[_Piece]


def print_map(found: ExpertMap) -> None:
    """Print a map to stderr, no wider than the terminal."""
    for line in map_lines(found, console().width, colored=_has_colors()):
        console().print(line)


def map_lines(found: ExpertMap, width: int, *, colored: bool) -> list[Text]:
    """The lines of a map.

    Experts that do not fit beside each other share a character: that of the place that most of them have.

    Args:
        found: The map.
        width: Columns of the terminal.
        colored: Show places by colors; else by characters.
    """
    from rich.text import Text

    styles = {_PLAIN: "", _DIM: "dim"} | {
        place: color if colored else "" for place, (_, color, _) in _LOOKS.items()
    }
    return [
        Text.assemble(*((text, styles[look]) for text, look in line))
        for line in _layout(found, width, None, colored=colored)
    ]


def live_lines(found: ExpertMap, columns: int, rows: int) -> list[str]:
    """The lines of a map within a size, with control sequences for the colors of stderr.

    Args:
        found: The map.
        columns: Most cells of a line.
        rows: Most lines. Layers that do not fit below each other share a line, as experts share a character.
    """
    if rows < _LEAST_ROWS:
        return []
    colored = _has_colors()
    lines = _layout(found, columns, rows, colored=colored)
    codes = _codes() if colored else {}
    return ["".join(_ansi(piece, codes) for piece in _cut(line, columns)) for line in lines]


def _has_colors() -> bool:
    return console().color_system is not None and not console().no_color


def _codes() -> dict[str, tuple[str, str]]:
    """What is written before and after a text, by its look."""
    from rich.color import ColorSystem
    from rich.style import Style

    system = {
        "standard": ColorSystem.STANDARD,
        "256": ColorSystem.EIGHT_BIT,
        "truecolor": ColorSystem.TRUECOLOR,
    }.get(console().color_system or "", ColorSystem.STANDARD)
    looks = {_DIM: "dim"} | {place: color for place, (_, color, _) in _LOOKS.items()}
    split = {look: Style.parse(style).render("|", color_system=system) for look, style in looks.items()}
    return {look: (text.split("|")[0], text.split("|")[1]) for look, text in split.items()}


def _ansi(piece: _Piece, codes: dict[str, tuple[str, str]]) -> str:
    text, look = piece
    before, after = codes.get(look, ("", ""))
    return f"{before}{text}{after}"


def _cut(line: _Line, columns: int) -> _Line:
    cut = []
    for text, look in line:
        cut.append((text[:columns], look))
        columns = max(0, columns - len(text))
    return cut


def _layout(found: ExpertMap, width: int, most: int | None, *, colored: bool) -> list[_Line]:
    """The lines: layers, legend, and a note on characters and lines that several share.

    Args:
        found: The map.
        width: Columns; the narrowest maps may be wider.
        most: Most lines, at least three; ``None``: as many as there are.
        colored: Show places by colors; else by characters.
    """
    label = len(str(max(found.layers)))
    beside = -(-len(found.places[0]) // max(_LEAST_COLUMNS, width - label - 1))
    legend = _legend(found, width, colored=colored)
    layers, below = len(found.layers), 1
    if most is not None:
        if len(legend) > most - 2:
            legend = []
        room = most - len(legend) - (beside > 1)
        if layers > room:
            room -= beside == 1  # for the note
            below = -(-layers // max(1, room))
    lines: list[_Line] = []
    for start in range(0, layers, below):
        pooled = _pool(found.places[start : start + below], beside)
        runs = ((place, len(list(run))) for place, run in groupby(pooled))
        cells = [((_CELL if colored else _LOOKS[place][2]) * count, place) for place, count in runs]
        lines.append([(f"{found.layers[start]:>{label}} ", _DIM), *cells])
    notes = [
        f"a {name} is {count} {what}"
        for name, count, what in (("character", beside, "experts"), ("line", below, "layers"))
        if count > 1
    ]
    return [*lines, *legend, *([[(", ".join(notes), _DIM)]] if notes else [])]


def _pool(layers: Sequence[str], beside: int) -> str:
    """A row of characters: one for ``beside`` experts of all these layers."""
    if len(layers) == beside == 1:
        return layers[0]
    starts = range(0, len(layers[0]), beside)
    return "".join(_most("".join(row[start : start + beside] for row in layers)) for start in starts)


def _most(places: str) -> str:
    """The place that most experts have; of several, the first of the legend."""
    if places.count(places[0]) == len(places):
        return places[0]
    return max(_LOOKS, key=places.count)


def _legend(found: ExpertMap, width: int, *, colored: bool) -> list[_Line]:
    lines: list[_Line] = []
    taken = 0
    for place, (title, _, mark) in _LOOKS.items():
        count = sum(row.count(place) for row in found.places)
        if not count:
            continue
        text = f" {count:,} {title}"
        if not lines or taken + 3 + 1 + len(text) > width:
            lines.append([])
            taken = 0
        if taken:
            lines[-1].append(("   ", _PLAIN))
            taken += 3
        lines[-1] += [(_CELL if colored else mark, place), (text, _PLAIN)]
        taken += 1 + len(text)
    return lines
