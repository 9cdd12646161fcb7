"""One answer as it comes, and what every conversation begins with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from moechat.cli.options import RunOptions
from moechat.cli.terminal import Answer, print_notice

if TYPE_CHECKING:
    from collections.abc import Iterator

    from moechat import Step


@dataclass
class Reply:
    """What came of one answer so far; complete when ``finish_reason`` is set."""

    pieces: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self.pieces)

    def follow(self, steps: Iterator[Step], answer: Answer | None) -> None:
        """Take all steps, showing the text as it comes; an interrupt leaves what was taken so far."""
        for step in steps:
            self.pieces.append(step.text)
            self.tokens.append(step.token_id)
            self.finish_reason = step.finish_reason
            if answer is not None:
                answer.write(step.text)


def opening(options: RunOptions) -> list[dict[str, str]]:
    """The messages that every conversation starts with."""
    if options.system_prompt is None:
        return []
    return [{"role": "system", "content": options.system_prompt}]


def say_if_cut(reply: Reply) -> None:
    """Say so when a limit ended the answer, not the model."""
    if reply.finish_reason == "length":
        print_notice(f"(cut off after {len(reply.tokens)} tokens)")
