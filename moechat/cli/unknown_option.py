"""Suggests options for one that does not exist: those that begin with it, else those that look like it."""

from __future__ import annotations

import difflib
from typing import Any

from moechat.errors import UsageError
from moechat.safe_text import one_line

_MOST = 3
_LIKENESS = 0.6
_HELP = "--help"


def unknown_option(error: Any) -> UsageError | None:
    """Translate the parser's error about an option that does not exist.

    Args:
        error: Any error of the parser.

    Returns:
        The error with suggestions; ``None`` if it is about something else.
    """
    context, name = getattr(error, "ctx", None), getattr(error, "option_name", None)
    if context is None or name is None or not hasattr(error, "possibilities"):
        return None
    command = context.command_path
    names = [
        option
        for parameter in context.command.get_params(context)
        if not getattr(parameter, "hidden", False)
        for option in (*parameter.opts, *parameter.secondary_opts)
        if option.startswith("--")
    ]
    close = _close_to(name, names)
    hint = f"did you mean {' or '.join(close)}?" if close else f"{command} {_HELP} lists its options"
    return UsageError(f"{command} has no option {one_line(name)}", hint=hint)


def _close_to(name: str, names: list[str]) -> list[str]:
    if not name.startswith("--"):
        return []
    wanted = name.lower().replace("_", "-")
    begins = sorted(option for option in names if option.startswith(wanted) and len(wanted) > len("--"))
    if begins:
        return begins[:_MOST]
    others = [option for option in names if option != _HELP]
    return difflib.get_close_matches(wanted, others, n=_MOST, cutoff=_LIKENESS)
