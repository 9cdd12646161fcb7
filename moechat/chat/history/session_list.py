"""Conversations that are kept, as lines of a list."""

from __future__ import annotations

import time
from datetime import datetime
from typing import TYPE_CHECKING

from moechat.chat.conversation import moment
from moechat.chat.neutral import one_line

if TYPE_CHECKING:
    from moechat.chat.sessions import Summary


def listed(summary: Summary) -> str:
    """What follows a conversation's number: when it was used last, its turns, who answered, its title."""
    turns = f"{summary.turns:>3} turn{'s' if summary.turns != 1 else ' '}"
    return f"{_when(summary.updated):>12}  {turns}  {one_line(summary.model)}  {one_line(summary.title)}"


def _when(seconds: float) -> str:
    """A time for people: of today, of this year, or before; ``?`` for what is none."""
    found = moment(seconds)
    try:
        then = None if found is None else found.astimezone()
    except OverflowError:  # the last hours that have a name, in another zone
        then = None
    if then is None:
        return "?"
    now = datetime.fromtimestamp(time.time()).astimezone()
    if then.date() == now.date():
        return then.strftime("%H:%M")
    return then.strftime("%d %b %H:%M" if then.year == now.year else "%d %b %Y")
