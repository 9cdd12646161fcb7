"""Reads files with many prompts: text with one prompt per line, or JSON lines."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moechat.chat.chat_options import NAMES, require_setting
from moechat.cli.commands.prompt_input import notify_if_waiting
from moechat.errors import UsageError

Messages = list[dict[str, str]]

KEYS = ("messages", "turns", "prompt", "question", "text")
_MAX_BYTES = 256 << 20
_ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True)
class FilePrompt:
    """One prompt.

    Attributes:
        line: Line number in the file, from 1.
        opening: Messages before the first turn; empty for plain texts.
        turns: Messages of the user in order, at least one; a blank one cannot be answered.
        settings: Settings for answers to this prompt, by the names of ``moechat.chat.chat_options``.
        key: The line's ``id``, any JSON value; ``None`` if it has none.
    """

    line: int
    opening: Messages
    turns: list[str]
    settings: Mapping[str, float] = field(default_factory=dict)
    key: Any = None

    @property
    def is_plain(self) -> bool:
        """Whether it is a single text, which can be continued without a chat template."""
        return not self.opening and len(self.turns) == 1

    def require_text(self, number: int) -> None:
        """Check that a turn has text.

        Args:
            number: Number of the turn, from 0.

        Raises:
            UsageError: The turn is blank.
        """
        if not self.turns[number].strip():
            which = "the prompt" if len(self.turns) == 1 else f"turn {number + 1} of {len(self.turns)}"
            raise UsageError(f"{which} is blank", hint="add text, or remove the line")


@dataclass(frozen=True)
class PromptsFile:
    """The prompts of a file.

    Attributes:
        prompts: Prompts in the order of their lines, at least one.
        understood: Recognised format, for people: ``text, one prompt a line`` or ``JSON lines (turns)``.
    """

    prompts: list[FilePrompt]
    understood: str


def read_prompts(path: str, option: str = "--prompts", *, quiet: bool = False) -> PromptsFile:
    """Read a file with prompts; ``-`` is stdin.

    A file named ``*.jsonl``, ``*.ndjson`` or ``*.json`` has one JSON object per line, a ``*.txt`` file one
    plain text per line. Other files are read as JSON lines if they begin with ``{``, else as text. Empty
    lines are skipped. Of each object the first of :data:`KEYS` that it has is used: ``messages`` is a
    conversation, cut after the last message of the user; ``turns`` is a list of the user's messages; the
    others are single texts. An object can also have an ``id`` and settings for its answers (``temperature``,
    ``max_tokens`` and the others of the chat). Other keys are ignored, because data sets have many.

    Args:
        path: Path of the file.
        option: Option with that path, for messages.
        quiet: Print no notice while waiting for stdin.

    Raises:
        UsageError: The file does not exist or cannot be read, it has no prompt, or a line is malformed; the
            message gives the line number.
    """
    shown = "stdin" if path == "-" else path
    data = _read(path, option, quiet=quiet)
    lines = _decoded(shown, data)
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise UsageError(f"{shown} has no prompts", hint="write one prompt per line")
    suffix = Path(path).suffix.lower()
    is_json = suffix in (".jsonl", ".ndjson", ".json") or (
        suffix != ".txt" and numbered[0][1].lstrip().startswith("{")
    )
    if not is_json:
        prompts = [FilePrompt(number, [], [line.strip()]) for number, line in numbered]
        return PromptsFile(prompts, "text, one prompt a line")
    used: list[str] = []
    prompts = [_parsed(shown, number, line, used) for number, line in numbered]
    keys = [key for key in KEYS if key in used]
    return PromptsFile(prompts, f"JSON lines ({', '.join(keys)})")


def _read(path: str, option: str, *, quiet: bool) -> bytes:
    try:
        if path == "-":
            if not quiet:
                notify_if_waiting(sys.stdin.buffer, "prompts")
            data = sys.stdin.buffer.read(_MAX_BYTES + 1)
        else:
            with open(path, "rb") as file:
                data = file.read(_MAX_BYTES + 1)
    except FileNotFoundError:
        raise UsageError(f"there is no file {path}", hint=f"{option} - reads from stdin") from None
    except OSError as problem:
        raise UsageError(f"{path} cannot be read: {problem.strerror}") from problem
    if len(data) > _MAX_BYTES:
        raise UsageError(f"{path} is larger than {_MAX_BYTES >> 20} MiB", hint="split it")
    return data


def _decoded(shown: str, data: bytes) -> list[str]:
    # Split before decoding, to know the number of a line that is not UTF-8; and only at newlines, because
    # JSON strings may contain an unescaped U+2028.
    lines = []
    for number, line in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
        try:
            lines.append(line.removesuffix(b"\r").decode("utf-8"))
        except UnicodeDecodeError as error:
            raise UsageError(
                f"{shown}, line {number}: not UTF-8 (byte {error.object[error.start]:#04x})",
                hint="convert it first, for example with iconv",
            ) from None
    return lines


def _parsed(shown: str, number: int, line: str, used: list[str]) -> FilePrompt:
    def refuse(reason: str) -> UsageError:
        return UsageError(
            f"{shown}, line {number}: {reason}",
            hint=f"write one JSON object per line, with one of: {', '.join(KEYS)}",
        )

    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        reason = (
            f"{error.msg}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
        )
        raise refuse(f"not JSON ({reason})") from None
    if not isinstance(entry, dict):
        raise refuse("not an object")
    key = next((key for key in KEYS if entry.get(key) is not None), None)
    if key is None:
        raise refuse(f"it has none of {', '.join(KEYS)}")
    used.append(key)
    try:
        settings = _settings(entry)
    except UsageError as error:
        raise refuse(str(error)) from None
    if not _is_json(entry.get("id")):
        raise refuse("id contains a number that JSON cannot represent")
    opening, turns = _conversation(key, entry[key], refuse)
    return FilePrompt(number, opening, turns, settings, entry.get("id"))


def _is_json(value: Any) -> bool:
    """Whether a value can be written as JSON; Python's parser also accepts NaN, Infinity and 1e999."""
    try:
        json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError):
        return False
    return True


