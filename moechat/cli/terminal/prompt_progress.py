"""Shows progress over many prompts."""

from __future__ import annotations

import time
from typing import Any

from moechat.cli.terminal.consoles import is_animated, print_notice
from moechat.cli.terminal.load_progress import format_seconds

_FIRST_LINE_AFTER_S = 3.0
_LINE_EVERY_S = 10.0
_REDRAW_EVERY_S = 0.1


def prompts_text(count: int) -> str:
    """``1 prompt``, ``2 prompts``."""
    return f"{count:,} prompt{'' if count == 1 else 's'}"


class PromptProgress:
    """Progress over many prompts on stderr: a bar on a terminal, occasional lines elsewhere.

    Args:
        prompts: Number of prompts.
        doing: Present participle for the bar, such as ``recording``.
        done: Past participle for lines, such as ``recorded``.
        quiet: Show nothing.
    """

    def __init__(self, prompts: int, doing: str, done: str, *, quiet: bool) -> None:
        self._doing = doing
        self._done = done
        self._prompts = prompts
        self._quiet = quiet
        self._bar: Any = None
        self._task: Any = None
        self._started = time.monotonic()
        self._next = self._started + _FIRST_LINE_AFTER_S

    def __enter__(self) -> PromptProgress:
        if not self._quiet and is_animated():
            from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

            from moechat.cli.terminal.consoles import console

            self._bar = Progress(
                TextColumn(self._doing),
                BarColumn(bar_width=24),
                TextColumn("{task.completed} of {task.total} prompts, {task.fields[tokens]:,} tokens"),
                TimeRemainingColumn(compact=True),
                console=console(),
                transient=True,
            )
            self._next = self._started
            self._task = self._bar.add_task(self._doing, total=self._prompts, tokens=0)
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, done: int, tokens: int) -> None:
        """Show the number of finished prompts and their tokens."""
        if self._quiet:
            return
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + (_LINE_EVERY_S if self._bar is None else _REDRAW_EVERY_S)
        if self._bar is not None:
            self._bar.update(self._task, completed=done, tokens=tokens)
            return
        passed = now - self._started
        left = f", {format_seconds(passed / done * (self._prompts - done))} left" if done else ""
        print_notice(f"{self._done} {done} of {prompts_text(self._prompts)}, {tokens:,} tokens{left}")
