"""What ``moechat doctor`` says: sections of names and values, and findings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

Level = Literal["problem", "advice"]


@dataclass(frozen=True)
class Finding:
    """Something that could be better.

    Attributes:
        level: ``problem``: something does not work; ``advice``: it works, but worse than it could.
        fact: What was found, with its numbers.
        hint: What to do.
    """

    level: Level
    fact: str
    hint: str


@dataclass
class Report:
    """What was looked into.

    Attributes:
        sections: Title, then names and values.
        findings: In the order of the sections.
    """

    sections: dict[str, dict[str, str]] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)

    def problem(self, fact: str, hint: str) -> None:
        """Something does not work."""
        self.findings.append(Finding("problem", fact, hint))

    def advice(self, fact: str, hint: str) -> None:
        """Something could be better."""
        self.findings.append(Finding("advice", fact, hint))


Rows = dict[str, str]
Look = Callable[[Report, Rows], None]


def size_text(nbytes: int) -> str:
    """``1.5 GiB``."""
    from moechat.cli.progress import format_bytes

    return format_bytes(nbytes)
