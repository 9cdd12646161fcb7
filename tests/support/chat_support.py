"""Doubles for the tests of the chat: an engine with scripted answers, scripted input, recorded output."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moechat.chat.chat_options import ChatOptions, Generation
from moechat.chat.repl import Chat
from moechat.errors import PromptTooLongError
from moechat.steps import FinishReason, Step

Messages = list[dict[str, str]]


class Tokens(list[int]):
    """One token for each character of all messages; keeps the messages."""

    messages: Messages


@dataclass(frozen=True)
class Sampling:
    temperature: float = 0.5
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def override(self, **given: Any) -> Sampling:
        return replace(self, **given)


@dataclass
class Numbers:
    prompt_tokens: int = 0
    output_tokens: int = 0

    def to_json(self) -> dict[str, Any]:
        return {"prompt_tokens": self.prompt_tokens, "output_tokens": self.output_tokens}


@dataclass
class ScriptedEngine:
    """Gives scripted answers; a piece that is an exception is raised.

    Attributes:
        answers: The pieces of one answer after the other.
        room: Most characters of all messages and the reserve for the answer together.
        reserves: The reserve of every call.
        prompts: The messages of every answer that was started.
        given: The settings of every such answer.
        pause_s: Before each piece.
        prompt_s: For reading the prompt, in two parts.
        template_end: Text that the chat template adds at the end of a prompt.
        encoded: Number of calls that encode messages or texts.
        map: Where its experts are.
        template_variables: Those that its chat template reads.
        template_options: The values for the template of every call that encodes.
    """

    answers: list[list[str | BaseException]]
    room: int = 10**9
    prompts: list[Messages] = field(default_factory=list)
    given: list[dict[str, Any]] = field(default_factory=list)
    name: str = "scripted"
    context_length: int = 100
    stats: Numbers = field(default_factory=Numbers)
    reserves: list[int] = field(default_factory=list)
    sampling: Sampling = field(default_factory=Sampling)
    pause_s: float = 0.0
    template_end: str = ""
    has_chat_template: bool = True
    finish_reason: FinishReason = "length"
    encoded: int = 0
    prompt_s: float = 0.0
    map: Any = None
    template_variables: frozenset[str] | None = frozenset()
    template_options: list[dict[str, Any]] = field(default_factory=list)

    def encode(self, messages: Messages | str, *, template_options: dict[str, Any] | None = None) -> Tokens:
        self.encoded += 1
        self.template_options.append(template_options or {})
        if isinstance(messages, str):
            return Tokens(map(ord, messages))
        text = "".join(message["content"] for message in messages) + self.template_end
        tokens = Tokens(map(ord, text))
        tokens.messages = [dict(message) for message in messages]
        return tokens

    def token_text(self, token: int) -> str:
        return chr(token)

    def generate(
        self, prompt: Tokens, *, reserve: int = 1, progress: Any = None, **settings: Any
    ) -> Iterator[Step]:
        self.reserves.append(reserve)
        if len(prompt) + reserve > self.room:
            raise PromptTooLongError(f"{len(prompt)} tokens; the context holds {self.room}")
        return self._steps(prompt, progress, settings)

    def idle(self) -> None:
        return None

    def expert_map(self) -> Any:
        return self.map

    def notices(self) -> list[str]:
        return []

    def describe(self) -> Any:
        """The properties of an engine that a chat shows."""
        facts = [("model", f"{self.name} (scripted, 4 bits)"), ("device", "cpu"), ("experts", "in a script")]
        return SimpleNamespace(
            rows=lambda size: [*facts, ("memory", size(1 << 30)), ("memory, experts", size(1 << 20))]
        )

    def close(self) -> None:
        pass

    def _steps(self, prompt: Tokens, progress: Any, settings: dict[str, Any]) -> Iterator[Step]:
        self.prompts.append(prompt.messages)
        self.given.append(settings)
        if progress is not None:
            progress(0, len(prompt))
            if self.prompt_s:
                time.sleep(self.prompt_s / 2)
                progress(len(prompt) // 2, len(prompt))
                time.sleep(self.prompt_s / 2)
            progress(len(prompt), len(prompt))
        pieces = self.answers.pop(0)
        for index, piece in enumerate(pieces):
            if self.pause_s:
                time.sleep(self.pause_s)
            if isinstance(piece, BaseException):
                raise piece
            self.stats = Numbers(len(prompt), index + 1)
            yield Step(piece, index + 10, self.finish_reason if index == len(pieces) - 1 else None)


class OneModel:
    """Holds one engine; another name is refused, or taken from ``others``."""

    def __init__(self, engine: ScriptedEngine, **others: ScriptedEngine) -> None:
        self.engine: Any = engine
        self._others = others

    def use(self, name: str) -> None:
        self.engine = self._others[name]

    def load_here(self) -> None:
        self.engine = self._others["here"]


@dataclass
class RecordedOutput:
    """Records the output of a chat except its answers."""

    notices: list[str] = field(default_factory=list)
    errors: list[tuple[str, str | None]] = field(default_factory=list)
    rows: list[tuple[str, str]] = field(default_factory=list)
    maps: list[Any] = field(default_factory=list)

    def notice(self, message: str) -> None:
        self.notices.append(message)

    def error(self, message: str, hint: str | None = None) -> None:
        self.errors.append((message, hint))

    def table(self, rows: Sequence[tuple[str, str]]) -> None:
        self.rows.extend(rows)

    def size(self, count: float) -> str:
        return f"{count:.0f} B"

    def statistics(self, statistics: Mapping[str, Any]) -> None:
        self.rows.extend((name, str(value)) for name, value in statistics.items())

    def expert_map(self, found: Any) -> None:
        self.maps.append(found)

    def map_lines(self, found: Any, columns: int, rows: int) -> list[str]:
        return [row[:columns] for row in found.places[:rows]]

    def replanned(self, replanned: Mapping[str, Any]) -> None:
        self.notices.append("replanned")


class ScriptedReader:
    """Returns scripted lines, then Ctrl-D."""

    def __init__(self, lines: Sequence[str | BaseException]) -> None:
        self._lines = iter([*lines, EOFError()])
        self.typed = False

    def read(self) -> str:
        line = next(self._lines)
        if isinstance(line, BaseException):
            raise line
        return line

    def working(self) -> Any:
        from contextlib import nullcontext

        return nullcontext()

    @property
    def all_read(self) -> bool:
        return next(self._lines, None) is None


def talk(
    engine: ScriptedEngine,
    lines: Sequence[str | BaseException],
    *,
    given: dict[str, float] | None = None,
    sessions: Path | None = None,
    chat: dict[str, Any] | None = None,
    models: OneModel | None = None,
    **options: Any,
) -> RecordedOutput:
    """Run a chat with these lines of the user, then Ctrl-D; returns its recorded output."""
    output, reader = RecordedOutput(), ScriptedReader(lines)
    made = Chat(
        models or OneModel(engine),
        ChatOptions(generation=Generation(given or {}), **options),
        output,
        sessions=sessions,
        reader=reader,
        **(chat or {}),
    )
    assert made.run() == 0
    if not reader.all_read:
        pytest.fail("the chat was left before all lines were read")
    return output


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}
