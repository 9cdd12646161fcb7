"""Progress of loading a model on stderr: a bar on a terminal, occasional lines elsewhere."""

from __future__ import annotations

import time
from collections import deque
from types import TracebackType
from typing import TYPE_CHECKING, Any

from moechat.cli.terminal.consoles import console, is_animated, neutralise, print_notice

if TYPE_CHECKING:
    from rich.progress import Progress as Bar
    from rich.progress import TaskID

    from moechat import Progress

_TITLES = {
    "download": "downloading",
    "convert": "converting",
    "wait": "waiting",
    "verify": "verifying",
    "load": "loading",
    "tune": "timing plans for this machine",
    "synthetic": "writing random weights",
    "compare": "comparing",
}
# Stages whose progress is not in bytes.
_IN_STEPS = ("tune", "compare")
_FIRST_LINE_AFTER_S = 3.0
_LINE_EVERY_S = 10.0
_REDRAW_EVERY_S = 0.1
_RATE_OVER_S = 5.0


class LoadProgress:
    """Shows the progress of ``moechat.load``; a context manager that removes the bar at its end.

    Args:
        quiet: Show nothing.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        self._quiet = quiet
        self._animated = not quiet and is_animated()
        self._bar: Bar | None = None
        self._task: TaskID | None = None
        self._stage = ""
        self._stage_started = 0.0
        self._stage_first_done = 0
        self._shown_at = 0.0
        self._printed = False
        self._samples: deque[tuple[float, int]] = deque()

    def __enter__(self) -> LoadProgress:
        self.start()
        return self

    def start(self) -> None:
        """Show the bar on a terminal; also after :meth:`stop`."""
        self._stage_started = time.monotonic()
        if self._animated and self._bar is None:
            self._bar = _make_bar()
            self._task = self._add_task()
            try:
                self._bar.start()
            except BaseException:
                self.stop()  # shows the cursor again
                raise

    def stop(self) -> None:
        """Remove the bar, for other output."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = self._task = None

    def say(self, title: str) -> None:
        """Set the bar's title before the first report."""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, description=title)

    def notice(self, text: str) -> None:
        """Print a line, above the bar if there is one."""
        print_notice(text)

    def _add_task(self) -> TaskID:
        assert self._bar is not None
        return self._bar.add_task("loading", total=None, size="", detail="")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        if error is None:
            self._end_stage()

    def __call__(self, report: Progress) -> None:
        """Show a report; fast enough for thousands per second."""
        if self._quiet:
            return
        if report.stage == "notice":
            self.notice(report.detail)
            return
        now = time.monotonic()
        if report.stage != self._stage:
            self._end_stage()
            self._stage, self._stage_started, self._stage_first_done = report.stage, now, report.done
            self._shown_at, self._printed = 0.0, False
            self._samples.clear()
            if self._bar is not None and self._task is not None:
                self._bar.remove_task(self._task)  # each stage has its own clock
                self._task = self._add_task()
        elif now - self._shown_at < _REDRAW_EVERY_S and report.done != report.total:
            return
        if self._bar is not None and self._task is not None:
            self._shown_at = now
            in_bytes = report.total is not None and report.total > 1 and report.stage not in _IN_STEPS
            size = f"{format_bytes(report.done)} of {format_bytes(report.total or 0)}" if in_bytes else ""
            if report.stage in ("download", "verify"):
                size += self._rate(report, now)
            self._bar.update(
                self._task,
                description=_TITLES.get(report.stage, report.stage),
                completed=report.done,
                total=report.total,
                size=size,
                detail=_one_line(report.detail),
            )
        elif self._line_is_due(now):
            self._shown_at, self._printed = now, True
            print_notice(self._line(report, now))

    def _rate(self, report: Progress, now: float) -> str:
        """The recent rate, as text."""
        self._samples.append((now, report.done))
        while now - self._samples[0][0] > _RATE_OVER_S:
            self._samples.popleft()
        since, before = self._samples[0]
        span = now - since
        return f", {format_bytes(max(0, report.done - before) / span)}/s" if span > 1 else ""

    def _line_is_due(self, now: float) -> bool:
        if self._printed:
            return now - self._shown_at >= _LINE_EVERY_S
        return now - self._stage_started >= _FIRST_LINE_AFTER_S

    def _line(self, report: Progress, now: float) -> str:
        words = [_TITLES.get(report.stage, report.stage)]
        if report.total is not None and report.total > 1 and report.stage != "tune":
            if report.stage not in _IN_STEPS:
                words.append(f"{format_bytes(report.done)} of {format_bytes(report.total)}")
            gained = report.done - self._stage_first_done
            if gained > 0 and report.done < report.total:
                left = (report.total - report.done) * (now - self._stage_started) / gained
                words.append(f"{format_seconds(left)} left")
        if report.detail:
            words.append(_one_line(report.detail))
        return ", ".join(words)

    def _end_stage(self) -> None:
        # Tell the user that the long conversion happens only once.
        if self._stage == "convert" and not self._quiet:
            took = format_seconds(time.monotonic() - self._stage_started)
            print_notice(f"converted in {took}, and kept for the next time")
        self._stage = ""


def _one_line(detail: str) -> str:
    """Neutralise a detail, which contains untrusted names of files and tensors."""
    return neutralise(detail).replace("\n", "␊").replace("\t", "␉")


def format_bytes(count: float) -> str:
    """``1.5 GiB``; three digits at most."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def format_seconds(seconds: float) -> str:
    """``850 ms``, ``4.2 s``, ``3:05 min`` or ``1:02:03 h``."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes}:{rest:02d} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d} h"


def about_seconds(seconds: float) -> str:
    """An estimate in whole seconds, at least one: ``42 s`` or ``3:05 min``."""
    whole = max(1, round(seconds))
    return f"{whole} s" if whole < 60 else format_seconds(whole)


def _make_bar() -> Bar:
    from rich.console import RenderableType
    from rich.constrain import Constrain
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

    columns: list[Any] = [
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[size]}", markup=False),
        TimeRemainingColumn(compact=True),
        TextColumn("{task.fields[detail]}", markup=False, style="dim"),
    ]
    shown_on = console()

    class Narrower(Progress):
        """Leaves room for the ^C that a terminal echoes, which would wrap a full line."""

        def get_renderable(self) -> RenderableType:
            return Constrain(super().get_renderable(), max(shown_on.width - 3, 10))

    return Narrower(*columns, console=shown_on, transient=True)
