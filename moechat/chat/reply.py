"""Collects one answer while it is generated."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from moechat.chat.terminal.output import Sink
from moechat.reply_formats import thinking as reply_thinking
from moechat.reply_formats.thinking import Part, ThoughtSplitter
from moechat.steps import NO_TOKEN

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from moechat.chat.interfaces import ChatEngine
    from moechat.steps import Step


@dataclass
class Reply:
    """An answer so far; complete when ``finish_reason`` is set.

    Attributes:
        pieces: Pieces of the answer; with :meth:`follow_split`, without thinking.
        thoughts: Pieces of the thinking.
        tokens: Tokens of both.
        finish_reason: The engine's reason, or that of the caller who stopped it.
        stop: The stop text that ended it.
        steps: The engine's steps, where they have probabilities.
    """

    pieces: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop: str | None = None
    steps: list[Step] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The answer so far."""
        return "".join(self.pieces)

    @property
    def thinking(self) -> str:
        """The thinking so far."""
        return "".join(self.thoughts).strip()

    def follow(self, steps: Iterator[Step], answer: Sink | None) -> None:
        """Consume all steps and show their text; an interrupt keeps the text so far."""
        for step in steps:
            self.pieces.append(step.text)
            self._note(step)
            if answer is not None:
                answer.write(step.text)

    def follow_split(
        self,
        steps: Iterator[Step],
        answer: Sink,
        thoughts: Sink,
        *,
        thinking: bool,
        token_text: Callable[[int], str],
    ) -> None:
        """Like :meth:`follow`, separating thinking from the answer.

        Args:
            steps: The engine's steps; always closed.
            answer: Sink for the answer; not ended here.
            thoughts: Sink for the thinking; ended when the answer begins, or at the end.
            thinking: The prompt ends inside a thought.
            token_text: Returns the text of special tokens, which steps leave out.
        """
        splitter = ThoughtSplitter(thinking=thinking)
        try:
            with closing(steps) as open_steps:  # type: ignore[type-var]
                for step in open_steps:
                    self._note(step)
                    if step.text:
                        parts = splitter.feed(step.text)
                    else:
                        parts = splitter.special(token_text(step.token_id))
                    self._show(parts, answer, thoughts)
        finally:
            # A stopped answer includes the text held back so far.
            self._show(splitter.flush(), answer, thoughts)
            thoughts.end()

    def logprobs_json(self, engine: ChatEngine) -> list[dict[str, Any]]:
        """Probabilities of the tokens: token, text, logprob, and top: the likeliest, in the same form."""

        def entry(token: int, logprob: float | None) -> dict[str, Any]:
            return {"token": token, "text": engine.token_text(token), "logprob": logprob}

        return [
            {
                **entry(step.token_id, step.logprob),
                "top": [entry(one.token_id, one.logprob) for one in step.top_logprobs],
            }
            for step in self.steps
        ]

    def _note(self, step: Step) -> None:
        if step.token_id != NO_TOKEN:
            self.tokens.append(step.token_id)
        self.finish_reason, self.stop = step.finish_reason, step.stop
        if step.logprob is not None:
            self.steps.append(step)

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


def thought_end(engine: ChatEngine, prompt: Sequence[int]) -> str:
    """The mark that ends the thought that the chat template opened at the prompt's end; empty for none."""
    return reply_thinking.thought_end(reply_thinking.prompt_end(prompt, engine.token_text))
