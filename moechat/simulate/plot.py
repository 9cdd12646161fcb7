"""Time per token over memory, one line for each system, as a picture."""

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
    """Find out before simulating that a picture cannot be drawn.

    Raises:
        UsageError: The file's name does not say which kind of picture, or matplotlib is not installed.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise UsageError(f"{path} does not end in {', '.join(SUFFIXES)}", hint="name it FILE.png")
    _matplotlib("figure")


def _matplotlib(module: str) -> Any:
    """A module of matplotlib, which is no dependency of the package."""
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
        path: Where to.

    Raises:
        UsageError: As :func:`check_plot`.
        MoechatError: The file cannot be written.
    """
    check_plot(path)
    ticker = _matplotlib("ticker")
    first = cases[0]
    everything = first["experts_total_bytes"] / _GIBI
    lines: dict[str, list[tuple[float, float]]] = {}
    for case in cases:
        # Of its budget, also for a system that has no use for all of it: lines are to be compared upright.
        lines.setdefault(case["system"], []).append((case["fraction"] * everything, case["tpot_ms"]))
    figure = _matplotlib("figure").Figure(figsize=(9, 5.5), dpi=150, layout="constrained")
    axes = figure.add_subplot()
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
    axes.set_title(f"{first['model']}, {first['bits']} bits, on {first['profile']} (simulated)", fontsize=11)
    axes.grid(which="both", alpha=0.25)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=9)
    try:
        figure.savefig(path)
    except OSError as problem:
        raise MoechatError(f"{path} cannot be written: {problem.strerror}") from problem


def _narrow(cases: Sequence[Mapping[str, Any]]) -> bool:
    """So little between the slowest and the fastest that powers of ten alone would label nothing."""
    times = [case["tpot_ms"] for case in cases]
    return bool(max(times) < 10 * min(times))
