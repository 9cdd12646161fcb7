"""Plots time per token over memory, one line per system; for one memory budget, one bar per system."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from moechat.errors import MoechatError, UsageError

SUFFIXES = (".png", ".svg", ".pdf")
_MARKERS = "osD^vP*XhpdH"
_GIBI = float(1 << 30)


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


def draw(cases: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw results of one trace, model and machine.

    Args:
        cases: Results, see :mod:`moechat.simulate.compare`.
        path: File to write.

    Raises:
        UsageError: As :func:`check_plot`.
        MoechatError: The file cannot be written.
    """
    check_plot(path)
    first = cases[0]
    figure = _matplotlib("figure").Figure(figsize=(9, 5.5), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    if len({case["fraction"] for case in cases}) == 1:
        _draw_bars(axes, cases)
    else:
        _draw_lines(axes, cases)
    axes.set_title(f"{first['model']}, {first['bits']} bits, on {first['profile']} (simulated)", fontsize=11)
    try:
        figure.savefig(path)
    except OSError as problem:
        raise MoechatError(f"{path} cannot be written: {problem.strerror}") from problem


def _draw_bars(axes: Any, cases: Sequence[Mapping[str, Any]]) -> None:
    """Draw a bar for each system, the fastest at the top."""
    ordered = sorted(cases, key=lambda case: -case["tpot_ms"])
    names = [case["system"] for case in ordered]
    colours = ["C1" if name.partition(":")[0] == "auto" else "C0" for name in names]
    bars = axes.barh(range(len(ordered)), [case["tpot_ms"] for case in ordered], color=colours, height=0.7)
    axes.set_yticks(range(len(ordered)), names)
    axes.bar_label(bars, fmt="{:.4g}", padding=4, fontsize=9)
    axes.margins(x=0.12)
    everything = cases[0]["experts_total_bytes"] / _GIBI
    fraction = cases[0]["fraction"]
    axes.set_xlabel(
        f"milliseconds per token, with {fraction * everything:.3g} GiB for experts "
        f"({fraction:.3g} of {everything:.1f} GiB)"
    )
    axes.grid(axis="x", alpha=0.25)


def _draw_lines(axes: Any, cases: Sequence[Mapping[str, Any]]) -> None:
    """Draw a line for each system over the memory."""
    ticker = _matplotlib("ticker")
    everything = cases[0]["experts_total_bytes"] / _GIBI
    lines: dict[str, list[tuple[float, float]]] = {}
    for case in cases:
        # The budget, even if a system does not use all of it, so that lines can be compared at equal budgets.
        lines.setdefault(case["system"], []).append((case["fraction"] * everything, case["tpot_ms"]))
    order = sorted(lines, key=lambda name: -max(value for _, value in lines[name]))
    for at, name in enumerate(order):
        memory, times = zip(*sorted(lines[name]), strict=True)
        axes.plot(
            memory,
            times,
            label=name,
            color=f"C{at % 10}",
            linestyle="-" if at < 10 else "--",
            marker=_MARKERS[at % len(_MARKERS)],
            markersize=5,
            linewidth=2.4 if name.partition(":")[0] == "auto" else 1.4,
        )
    plain = ticker.FuncFormatter(lambda value, _: f"{value:g}")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(plain)
    axes.yaxis.set_minor_formatter(plain if _narrow(cases) else ticker.NullFormatter())
    axes.set_ylabel("milliseconds per token")
    axes.set_xlabel(f"memory for experts, GiB (all of them: {everything:.1f})")
    axes.grid(which="both", alpha=0.25)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=9)


def _narrow(cases: Sequence[Mapping[str, Any]]) -> bool:
    """Whether all times lie within a factor of 10, so that labels at powers of ten are not enough."""
    times = [case["tpot_ms"] for case in cases]
    return bool(max(times) < 10 * min(times))
