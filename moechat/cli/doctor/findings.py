"""The report of ``moechat doctor``: sections of names and values, and findings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

Level = Literal["problem", "advice"]


@dataclass(frozen=True)
class Finding:
    """Something that could be better.

    Attributes:
        level: ``problem`` for something broken; ``advice`` for something that could work better.
        fact: The fact with its numbers.
        hint: The next step.
    """

    level: Level
    fact: str
    hint: str


@dataclass
class Report:
    """The results of all sections.

    Attributes:
        sections: Names and values by title.
        findings: In the order of the sections.
    """

    sections: dict[str, dict[str, str]] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)

    def problem(self, fact: str, hint: str) -> None:
        """Add a finding on something broken."""
        self.findings.append(Finding("problem", fact, hint))

    def advice(self, fact: str, hint: str) -> None:
        """Add a finding on something that could work better."""
        self.findings.append(Finding("advice", fact, hint))


Rows = dict[str, str]
Look = Callable[[Report, Rows], None]
