"""Files with many prompts: text with one a line, or JSON lines."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moechat.chat.settings import NAMES, checked
from moechat.cli.prompt import say_if_waiting
from moechat.errors import UsageError

Messages = list[dict[str, str]]

KEYS = ("messages", "turns", "prompt", "question", "text")
_MAX_BYTES = 256 << 20
_ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True)
class FilePrompt:
    """One prompt.

    Attributes:
        line: Where it stands, from 1.
        opening: Messages before the first turn; empty for plain texts.
        turns: What the user says, one after the other, at least one; a blank one cannot be answered.
        settings: Of the answers, by the names of ``moechat.chat.settings``; for this prompt alone.
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
        """Refuse a turn in which there is nothing but white space.

        Args:
            number: Of the turn, from 0.

        Raises:
            UsageError: It is blank.
        """
        if not self.turns[number].strip():
            which = "the prompt" if len(self.turns) == 1 else f"turn {number + 1} of {len(self.turns)}"
            raise UsageError(f"{which} is blank", hint="write a text there, or leave the line out")


@dataclass(frozen=True)
class PromptsFile:
    """Prompts of a file.

    Attributes:
        prompts: In the order of their lines, at least one.
        understood: How the file was read, for people: ``text, one prompt a line`` or ``JSON lines (turns)``.
    """

    prompts: list[FilePrompt]
    understood: str


def read_prompts(path: str, option: str = "--prompts", *, quiet: bool = False) -> PromptsFile:
    """Read a file with prompts; ``-`` is stdin.

    A file whose name ends in ``.jsonl``, ``.ndjson`` or ``.json`` holds one JSON object a line, one that ends
    in ``.txt`` a plain text a line; others are taken for the first if they begin with ``{``. Empty lines are
    left out. Of an object the first of :data:`KEYS` counts: ``messages`` are a conversation, of which what
    follows the last word of the user is left out; ``turns`` are what a user says one after the other; the
    others are single texts. Settings of answers (``temperature``, ``max_tokens`` and the others of the chat)
    and an ``id`` may stand beside it; other keys, which data sets have many of, mean nothing.

    Args:
        path: Of the file.
        option: That names it, for messages.
        quiet: Do not say that stdin is awaited.

    Raises:
        UsageError: There is no such file, it holds no prompt, or a line is wrong; the message gives its
            number.
    """
    shown = "stdin" if path == "-" else path
    data = _read(path, option, quiet=quiet)
    lines = _decoded(shown, data)
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise UsageError(f"{shown} holds no prompt", hint="write one prompt a line")
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
                say_if_waiting(sys.stdin.buffer, "prompts")
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
    # By bytes, so that the line is known that is not UTF-8; and only real ends of lines, since JSON may hold
    # U+2028 as it is.
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
            hint=f"write one JSON object a line, with one of: {', '.join(KEYS)}",
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
        raise refuse(f"none of {', '.join(KEYS)} in it")
    used.append(key)
    try:
        settings = _settings(entry)
    except UsageError as error:
        raise refuse(str(error)) from None
    if not _is_json(entry.get("id")):
        raise refuse("id holds a number that JSON has no way to write")
    opening, turns = _said(key, entry[key], refuse)
    return FilePrompt(number, opening, turns, settings, entry.get("id"))


def _is_json(value: Any) -> bool:
    """Whether a value can be written as it was read: Python reads NaN, Infinity and 1e999 too."""
    try:
        json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError):
        return False
    return True


def _settings(entry: dict[str, Any]) -> dict[str, float]:
    """The settings in an object; ``null`` is none.

    Raises:
        UsageError: One is no number, or out of range.
    """
    settings: dict[str, float] = {}
    for name in NAMES:
        value = entry.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise UsageError(f"{name} is no number")
        settings[name] = checked(name, value)
    return settings


def _said(key: str, value: Any, refuse: Callable[[str], UsageError]) -> tuple[Messages, list[str]]:
    """What comes before the first turn, and the turns.

    Raises:
        UsageError: The value is not what stands under such a key.
    """
    if key == "messages" or (isinstance(value, list) and value and isinstance(value[0], dict)):
        messages = _messages(value)
        if messages is None:
            raise refuse(f"{key} is no list of messages with a role and a content")
        while messages and messages[-1]["role"] != "user":
            messages.pop()
        if not messages:
            raise refuse(f"{key} has no message of the user")
        return messages[:-1], [messages[-1]["content"]]
    turns = value if key == "turns" else [value]
    if not isinstance(turns, list) or not all(isinstance(turn, str) for turn in turns):
        raise refuse(f"{key} is no text" if key != "turns" else "turns is no list of texts")
    if not turns:
        raise refuse("turns is empty")
    if any(_has_surrogate(turn) for turn in turns):
        raise refuse(f"{key} is no Unicode text")
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
