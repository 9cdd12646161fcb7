"""Which part of a model's output is thinking, and which the answer.

Two notations are known: ``<think>…</think>`` before the answer (Qwen3, DeepSeek-R1 and many more; some chat
templates open it themselves), and gpt-oss's channels, ``<|channel|>analysis<|message|>…<|end|>``, of which
only ``final`` is the answer. Marks count only where they belong: an answer may speak about ``<think>``.
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
        text: Never empty.
        thought: It is thinking, not a part of the answer.
    """

    text: str
    thought: bool


class ThoughtSplitter:
    """Takes output piece by piece; what comes out does not depend on where the pieces were cut.

    Args:
        thinking: The prompt has opened the thought already.
    """

    def __init__(self, *, thinking: bool = False) -> None:
        self._state: _State = "thought" if thinking else "begin"
        self._held = ""  # what may be the beginning of a mark
        self._fresh = False  # white space between a thought and its answer belongs to neither

    def special(self, mark: str) -> list[Part]:
        """Take a special token, which tokenizers leave out of text; it counts only where it has a meaning.

        Others' ends of an answer are ``<|end|>`` too, say.
        """
        if self._state == "begin":
            meant = mark in (OPEN, CHANNEL, START) and not self._held.strip()
        elif self._state in ("answer", "thought"):
            meant = mark == CLOSE and self._state == "thought"
        else:
            meant = mark in _CHANNELS
        return self.feed(mark) if meant else []

    def feed(self, text: str) -> list[Part]:
        """Parts that are certain now."""
        self._held += text
        parts: list[Part] = []
        while self._step(parts, last=False):
            pass
        return _merged(parts)

    def flush(self) -> list[Part]:
        """What was held back, when nothing will follow."""
        parts: list[Part] = []
        while self._step(parts, last=True):
            pass
        return _merged(parts)

    def _step(self, parts: list[Part], *, last: bool) -> bool:
        """Take one bite off what is held; whether another may be possible."""
        if not self._held:
            return False
        if self._state == "begin":
            return self._begin(last)
        if self._state == "answer":
            text = self._held.lstrip() if self._fresh else self._held
            self._held, self._fresh = "", self._fresh and not text
            self._give(parts, text, thought=False)
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
        """Give everything before the first of the marks, and go to its state."""
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
            self._give(parts, text, thought=thought)
        return bool(found)

    @staticmethod
    def _give(parts: list[Part], text: str, *, thought: bool) -> None:
        if text:
            parts.append(Part(text, thought))


def _overlap(text: str, mark: str) -> int:
    """Characters at the end of the text that may be the beginning of the mark."""
    return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if mark.startswith(text[-n:])), 0)


def _merged(parts: list[Part]) -> list[Part]:
    merged: list[Part] = []
    for part in parts:
        if merged and merged[-1].thought == part.thought:
            merged[-1] = Part(merged[-1].text + part.text, part.thought)
        else:
            merged.append(part)
    return merged
