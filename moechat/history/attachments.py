"""Files in front of a message: puts them there, and finds the message behind them."""

from __future__ import annotations

import re

_HEADING = re.compile(r"[^\n]+:\n(`{3,})\n")


def attach(files: list[tuple[str, str]], question: str) -> str:
    """Prepend files to a message, each in a fence longer than any in its text.

    Args:
        files: Names and contents.
        question: The message.
    """
    parts = []
    for name, text in files:
        longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
        fence = "`" * max(3, longest + 1)
        end = "" if text.endswith("\n") or not text else "\n"
        parts.append(f"{name}:\n{fence}\n{text}{end}{fence}")
    return "\n\n".join([*parts, question])


def without_files(message: str) -> str:
    """The message behind the files that :func:`attach` put before it; all of it if there is none behind."""
    place = 0
    while heading := _HEADING.match(message, place):
        # The fence is longer than any in the text, so its next line of its own closes it.
        end = f"\n{heading[1]}\n\n"
        found = message.find(end, heading.end() - 1)
        if found < 0:
            break
        place = found + len(end)
    rest = message[place:]
    return rest if rest.strip() else message
