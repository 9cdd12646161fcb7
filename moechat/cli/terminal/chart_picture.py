"""Draws a chart with characters: time per token over memory, a line for each system."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moechat.simulate.plot import Chart, Point

# The letter of each line, for terminals without colors.
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
# 8-bit colors that are distinct on dark and light ground.
_COLORS = (208, 33, 70, 160, 135, 37, 172, 205, 100, 62, 30, 131, 99, 66)
_GREY = 245
_ROWS = 18
_MARGIN = 12  # columns of the axis and its labels
_LEAST_COLUMNS = 24
_STEPS = 400  # points of a line where it is drawn with letters
_EMPTY = "\u2800"  # plotille's empty cell


@dataclass(frozen=True)
class Look:
    """What a terminal can show.

    Attributes:
        width: Columns.
        unicode: It shows Unicode characters.
        colored: It shows colors.
    """

    width: int
    unicode: bool
    colored: bool


def draw_picture(chart: Chart, letters: Mapping[str, str], look: Look) -> list[str]:
    """The lines of a picture, no wider than the terminal.

    Args:
        chart: The chart; the first of its systems are drawn above the others.
        letters: The letter of each system.
        look: What the terminal can show. Without Unicode, lines are drawn with letters.
    """
    if chart.single:
        return _bars(chart, letters, look)
    columns = max(_LEAST_COLUMNS, look.width - _MARGIN - 2)
    import plotille  # type: ignore[import-untyped]

    figure = plotille.Figure()
    figure.width, figure.height = columns, _ROWS
    figure.origin = False
    figure.with_colors, figure.color_mode = look.colored, "byte"
    memory = sorted({point.nbytes for line in chart.lines.values() for point in line})
    left, right = _widened(math.log2(memory[0]), math.log2(memory[-1]), 0.04)
    times = [point.ms for line in chart.lines.values() for point in line]
    times += [] if chart.floor_ms is None else [chart.floor_ms]
    bottom, top = _widened(math.log10(min(times)), math.log10(max(times)), 0.06)
    figure.set_x_limits(left, right)
    figure.set_y_limits(bottom, top)
    figure.y_ticks_fkt = lambda value, _: _short(10**value).rjust(_MARGIN - 3)
    if chart.floor_ms is not None:
        floor = math.log10(chart.floor_ms)
        dots = [left + (right - left) * (at + 0.5) / columns for at in range(0, columns, 2)]
        figure.plot(dots, [floor] * len(dots), lc=_GREY if look.colored else None, interp=None, marker=".")
    numbered = list(enumerate(chart.lines.items()))
    # Later ones are above: the fastest above the slower ones, and the default above all.
    numbered.sort(key=lambda each: (each[1][0] == chart.above, -each[0]))
    for number, (name, line) in numbered:
        color = _COLORS[number % len(_COLORS)] if look.colored else None
        xs, ys = _logarithms(line)
        if look.unicode:
            figure.plot(xs, ys, lc=color)
            figure.text(xs, ys, [letters[name]] * len(xs), lc=color)
        else:
            figure.plot(*_filled(xs, ys), lc=color, interp=None, marker=letters[name])
    rows = figure.show().split("\n")[1 : _ROWS + 2]  # without its title and axis
    axis = _axis([(math.log2(size) - left) / (right - left) for size in memory], memory, chart, columns)
    lines = [row.replace(_EMPTY, " ").rstrip() for row in rows]
    return ["ms a token".rjust(_MARGIN - 1), *lines, *axis]


def _widened(low: float, high: float, share: float) -> tuple[float, float]:
    """The range, wider by a share of its size on both sides; never empty."""
    more = max(0.02, share * (high - low))
    return low - more, high + more


def _logarithms(line: Sequence[Point]) -> tuple[list[float], list[float]]:
    points = sorted(line, key=lambda point: point.nbytes)
    return [math.log2(point.nbytes) for point in points], [math.log10(point.ms) for point in points]


def _filled(xs: Sequence[float], ys: Sequence[float]) -> tuple[list[float], list[float]]:
    """So many points on a line that its characters touch."""
    more_x, more_y = [xs[0]], [ys[0]]
    for at in range(len(xs) - 1):
        for step in range(1, _STEPS + 1):
            share = step / _STEPS
            more_x.append(xs[at] + share * (xs[at + 1] - xs[at]))
            more_y.append(ys[at] + share * (ys[at + 1] - ys[at]))
    return more_x, more_y


def _axis(places: Sequence[float], memory: Sequence[float], chart: Chart, columns: int) -> list[str]:
    """The axis of the memory: a mark and a label for each amount that was tried, where there is room."""
    from moechat.cli.terminal.load_progress import format_bytes

    marks, labels = ["-"] * columns, [" "] * columns
    taken = -1
    for place, size in zip(places, memory, strict=True):
        column = min(columns - 1, round(place * columns))
        marks[column] = "+"
        text = f"{share_title(size / chart.all_bytes)}: {format_bytes(size)}"
        start = max(0, min(columns - len(text), column - len(text) // 2))
        if start > taken and start + len(text) <= columns:
            labels[start : start + len(text)] = text
            taken = start + len(text)
    rule = "-" * (_MARGIN - 2)
    return [f"{rule}+-{''.join(marks)}", " " * _MARGIN + "".join(labels).rstrip()]


def _bars(chart: Chart, letters: Mapping[str, str], look: Look) -> list[str]:
    """A bar for each system, and the floor."""
    rows = [(f"{letters[name]} {name}", line[0].ms) for name, line in chart.lines.items()]
    rows.sort(key=lambda row: row[1])
    if chart.floor_ms is not None:
        rows.insert(0, (". all in memory", chart.floor_ms))
    indent = max(len(name) for name, _ in rows)
    digits = max(len(_short(ms)) for _, ms in rows)
    room = max(8, look.width - indent - digits - 3)
    most = max(ms for _, ms in rows)
    full = "█" if look.unicode else "#"
    lines = [
        f"{name:<{indent}} {_short(ms):>{digits}} {full * max(1, round(room * ms / most))}"
        for name, ms in rows
    ]
    return ["ms a token", *lines]


def _short(value: float) -> str:
    """Three digits, without an exponent."""
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def share_title(share: float) -> str:
    """``1/4`` or ``0.3``."""
    for divisor in (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 32):
        part = share * divisor
        if round(part) >= 1 and abs(part - round(part)) < 0.004 * divisor and round(part) <= divisor:
            return "all" if divisor == 1 else f"{round(part)}/{divisor}"
    return f"{share:.3g}"
