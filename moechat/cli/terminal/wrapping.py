"""Wraps messages between words: a terminal breaks lines in the middle of them."""

from __future__ import annotations

import re

_COLUMNS = re.compile(r"\S.*?(?: {2,})(?=\S)")
_LEAST_ROOM = 12  # cells beside a hanging indent


def wrap(text: str, width: int, *, first: int = 0) -> str:
    """Wrap lines that are longer than a terminal is wide.

    A line of columns, with two spaces or more between them, goes on below its second column, where there is
    room. Longer words are left to the terminal, so that a path or a command can be copied.

    Args:
        text: The text; its own line ends stay.
        width: Cells of a line.
        first: Cells that are taken on the first line.
    """
    lines = text.split("\n")
    return "\n".join(_wrapped(line, width, first if not number else 0) for number, line in enumerate(lines))


def _wrapped(line: str, width: int, taken: int) -> str:
    from rich.cells import cell_len

    if taken + cell_len(line) <= width:
        return line
    columns = _COLUMNS.match(line)
    indent = cell_len(columns[0]) if columns else 0
    indent = indent if width - indent >= _LEAST_ROOM else 0
    done: list[str] = []
    for word in re.findall(r" *[^ ]+ *?(?= |$)", line):
        if done and taken + cell_len(done[-1]) + cell_len(word) > width and done[-1].strip():
            done.append(" " * indent + word.lstrip())
            taken = 0
        elif done:
            done[-1] += word
        else:
            done.append(word)
    return "\n".join(done)
