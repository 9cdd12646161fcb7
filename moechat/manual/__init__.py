"""Pages of the manual: ``TOPIC.md`` files in this directory, listed by ``index.md``."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from moechat.errors import UsageError

_DIRECTORY = Path(__file__).parent
_ENTRY = re.compile(r"- \[([a-z-]+)\]\([a-z-]+\.md\): (.+)")
_LINK = re.compile(r"\[([^\]\n]+)\]\(([a-z-]+)\.md\)")


@dataclass(frozen=True)
class Topic:
    """A page of the manual.

    Attributes:
        name: Its file, without ``.md``.
        summary: One line about it.
        section: Heading of the index under which it is listed.
    """

    name: str
    summary: str
    section: str


@dataclass(frozen=True)
class Match:
    """A line of the manual that contains a text.

    Attributes:
        topic: Name of the page.
        heading: Nearest heading above the line, or the line itself if it is one.
        line: The line, without blanks at both ends.
    """

    topic: str
    heading: str
    line: str


def topics() -> list[Topic]:
    """All pages, in the order of the index."""
    found, section = [], ""
    for line in _read("index").splitlines():
        if line.startswith("## "):
            section = line[3:]
        elif entry := _ENTRY.fullmatch(line):
            found.append(Topic(entry[1], entry[2], section))
    return found


def page(topic: str) -> str:
    """A page as markdown; its links to other pages are the commands that show them.

    Raises:
        UsageError: There is no such page.
    """
    names = [known.name for known in topics()]
    if topic not in names:
        near = difflib.get_close_matches(topic, names, n=3)
        near += [name for name in names if topic.casefold() in name and name not in near]
        hint = f"similar topics: {', '.join(near)}" if topic and near else "moechat help lists the topics"
        raise UsageError(f"the manual has no topic {topic!r}", hint=hint)
    return _LINK.sub(_as_command, _read(topic))


def search(text: str, names: Iterable[str]) -> Iterator[Match]:
    """Lines that contain a text, in upper or lower case.

    Args:
        text: A word or several.
        names: Pages to search.

    Raises:
        UsageError: There is no such page.
    """
    wanted = text.casefold()
    for name in names:
        heading, in_code = "", False
        for line in page(name).splitlines():
            if line.startswith("```"):
                in_code = not in_code
            elif line.startswith("#") and not in_code:
                heading = line.lstrip("# ")
            if wanted in line.casefold():
                yield Match(name, heading, line.strip())


def _read(name: str) -> str:
    return (_DIRECTORY / f"{name}.md").read_text(encoding="utf-8")


def _as_command(link: re.Match[str]) -> str:
    command = f"moechat help {link[2]}"
    return command if link[1] == command else f"{link[1]} ({command})"
