"""Reads training data: JSON Lines of chats, prompts with answers, or texts, as token ids of a model."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moechat.confined.process import RefusedError
from moechat.confined.templates import render_messages
from moechat.confined.tokenising import tokenise
from moechat.errors import UsageError, one_line

MOST_BYTES = 4 << 30
MOST_NAMED = 5
PROMPT_KEYS = ("prompt", "instruction", "question")
ANSWER_KEYS = ("answer", "response", "completion", "output")
CONTEXT_KEYS = ("context", "input")
_NAME = "the model"  # in messages
_ROLES = ("system", "developer", "user", "assistant", "tool")
FORM_HINT = (
    'write one JSON object per line: {"messages": [{"role": "user", "content": "…"}, {"role": "assistant", '
    '"content": "…"}]}, {"prompt": "…", "answer": "…"} or {"text": "…"}'
)


@dataclass(frozen=True)
class Example:
    """One sequence.

    Attributes:
        line: Line number in the file, from 1.
        ids: Token ids, at least 2.
        trained: For each token, whether it is predicted in the loss; the first never is.
        prompt: Tokens before the first answer; 0 for texts.
    """

    line: int
    ids: tuple[int, ...]
    trained: tuple[bool, ...]
    prompt: int


@dataclass(frozen=True)
class DataSet:
    """The sequences of a file.

    Attributes:
        examples: In the order of their lines, at least one.
        cut: Sequences that were longer than the limit.
        dropped: Lines of which the limit leaves nothing to train.
        sha256: Of the file.
    """

    examples: tuple[Example, ...]
    cut: int
    dropped: int
    sha256: str


class _BadLineError(Exception):
    """A line is no sequence; the text says why."""


def read_data(path: Path, tokenizer: Any, max_tokens: int) -> DataSet:
    """Read and tokenise a file.

    A line has ``messages`` (a chat), a prompt (:data:`PROMPT_KEYS`, with an optional text of
    :data:`CONTEXT_KEYS`) with its answer (:data:`ANSWER_KEYS`), or ``text``. Where there is a prompt, only
    answers are trained. A chat, or a prompt with its answer, goes through the model's chat template; a model
    without one gets prompt and answer one after the other. Texts longer than ``max_tokens`` become several
    sequences; of everything else the beginning is used.

    Args:
        path: The file.
        tokenizer: The model's.
        max_tokens: Longest sequence.

    Raises:
        UsageError: The file cannot be read, has no sequence, or has malformed lines; the message gives the
            numbers of the first of them and what is wrong.
        ModelRulesError: The chat template or the tokenizer exceeds a limit.
    """
    try:
        with open(path, "rb") as file:
            data = file.read(MOST_BYTES + 1)
    except OSError as problem:
        raise UsageError(f"{path} cannot be read: {problem.strerror or problem}") from problem
    if len(data) > MOST_BYTES:
        raise UsageError(f"{path} is larger than {MOST_BYTES >> 30} GiB", hint="split it")
    reader = _Reader(tokenizer, max_tokens)
    bad: list[str] = []
    lines = 0
    for number, raw in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
        if not raw.strip():
            continue
        lines += 1
        try:
            reader.read(number, raw)
        except _BadLineError as problem:
            bad.append(f"line {number}: {problem}")
    if bad:
        shown = "; ".join(bad[:MOST_NAMED]) + (
            f"; and {len(bad) - MOST_NAMED} more" * (len(bad) > MOST_NAMED)
        )
        text = (
            f"{path}, {shown}" if len(bad) == 1 else f"{len(bad)} of {lines} lines of {path} are bad: {shown}"
        )
        raise UsageError(text, hint=FORM_HINT)
    if not reader.examples:
        what = f"no sequence whose answer begins within {max_tokens} tokens" if lines else "no lines"
        raise UsageError(f"{path} has {what}", hint="raise --max-tokens" if lines else FORM_HINT)
    digest = hashlib.sha256(data).hexdigest()
    return DataSet(tuple(reader.examples), reader.count["cut"], reader.count["dropped"], digest)


class _Reader:
    """Turns lines into sequences."""

    def __init__(self, tokenizer: Any, max_tokens: int) -> None:
        self._tokenizer = tokenizer
        self._most = max_tokens
        self._end = tokenizer.eos_token_id
        self.examples: list[Example] = []
        self.count: Counter[str] = Counter()

    def read(self, number: int, raw: bytes) -> None:
        """Add the sequences of one line.

        Raises:
            _BadLineError: It is malformed.
        """
        entry = _parsed(raw)
        if entry.get("messages") is not None:
            messages = _messages(entry["messages"])
            self._chat(number, messages)
        elif (key := _first(entry, PROMPT_KEYS)) is not None:
            prompt = _text(entry, key)
            answer_key = _first(entry, ANSWER_KEYS)
            if answer_key is None:
                raise _BadLineError(f"it has {key} but none of {', '.join(ANSWER_KEYS)}")
            answer = _text(entry, answer_key)
            context = _first(entry, CONTEXT_KEYS)
            if context is not None and entry[context] != "":
                prompt = f"{prompt}\n\n{_text(entry, context)}"
            self._pair(number, prompt, answer)
        elif entry.get("text") is not None:
            self._plain(number, _text(entry, "text"))
        else:
            raise _BadLineError(f"it has none of messages, {', '.join(PROMPT_KEYS)}, text")

    def _pair(self, number: int, prompt: str, answer: str) -> None:
        if getattr(self._tokenizer, "chat_template", None):
            self._chat(
                number, [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
            )
            return
        before = self._encode(prompt, special=True)
        after = self._encode(answer, special=False)
        after += [] if self._end is None else [self._end]
        self._add(number, before + after, [False] * len(before) + [True] * len(after), len(before))

    def _chat(self, number: int, messages: list[dict[str, str]]) -> None:
        if not getattr(self._tokenizer, "chat_template", None):
            raise _BadLineError("the model has no chat template, so it cannot take messages")
        whole = self._render(messages, prompt=False)
        trained = [False] * len(whole)
        first = 0
        for at, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self._render(messages[:at], prompt=True)
            after = self._render(messages[: at + 1], prompt=False)
            # Some templates write earlier answers in another form, for example without thinking.
            if whole[: len(after)] == after and after[: len(before)] == before:
                trained[len(before) : len(after)] = [True] * (len(after) - len(before))
                first = first or len(before)
        if not any(trained):
            raise _BadLineError("the chat template shows no answer after its prompt")
        self._add(number, whole, trained, first)

    def _plain(self, number: int, text: str) -> None:
        ids = self._encode(text, special=True)
        ids += [] if self._end is None else [self._end]
        if len(ids) < 2:
            raise _BadLineError("text is a single token")
        for start in range(0, len(ids), self._most):
            part = ids[start : start + self._most]
            if len(part) > 1:
                self._add(number, part, [True] * len(part), 0)

    def _add(self, number: int, ids: list[int], trained: list[bool], prompt: int) -> None:
        self.count["cut"] += len(ids) > self._most
        ids, trained = ids[: self._most], [False, *trained[1 : self._most]]
        if not any(trained):
            self.count["dropped"] += 1
            return
        self.examples.append(Example(number, tuple(ids), tuple(trained), prompt))

    def _encode(self, text: str, *, special: bool) -> list[int]:
        return tokenise(self._tokenizer, text, _NAME, add_special_tokens=special, verbose=False)

    def _render(self, messages: list[dict[str, str]], *, prompt: bool) -> list[int]:
        try:
            text = render_messages(self._tokenizer, messages, _NAME, add_generation_prompt=prompt)
        except RefusedError as error:
            raise _BadLineError(f"the chat template refuses it: {one_line(error, 200)}") from None
        return self._encode(text, special=False)


def _parsed(raw: bytes) -> dict[str, Any]:
    try:
        entry = json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise _BadLineError(f"not UTF-8 (byte {raw[error.start]:#04x})") from None
    except json.JSONDecodeError as error:
        raise _BadLineError(f"not JSON ({error.msg}, column {error.colno})") from None
    except (ValueError, RecursionError) as error:
        raise _BadLineError(f"not JSON ({error})") from None
    if not isinstance(entry, dict):
        raise _BadLineError("not an object")
    return entry


def _first(entry: dict[str, Any], keys: tuple[str, ...]) -> str | None:
    return next((key for key in keys if entry.get(key) is not None), None)


def _text(entry: dict[str, Any], key: str) -> str:
    value = entry[key]
    if not isinstance(value, str) or not value.strip():
        raise _BadLineError(f"{key} is {'blank' if isinstance(value, str) else 'no text'}")
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise _BadLineError(f"{key} is not Unicode text")
    return value


def _messages(value: Any) -> list[dict[str, str]]:
    if not isinstance(value, list) or not value:
        raise _BadLineError("messages is not a list of messages")
    messages = []
    for at, entry in enumerate(value, 1):
        if not isinstance(entry, dict) or entry.get("role") not in _ROLES:
            raise _BadLineError(f"message {at} has no role of {', '.join(_ROLES)}")
        messages.append(
            {"role": entry["role"], "content": _text(entry, "content") if "content" in entry else ""}
        )
        if not messages[-1]["content"]:
            raise _BadLineError(f"message {at} has no content")
    if not any(message["role"] == "assistant" for message in messages):
        raise _BadLineError("messages has no message with the role assistant, so there is nothing to train")
    return messages
