"""Formats stored conversations for lists."""

from __future__ import annotations

import time
from datetime import datetime
from typing import TYPE_CHECKING

from moechat.history.conversation import utc_time
from moechat.safe_text import one_line

if TYPE_CHECKING:
    from moechat.history.session_database import Summary


def format_summary(summary: Summary) -> str:
    """Time of last use, turns, model and title of a conversation, on one line."""
    turns = f"{summary.turns:>3} turn{'s' if summary.turns != 1 else ' '}"
    return f"{_when(summary.updated):>12}  {turns}  {one_line(summary.model)}  {one_line(summary.title)}"


def _when(seconds: float) -> str:
    """A short local time, depending on its distance: today, this year, or earlier; ``?`` if invalid."""
    found = utc_time(seconds)
    try:
        then = None if found is None else found.astimezone()
    except OverflowError:  # the last representable hours, in another time zone
        then = None
    if then is None:
        return "?"
    now = datetime.fromtimestamp(time.time()).astimezone()
    if then.date() == now.date():
        return then.strftime("%H:%M")
    return then.strftime("%d %b %H:%M" if then.year == now.year else "%d %b %Y")