def _settings(entry: dict[str, Any]) -> dict[str, float]:
    """The settings in an object; ``null`` means not set.

    Raises:
        UsageError: A setting is not a number, or out of range.
    """
    settings: dict[str, float] = {}
    for name in NAMES:
        value = entry.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise UsageError(f"{name} is not a number")
        settings[name] = require_setting(name, value)
    return settings


def _conversation(key: str, value: Any, refuse: Callable[[str], UsageError]) -> tuple[Messages, list[str]]:
    """Messages before the first turn, and the turns.

    Raises:
        UsageError: The value has the wrong type for its key.
    """
    if key == "messages" or (isinstance(value, list) and value and isinstance(value[0], dict)):
        messages = _messages(value)
        if messages is None:
            raise refuse(f"{key} is not a list of messages with a role and a content")
        while messages and messages[-1]["role"] != "user":
            messages.pop()
        if not messages:
            raise refuse(f"{key} has no message with the role user")
        return messages[:-1], [messages[-1]["content"]]
    turns = value if key == "turns" else [value]
    if not isinstance(turns, list) or not all(isinstance(turn, str) for turn in turns):
        raise refuse(f"{key} is not a text" if key != "turns" else "turns is not a list of texts")
    if not turns:
        raise refuse("turns is empty")
    if any(_has_surrogate(turn) for turn in turns):
        raise refuse(f"{key} is not Unicode text")
    return [], turns


def _messages(value: Any) -> Messages | None:
    if not isinstance(value, list):
        return None
    messages = []
    for entry in value:
        if not isinstance(entry, dict) or entry.get("role") not in _ROLES:
            return None
        content = entry.get("content")
        if not isinstance(content, str) or _has_surrogate(content):
            return None
        messages.append({"role": entry["role"], "content": content})
    return messages


def _has_surrogate(text: str) -> bool:
    return any("\ud800" <= character <= "\udfff" for character in text)
