"""Separates a model's thinking from its answer, whichever notation the model uses.

For a chat without tools. The notations are those of the table in :mod:`moechat.reply_formats.formats`:
``<think>…</think>`` before the answer (Qwen3, DeepSeek and many more), the same with ``[THINK]`` (Mistral),
``<seed:think>`` and ``<|channel>thought`` (Gemma), and gpt-oss's channels. Marks are recognised only in their
places: an answer may contain ``<think>``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from moechat.reply_formats.events import Event, Text
from moechat.reply_formats.formats import ANY_THINKING
from moechat.reply_formats.notations import ReplyFormat
from moechat.reply_formats.parser import ReplyParser

_PROMPT_END_TOKENS = 8
_FINAL_CHANNEL = "<|channel|>final<|message|>"


class Part(NamedTuple):
    """A piece of output.

    Attributes:
        text: Not empty.
        thought: The text is thinking, not part of the answer.
    """

    text: str
    thought: bool


class ThoughtSplitter:
    """Splits output that arrives in pieces; the result does not depend on where the pieces end.

    Args:
        thinking: The prompt already opened a thought.
    """

    def __init__(self, *, thinking: bool = False) -> None:
        self._parser = ReplyParser(ANY_THINKING, thinking=thinking)

    def special(self, mark: str) -> list[Part]:
        """Add a special token, which tokenizers leave out of text; ignored where it has no meaning.

        For example, other models end an answer with ``<|end|>``.
        """
        return _parts(self._parser.special(mark))

    def feed(self, text: str) -> list[Part]:
        """Add text; returns the parts that are now certain."""
        return _parts(self._parser.feed(text))

    def flush(self) -> list[Part]:
        """The held text, at the end of the output."""
        return _parts(self._parser.end())


def prompt_end(tokens: Sequence[int], token_text: Callable[[int], str]) -> str:
    """The text of a prompt's last tokens: enough for the end of any chat template.

    Args:
        tokens: The prompt.
        token_text: The text of one token, special ones too.
    """
    return "".join(map(token_text, tokens[-_PROMPT_END_TOKENS:]))


def opens_thought(prompt_end: str, format: ReplyFormat = ANY_THINKING) -> bool:
    """Whether a prompt ends inside a thought, because its chat template opened one.

    Args:
        prompt_end: The last characters of the prompt, special tokens included.
        format: The model's format.
    """
    return bool(thought_end(prompt_end, format))


def thought_end(prompt_end: str, format: ReplyFormat = ANY_THINKING) -> str:
    """The mark that ends the thought in which a prompt ends; empty if it ends in none.

    Args:
        prompt_end: As for :func:`opens_thought`, and so is ``format``.
        format: The model's format.
    """
    end = prompt_end.rstrip()
    found = (mark.close for mark in format.thoughts if end.endswith((mark.open + mark.label).rstrip()))
    return next(found, "")


def answer_begin(prompt_end: str, format: ReplyFormat = ANY_THINKING) -> str:
    """The mark behind which the answer begins; empty if it begins at once.

    Args:
        prompt_end: As for :func:`opens_thought`, and so is ``format``.
        format: The model's format.
    """
    return _FINAL_CHANNEL if format.channels else thought_end(prompt_end, format)


def _parts(events: Iterable[Event]) -> list[Part]:
    """Text events, with neighbours of one kind joined."""
    merged: list[Part] = []
    for event in events:
        if isinstance(event, Text):
            if merged and merged[-1].thought == event.thought:
                merged[-1] = Part(merged[-1].text + event.text, event.thought)
            else:
                merged.append(Part(event.text, event.thought))
    return merged
