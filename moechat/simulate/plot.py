"""Plots time per token over memory, one line per system; for one memory budget, one bar per system."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from moechat.errors import MoechatError, UsageError

SUFFIXES = (".png", ".svg", ".pdf")
_MARKERS = "osD^vP*XhpdH"
_GIBI = float(1 << 30)
_MEBI = float(1 << 20)


def check_plot(path: Path) -> None:
    """Check before simulating that a plot can be drawn.

    Raises:
        UsageError: The file's suffix is not a supported format, or matplotlib is not installed.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise UsageError(f"{path} does not end in {', '.join(SUFFIXES)}", hint="name it FILE.png")
    _matplotlib("figure")


def _matplotlib(module: str) -> Any:
    """Import a module of matplotlib, which is an optional dependency."""
    try:
        return import_module(f"matplotlib.{module}")
    except ImportError as problem:
        raise UsageError(
            f"matplotlib, which draws plots, cannot be imported: {problem}",
            hint='pip install "moechat[plot]"',
        ) from problem


@dataclass(frozen=True)
class Point:
    """Time per token with an amount of memory.

    Attributes:
        nbytes: Bytes for experts.
        ms: Milliseconds per token.
        low: The fastest run; ``None``: there was only one.
        high: The slowest run.
    """

    nbytes: float
    ms: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Chart:
    """Time per token over memory.

    Attributes:
        title: Text above it.
        lines: Points by system, with ascending memory.
        all_bytes: Bytes of all experts.
        floor_ms: Milliseconds per token with all experts in memory, if known.
        above: The system whose line is drawn above the others.
    """

    title: str
    lines: Mapping[str, Sequence[Point]]
    all_bytes: int
    floor_ms: float | None = None
    above: str = "auto"

    @property
    def single(self) -> bool:
        """Whether there is only one amount of memory, so that there are no lines."""
        return len({point.nbytes for line in self.lines.values() for point in line}) == 1


def draw(cases: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw results of one trace, model and machine.

    Args:
        cases: Results, see :mod:`moechat.simulate.compare`.
        path: File to write.

    Raises:
        UsageError: As :func:`check_plot`.
        MoechatError: The file cannot be written.
    """
    first = cases[0]
    everything = first["experts_total_bytes"]
    lines: dict[str, list[Point]] = {}
    for case in cases:
        # The budget, even if a system does not use all of it, so that lines can be compared at equal budgets.
        lines.setdefault(case["system"], []).append(Point(case["fraction"] * everything, case["tpot_ms"]))
    title = f"{first['model']}, {first['bits']} bits, on {first['profile']} (simulated)"
    draw_chart(Chart(title, lines, everything), path)


def draw_chart(chart: Chart, path: Path) -> None:
    """Draw a chart.

    Args:
        chart: The chart.
        path: File to write.

    Raises:
        UsageError: As :func:`check_plot`.
        MoechatError: The file cannot be written.
    """
    check_plot(path)
    figure = _matplotlib("figure").Figure(figsize=(9, 5.5), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    if chart.single:
        _draw_bars(axes, chart)
    else:
        _draw_lines(axes, chart)
    axes.set_title(chart.title, fontsize=11)
    try:
        figure.savefig(path)
    except OSError as problem:
        raise MoechatError(f"{path} cannot be written: {problem.strerror}") from problem


def _unit(nbytes: float) -> tuple[str, float]:
    """The unit of an axis up to so many bytes, and its size."""
    return ("GiB", _GIBI) if nbytes >= 0.1 * _GIBI else ("MiB", _MEBI)


def _draw_bars(axes: Any, chart: Chart) -> None:
    """Draw a bar for each system, the fastest at the top."""
    ordered = sorted(chart.lines, key=lambda name: -chart.lines[name][0].ms)
    points = [chart.lines[name][0] for name in ordered]
    colours = ["C1" if name.partition(":")[0] == "auto" else "C0" for name in ordered]
    bars = axes.barh(range(len(ordered)), [point.ms for point in points], color=colours, height=0.7)
    axes.set_yticks(range(len(ordered)), ordered)
    axes.bar_label(bars, fmt="{:.4g}", padding=4, fontsize=9)
    axes.margins(x=0.12)
    if chart.floor_ms is not None:
        axes.axvline(chart.floor_ms, color="0.35", linestyle=":", linewidth=1.4)
    unit, size = _unit(chart.all_bytes)
    kept = points[0].nbytes
    axes.set_xlabel(
        f"milliseconds per token, with {kept / size:.3g} {unit} for experts "
        f"({kept / chart.all_bytes:.3g} of {chart.all_bytes / size:.1f} {unit})"
        + ("" if chart.floor_ms is None else f"; dotted: all of them in memory, {chart.floor_ms:.4g}")
    )
    axes.grid(axis="x", alpha=0.25)


def _draw_lines(axes: Any, chart: Chart) -> None:
    """Draw a line for each system over the memory."""
    ticker = _matplotlib("ticker")
    unit, size = _unit(chart.all_bytes)
    lines = chart.lines
    order = sorted(lines, key=lambda name: -max(point.ms for point in lines[name]))
    for at, name in enumerate(order):
        points = sorted(lines[name], key=lambda point: point.nbytes)
        colour = f"C{at % 10}"
        memory = [point.nbytes / size for point in points]
        axes.plot(
            memory,
            [point.ms for point in points],
            label=name,
            color=colour,
            linestyle="-" if at < 10 else "--",
            marker=_MARKERS[at % len(_MARKERS)],
            markersize=5,
            linewidth=2.4 if name.partition(":")[0] == "auto" else 1.4,
        )
        lows = [point.ms if point.low is None else point.low for point in points]
        highs = [point.ms if point.high is None else point.high for point in points]
        if lows != highs:
            axes.vlines(memory, lows, highs, color=colour, alpha=0.45, linewidth=3)
    if chart.floor_ms is not None:
        axes.axhline(
            chart.floor_ms, color="0.35", linestyle=":", linewidth=1.4, label="all experts in memory"
        )
    plain = ticker.FuncFormatter(lambda value, _: f"{value:g}")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(plain)
    axes.yaxis.set_minor_formatter(plain if _narrow(chart) else ticker.NullFormatter())
    axes.set_ylabel("milliseconds per token")
    axes.set_xlabel(f"memory for experts, {unit} (all of them: {chart.all_bytes / size:.1f})")
    axes.grid(which="both", alpha=0.25)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=9)


def _narrow(chart: Chart) -> bool:
    """Whether there are too few powers of ten among the times to read them."""
    times = [point.ms for line in chart.lines.values() for point in line]
    times += [] if chart.floor_ms is None else [chart.floor_ms]
    return bool(max(times) < 30 * min(times))
