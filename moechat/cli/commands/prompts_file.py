"""Reads files with many prompts: text with one prompt per line, or JSON lines."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moechat.chat.chat_options import NAMES, require_setting
from moechat.chat.template_options import require_name
from moechat.cli.commands.prompt_input import notify_if_waiting
from moechat.errors import UsageError

Messages = list[dict[str, str]]

KEYS = ("messages", "turns", "prompt", "question", "text")
_MAX_BYTES = 256 << 20
_ROLES = ("system", "developer", "user", "assistant", "tool")
# Ours, and that of other servers for the same.
_TEMPLATE_KEYS = ("template_options", "chat_template_kwargs")
_KNOWN = frozenset((*KEYS, *NAMES, *_TEMPLATE_KEYS, "id", "stop"))
_MOST_NAMED = 5
_FORM_HINT = f"write one JSON object per line, with one of: {', '.join(KEYS)}"
_MESSAGE_HINT = 'write messages as {"role": "user", "content": "…"}'


@dataclass(frozen=True)
class FilePrompt:
    """One prompt.

    Attributes:
        line: Line number in the file, from 1.
        opening: Messages before the first turn; empty for plain texts.
        turns: Messages of the user in order, at least one; a blank one cannot be answered.
        settings: Settings for answers to this prompt, by the names of ``moechat.chat.chat_options``.
        key: The line's ``id``, any JSON value; ``None`` if it has none.
        stop: Texts that end its answers.
        template_options: Values for the chat template.
    """

    line: int
    opening: Messages
    turns: list[str]
    settings: Mapping[str, float] = field(default_factory=dict)
    key: Any = None
    stop: tuple[str, ...] = ()
    template_options: Mapping[str, Any] = field(default_factory=dict)

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
class BadLine:
    """A line that is no prompt.

    Attributes:
        line: Line number in the file, from 1.
        reason: What is wrong with it.
        hint: How to mend it, if that is not plain from the reason.
        key: Its ``id``, as for a prompt.
    """

    line: int
    reason: str
    hint: str | None = None
    key: Any = None


@dataclass(frozen=True)
class PromptsFile:
    """The prompts of a file.

    Attributes:
        shown: Name of the file, for messages.
        prompts: Prompts in the order of their lines, at least one.
        understood: Recognised format, for people: ``text, one prompt a line`` or ``JSON lines (turns)``.
        bad: Lines that are no prompts, in order.
        ignored: Keys that mean nothing here, with the number of lines that have them.
    """

    shown: str
    prompts: list[FilePrompt]
    understood: str
    bad: list[BadLine] = field(default_factory=list)
    ignored: Mapping[str, int] = field(default_factory=dict)


def read_prompts(
    path: str, option: str = "--prompts", *, quiet: bool = False, keep_bad: bool = False
) -> PromptsFile:
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
        keep_bad: Return malformed lines beside the good ones, unless there is no good one.

    Raises:
        UsageError: The file does not exist or cannot be read, it has no prompt, or lines are malformed; the
            message gives the numbers of the first of them.
    """
    shown = "stdin" if path == "-" else path
    data = _read(path, option, quiet=quiet)
    numbered = [(number, line) for number, line in enumerate(_lines(data), 1) if line.strip()]
    if not numbered:
        raise UsageError(f"{shown} has no prompts", hint="write one prompt per line")
    suffix = Path(path).suffix.lower()
    is_json = suffix in (".jsonl", ".ndjson", ".json") or (
        suffix != ".txt" and numbered[0][1].lstrip().startswith(b"{")
    )
    used: set[str] = set()
    ignored: Counter[str] = Counter()
    prompts: list[FilePrompt] = []
    bad: list[BadLine] = []
    for number, line in numbered:
        try:
            text = _decoded(line)
            if is_json:
                prompts.append(_parsed(number, text, used, ignored))
            elif text := text.strip():
                prompts.append(FilePrompt(number, [], [text]))
        except _BadLineError as error:
            bad.append(BadLine(number, str(error), error.hint, error.key))
    if bad and not (keep_bad and prompts):
        raise refuse_lines(shown, bad, len(prompts) + len(bad))
    if not prompts:
        raise UsageError(f"{shown} has no prompts", hint="write one prompt per line")
    keys = [key for key in KEYS if key in used]
    understood = f"JSON lines ({', '.join(keys)})" if is_json else "text, one prompt a line"
    return PromptsFile(shown, prompts, understood, bad, dict(ignored))


