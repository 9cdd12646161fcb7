"""Separates a model's thinking from its answer.

Two notations are supported: ``<think>…</think>`` before the answer (Qwen3, DeepSeek-R1 and many more; some
chat templates open it themselves), and gpt-oss's channels, ``<|channel|>analysis<|message|>…<|end|>``, of
which only ``final`` is the answer. Marks are recognised only in their places: an answer may contain
``<think>``.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

OPEN, CLOSE = "<think>", "</think>"
CHANNEL, MESSAGE, START, END = "<|channel|>", "<|message|>", "<|start|>", "<|end|>"
_ANSWER = "final"
_CHANNELS = frozenset({CHANNEL, MESSAGE, START, END})

_State = Literal["begin", "thought", "answer", "header", "channel thought", "channel answer", "between"]


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
        self._state: _State = "thought" if thinking else "begin"
        self._held = ""  # may be the beginning of a mark
        self._fresh = False  # drop white space between a thought and its answer

    def special(self, mark: str) -> list[Part]:
        """Add a special token, which tokenizers leave out of text; ignored where it has no meaning.

        For example, other models end an answer with ``<|end|>``.
        """
        if self._state == "begin":
            expected = mark in (OPEN, CHANNEL, START) and not self._held.strip()
        elif self._state in ("answer", "thought"):
            expected = mark == CLOSE and self._state == "thought"
        else:
            expected = mark in _CHANNELS
        return self.feed(mark) if expected else []

    def feed(self, text: str) -> list[Part]:
        """Add text; returns the parts that are now certain."""
        self._held += text
        parts: list[Part] = []
        while self._step(parts, last=False):
            pass
        return _merged(parts)

    def flush(self) -> list[Part]:
        """The held text, at the end of the output."""
        parts: list[Part] = []
        while self._step(parts, last=True):
            pass
        return _merged(parts)

    def _step(self, parts: list[Part], *, last: bool) -> bool:
        """Process the beginning of the held text; returns whether another step may be possible."""
        if not self._held:
            return False
        if self._state == "begin":
            return self._begin(last)
        if self._state == "answer":
            text = self._held.lstrip() if self._fresh else self._held
            self._held, self._fresh = "", self._fresh and not text
            self._append(parts, text, thought=False)
            return False
        if self._state == "thought":
            return self._until(parts, {CLOSE: "answer"}, thought=True, last=last)
        if self._state == "header":
            return self._header(last)
        after: dict[str, _State] = {END: "between", CHANNEL: "header", START: "between"}
        if self._state == "between":
            return self._until(None, after, thought=True, last=last)
        return self._until(parts, after, thought=self._state == "channel thought", last=last)

    def _begin(self, last: bool) -> bool:
        stripped = self._held.lstrip()
        for mark, state in ((OPEN, "thought"), (CHANNEL, "header"), (START, "between")):
            if stripped.startswith(mark):
                self._held = stripped[len(mark) :]
                self._state = state  # type: ignore[assignment]
                return True
            if mark.startswith(stripped) and not last:
                return False
        self._state = "answer"
        return True

    def _header(self, last: bool) -> bool:
        name, found, rest = self._held.partition(MESSAGE)
        if not found:
            if last:
                self._held = ""
            return False
        self._held = rest
        self._state = "channel answer" if name.split()[:1] == [_ANSWER] else "channel thought"
        return True

    def _until(
        self, parts: list[Part] | None, marks: dict[str, _State], *, thought: bool, last: bool
    ) -> bool:
        """Append the text before the first of the marks, and enter its state."""
        found = [(place, mark) for mark in marks if (place := self._held.find(mark)) >= 0]
        if found:
            place, mark = min(found)
            text, self._held = self._held[:place], self._held[place + len(mark) :]
            self._state, self._fresh = marks[mark], True
        else:
            kept = 0 if last else max(_overlap(self._held, mark) for mark in marks)
            cut = len(self._held) - kept
            text, self._held = self._held[:cut], self._held[cut:]
        if parts is not None:
            self._append(parts, text, thought=thought)
        return bool(found)

    @staticmethod
    def _append(parts: list[Part], text: str, *, thought: bool) -> None:
        if text:
            parts.append(Part(text, thought))


def _overlap(text: str, mark: str) -> int:
    """Number of characters at the end of the text that may begin the mark."""
    return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if mark.startswith(text[-n:])), 0)


def _merged(parts: list[Part]) -> list[Part]:
    merged: list[Part] = []
    for part in parts:
        if merged and merged[-1].thought == part.thought:
            merged[-1] = Part(merged[-1].text + part.text, part.thought)
        else:
            merged.append(part)
    return merged
