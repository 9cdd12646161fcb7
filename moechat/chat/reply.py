"""One answer as it comes."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from moechat.chat.output import Sink
from moechat.chat.thinking import OPEN, Part, ThoughtSplitter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from moechat import Engine, Step

# Of the prompt: enough for what a chat template puts after its last message.
_LAST_TOKENS = 8


@dataclass
class Reply:
    """What came of one answer so far; complete when ``finish_reason`` is set.

    Attributes:
        pieces: The answer, without thinking where that is told apart.
        thoughts: The thinking.
        tokens: All tokens of both.
        finish_reason: As of the engine's steps, or what whoever ended it says.
    """

    pieces: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None

    @property
    def text(self) -> str:
        """The answer so far."""
        return "".join(self.pieces)

    @property
    def thinking(self) -> str:
        """The thinking so far."""
        return "".join(self.thoughts).strip()

    def follow(self, steps: Iterator[Step], answer: Sink | None) -> None:
        """Take all steps, showing the text as it comes; an interrupt leaves what was taken so far."""
        for step in steps:
            self.pieces.append(step.text)
            self.tokens.append(step.token_id)
            self.finish_reason = step.finish_reason
            if answer is not None:
                answer.write(step.text)

    def follow_apart(
        self,
        steps: Iterator[Step],
        answer: Sink,
        thoughts: Sink,
        *,
        thinking: bool,
        token_text: Callable[[int], str],
    ) -> None:
        """The same with thinking told apart from the answer.

        Args:
            steps: The engine's; closed in any case.
            answer: Where the answer goes; not ended here.
            thoughts: Where thinking goes; ended when an answer begins, or here.
            thinking: The prompt has opened a thought.
            token_text: Gives special tokens, which steps leave out, as text.
        """
        splitter = ThoughtSplitter(thinking=thinking)
        try:
            with closing(steps) as open_steps:  # type: ignore[type-var]
                for step in open_steps:
                    self.tokens.append(step.token_id)
                    if step.text:
                        parts = splitter.feed(step.text)
                    else:
                        parts = splitter.special(token_text(step.token_id))
                    self._show(parts, answer, thoughts)
                    self.finish_reason = step.finish_reason
        finally:
            # What was held back belongs to a stopped answer too.
            self._show(splitter.flush(), answer, thoughts)
            thoughts.end()

    def _show(self, parts: list[Part], answer: Sink, thoughts: Sink) -> None:
        for text, thought in parts:
            if thought:
                self.thoughts.append(text)
                thoughts.write(text)
            else:
                if not self.pieces:
                    thoughts.end()
                self.pieces.append(text)
                answer.write(text)


def opens_thought(engine: Engine, prompt: Sequence[int]) -> bool:
    """Whether the chat template itself has begun a thought at the end of the prompt."""
    return "".join(engine.token_text(token) for token in prompt[-_LAST_TOKENS:]).rstrip().endswith(OPEN)