def refuse_lines(shown: str, bad: Sequence[BadLine], total: int) -> UsageError:
    """The error for malformed lines.

    Args:
        shown: Name of the file.
        bad: The lines, at least one.
        total: Lines of the file that are not empty.
    """
    hints = list(dict.fromkeys(line.hint for line in bad if line.hint))
    return UsageError(describe_bad(shown, bad, total), hint="; ".join(hints[:2]) or "mend or remove the line")


def describe_bad(shown: str, bad: Sequence[BadLine], total: int) -> str:
    """A sentence that names malformed lines, the first few with their faults; arguments as above."""
    if len(bad) == 1:
        return f"{shown}, line {bad[0].line}: {bad[0].reason}"
    parts = [f"line {line.line}: {line.reason}" for line in bad[:_MOST_NAMED]]
    if len(bad) > _MOST_NAMED:
        parts.append(f"and {len(bad) - _MOST_NAMED} more")
    return f"{len(bad)} of {total} lines of {shown} are no prompts: {'; '.join(parts)}"


class _BadLineError(Exception):
    """A line is no prompt; the attributes are those of :class:`BadLine`."""

    def __init__(self, reason: str, hint: str | None = None, key: Any = None) -> None:
        super().__init__(reason)
        self.hint = hint
        self.key = key


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


def _lines(data: bytes) -> list[bytes]:
    # Split before decoding, so that only a line that is not UTF-8 is refused; and only at newlines, because
    # JSON strings may contain an unescaped U+2028.
    return [line.removesuffix(b"\r") for line in data.removeprefix(b"\xef\xbb\xbf").split(b"\n")]


def _decoded(line: bytes) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _BadLineError(
            f"not UTF-8 (byte {error.object[error.start]:#04x})",
            "convert the file first, for example with iconv",
        ) from None


def _parsed(number: int, line: str, used: set[str], ignored: Counter[str]) -> FilePrompt:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        reason = (
            f"{error.msg}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
        )
        raise _BadLineError(f"not JSON ({reason})", _FORM_HINT) from None
    if not isinstance(entry, dict):
        raise _BadLineError("not an object", _FORM_HINT)
    if not _is_json(entry.get("id")):
        raise _BadLineError("id contains a number that JSON cannot represent")
    try:
        prompt, key = _prompt_of(number, entry)
    except _BadLineError as error:
        error.key = entry.get("id")
        raise
    used.add(key)
    ignored.update(name for name in entry if name not in _KNOWN)
    return prompt


def _prompt_of(number: int, entry: dict[str, Any]) -> tuple[FilePrompt, str]:
    """The prompt of an object, and the key of its text."""
    key = next((key for key in KEYS if entry.get(key) is not None), None)
    if key is None:
        raise _BadLineError(f"it has none of {', '.join(KEYS)}", _FORM_HINT)
    try:
        settings = _settings(entry)
        template_options = _template_options(entry)
    except UsageError as error:
        raise _BadLineError(str(error), error.hint) from None
    opening, turns = _conversation(key, entry[key])
    prompt = FilePrompt(number, opening, turns, settings, entry.get("id"), _stops(entry), template_options)
    return prompt, key


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


def _template_options(entry: dict[str, Any]) -> dict[str, Any]:
    """Values for the chat template in an object.

    Raises:
        UsageError: They are no object, or a name cannot be set.
    """
    key = next((key for key in _TEMPLATE_KEYS if entry.get(key) is not None), None)
    if key is None:
        return {}
    value = entry[key]
    if not isinstance(value, dict):
        raise UsageError(f"{key} is not an object")
    return {require_name(name, key): one for name, one in value.items()}


def _stops(entry: dict[str, Any]) -> tuple[str, ...]:
    value = entry.get("stop")
    texts = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise _BadLineError("stop is neither a text nor a list of texts")
    return tuple(texts)


def _conversation(key: str, value: Any) -> tuple[Messages, list[str]]:
    """Messages before the first turn, and the turns."""
    if key == "messages" or (isinstance(value, list) and value and isinstance(value[0], dict)):
        messages = _messages(value)
        if messages is None:
            raise _BadLineError(f"{key} is not a list of messages with a role and a content", _MESSAGE_HINT)
        while messages and messages[-1]["role"] != "user":
            messages.pop()
        if not messages:
            raise _BadLineError(f"{key} has no message with the role user")
        return messages[:-1], [messages[-1]["content"]]
    turns = value if key == "turns" else [value]
    if not isinstance(turns, list) or not all(isinstance(turn, str) for turn in turns):
        raise _BadLineError(f"{key} is not a text" if key != "turns" else "turns is not a list of texts")
    if not turns:
        raise _BadLineError("turns is empty")
    if any(_has_surrogate(turn) for turn in turns):
        raise _BadLineError(f"{key} is not Unicode text")
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
