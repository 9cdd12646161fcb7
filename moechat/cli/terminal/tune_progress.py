"""Progress of tuning on stderr: a bar on a terminal, occasional lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from moechat.cli.terminal.consoles import console, is_animated, print_notice
from moechat.cli.terminal.load_progress import format_seconds

_LINE_EVERY_S = 10.0
_REDRAW_EVERY_S = 0.1


class TuneProgress:
    """Shows the parts of a run; receives :class:`moechat.tune.run.TuneEvents`.

    Args:
        before: Called once, before the first part: removes another bar.
        quiet: Show nothing.
    """

    def __init__(self, before: Callable[[], None], *, quiet: bool) -> None:
        self._before: Callable[[], None] | None = before
        self._quiet = quiet
        self._bar: Any = None
        self._task: Any = None
        self._title = ""
        self._total = 0
        self._first: int | None = None
        self._started = 0.0
        self._next = 0.0

    def __enter__(self) -> TuneProgress:
        return self

    def __exit__(self, *error: object) -> None:
        self._stop()

    def phase(self, title: str, total: int) -> None:
        """See :class:`moechat.tune.run.TuneEvents`."""
        if self._before is not None:
            self._before()
            self._before = None
        self._stop()
        self._title, self._total, self._first = title, total, None
        self._started = self._next = time.monotonic()
        if self._quiet:
            return
        if is_animated():
            from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=24),
                TextColumn("{task.fields[detail]}"),
                TimeRemainingColumn(compact=True),
                console=console(),
                transient=True,
            )
            self._task = self._bar.add_task(title, total=total or None, detail="")
            self._bar.start()
        else:
            self._next += _LINE_EVERY_S
            print_notice(title)

    def advance(self, done: int, detail: str = "") -> None:
        """See :class:`moechat.tune.run.TuneEvents`."""
        now = time.monotonic()
        if self._first is None:
            self._first, self._started = done, now
        if self._quiet or (now < self._next and done < self._total):
            return
        self._next = now + (_LINE_EVERY_S if self._bar is None else _REDRAW_EVERY_S)
        counted = f"{done:,} of {self._total:,}" + (f", {detail}" if detail else "")
        if self._bar is not None:
            self._bar.update(self._task, completed=done, detail=counted)
            return
        since = done - self._first if done < self._total else 0
        left = (
            f", {format_seconds((now - self._started) / since * (self._total - done))} left" if since else ""
        )
        print_notice(f"{self._title}: {counted}{left}")

    def notice(self, text: str) -> None:
        """See :class:`moechat.tune.run.TuneEvents`."""
        if not self._quiet:
            print_notice(text)

    def _stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = self._task = None
