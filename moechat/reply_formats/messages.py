"""Messages of the chat API, checked and turned into what chat templates take."""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from moechat.errors import UsageError
from moechat.reply_formats.formats import PLAIN
from moechat.reply_formats.json_text import dumped
from moechat.reply_formats.notations import ReplyFormat

_ROLES = ("system", "developer", "user", "assistant", "tool")
_OTHER_MEDIA = {
    "image_url": "a picture",
    "input_image": "a picture",
    "image": "a picture",
    "input_audio": "sound",
    "audio": "sound",
    "audio_url": "sound",
    "video_url": "a video",
    "video": "a video",
    "file": "a file",
    "input_file": "a file",
}
# Templates that recognise messages with calls by their missing content.
_WANTS_NONE = re.compile(
    r"""['"]assistant['"]\s+and\s+message(\.content|\[['"]content['"]\])\s+is\s+(not\s+)?none""",
    re.IGNORECASE,
)
# Templates that add arguments to text, and take no object.
_ADDS_ARGUMENTS = re.compile(r"""\+\s*[\w.\[\]'"]*arguments['"]?\]?\s*\+""")
_TAKES_OBJECTS = re.compile(r"""arguments['"]?\]?\s*(is\s+(not\s+)?(string|mapping)|\|\s*(tojson|items))""")
# Between the parts of a content, and between system messages that become one.
_BETWEEN_PARTS, _BETWEEN_SYSTEM_MESSAGES = "\n", "\n\n"


def to_template_messages(
    messages: object, *, chat_template: str | None = None, format: ReplyFormat = PLAIN
) -> list[dict[str, Any]]:
    """Check the list ``messages`` of a request to the chat API, and write it as chat templates take it.

    - Contents become one text.
    - ``developer`` becomes ``system`` where the template has no such role; several system messages at the
      beginning become one, since templates allow one.
    - The arguments of calls, JSON as text, become objects, unless the template needs text.
    - A tool's result gets the ``name`` of the tool that was called.
    - ``reasoning_content`` (or ``reasoning``) gets the name that the format's templates use.

    Args:
        messages: A list of messages as clients send them.
        chat_template: The template that will render them.
        format: The model's format.

    Returns:
        New messages.

    Raises:
        UsageError: A message is wrong; the text names its place, such as ``messages[3].content``.
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise UsageError(f"messages is of type {type(messages).__name__}; it must be a list")
    if not messages:
        raise UsageError("messages is empty", hint="give at least one message")
    converter = _Converter(chat_template or "", format)
    return _one_system_message(
        [converter.convert(message, f"messages[{index}]") for index, message in enumerate(messages)]
    )


def new_call_id(format: ReplyFormat) -> str:
    """An id for a call to which the model gave none."""
    return secrets.token_hex(5)[:9] if format.short_ids else f"call_{secrets.token_hex(12)}"


def template_call_id(call_id: str, format: ReplyFormat) -> str:
    """A call's id in the form that the format's templates demand."""
    if not format.short_ids or re.fullmatch(r"[a-zA-Z0-9]{9}", call_id):
        return call_id
    return hashlib.sha256(call_id.encode()).hexdigest()[:9]


class _Converter:
    """Converts messages in their order; remembers the calls that results refer to."""

    def __init__(self, template: str, format: ReplyFormat) -> None:
        self._developer = "developer" if "developer" in template else "system"
        self._no_content = None if _WANTS_NONE.search(template) else ""
        self._text_arguments = bool(_ADDS_ARGUMENTS.search(template) and not _TAKES_OBJECTS.search(template))
        self._format = format
        self._called: dict[str, str] = {}  # names by id

    def convert(self, message: object, place: str) -> dict[str, Any]:
        if not isinstance(message, Mapping):
            raise UsageError(f"{place} is of type {type(message).__name__}; it must be an object")
        role = message.get("role")
        if role not in _ROLES:
            hint = "use the role 'tool' for results of tools" if role == "function" else None
            raise UsageError(f"{place}.role is {role!r}; it must be one of {', '.join(_ROLES)}", hint=hint)
        if role == "assistant":
            converted = self._assistant(message, place)
        else:
            content = _content(message.get("content"), f"{place}.content")
            converted = {"role": self._developer if role == "developer" else role, "content": content}
            if role == "tool":
                converted |= self._result(message, place)
        name = message.get("name")
        if name is not None:
            if not isinstance(name, str):
                raise UsageError(f"{place}.name is of type {type(name).__name__}; it must be a text")
            converted.setdefault("name", name)
        return converted

    def _assistant(self, message: Mapping[str, Any], place: str) -> dict[str, Any]:
        converted: dict[str, Any] = {"role": "assistant"}
        calls = self._tool_calls(message.get("tool_calls"), f"{place}.tool_calls")
        thinking = message.get("reasoning_content") or message.get("reasoning")
        if thinking is not None and not isinstance(thinking, str):
            raise UsageError(
                f"{place}.reasoning_content is of type {type(thinking).__name__}; it must be a text"
            )
        content = message.get("content")
        if content is None and isinstance(message.get("refusal"), str):
            content = message["refusal"]
        if content is None and (calls or thinking):
            converted["content"] = self._no_content if calls else ""
        else:
            converted["content"] = _content(content, f"{place}.content")
        if calls:
            converted["tool_calls"] = calls
            if self._format.channels and thinking and converted["content"]:
                # gpt-oss's template refuses both beside calls, and writes a content there as thinking.
                thinking, converted["content"] = f"{thinking}\n\n{converted['content']}", ""
        if thinking:
            converted[self._format.thinking_field] = thinking
        return converted

    def _tool_calls(self, calls: object, place: str) -> list[dict[str, Any]]:
        if calls is None:
            return []
        if isinstance(calls, str | bytes | Mapping) or not isinstance(calls, Sequence):
            raise UsageError(f"{place} is of type {type(calls).__name__}; it must be a list")
        return [self._tool_call(call, f"{place}[{index}]") for index, call in enumerate(calls)]

    def _tool_call(self, call: object, place: str) -> dict[str, Any]:
        if not isinstance(call, Mapping):
            raise UsageError(f"{place} is of type {type(call).__name__}; it must be an object")
        if call.get("type", "function") != "function":
            raise UsageError(f"{place}.type is {call['type']!r}; it must be 'function'")
        function = call.get("function")
        if not isinstance(function, Mapping):
            raise UsageError(f"{place}.function is of type {type(function).__name__}; it must be an object")
        name, call_id = function.get("name"), call.get("id")
        if not isinstance(name, str) or not name:
            raise UsageError(f"{place}.function.name is {name!r}; it must be the name of a tool")
        if not isinstance(call_id, str) or not call_id:
            raise UsageError(f"{place}.id is {call_id!r}; it must be a text")
        self._called[call_id] = name
        arguments = _arguments(function.get("arguments"), f"{place}.function.arguments")
        return {
            "id": template_call_id(call_id, self._format),
            "type": "function",
            "function": {"name": name, "arguments": dumped(arguments) if self._text_arguments else arguments},
        }

    def _result(self, message: Mapping[str, Any], place: str) -> dict[str, Any]:
        call_id = message.get("tool_call_id")
        if not isinstance(call_id, str):
            raise UsageError(
                f"{place}.tool_call_id is {call_id!r}; it must be the id of the call that was made"
            )
        if call_id not in self._called:
            raise UsageError(f"{place}.tool_call_id is {call_id!r}; no call before it has this id")
        return {"tool_call_id": template_call_id(call_id, self._format), "name": self._called[call_id]}


def _content(content: object, place: str) -> str:
    if isinstance(content, str):
        return content
    if content is None or isinstance(content, bytes | Mapping) or not isinstance(content, Sequence):
        kind = "missing" if content is None else f"of type {type(content).__name__}"
        raise UsageError(f"{place} is {kind}; it must be a text or a list of parts")
    return _BETWEEN_PARTS.join(_part(part, f"{place}[{index}]") for index, part in enumerate(content))


def _part(part: object, place: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise UsageError(f"{place} is of type {type(part).__name__}; it must be an object")
    kind = part.get("type")
    if kind in _OTHER_MEDIA:
        raise UsageError(
            f"{place} is {_OTHER_MEDIA[kind]}; only text can be read", hint="send parts of type 'text' only"
        )
    if kind not in ("text", "input_text", "output_text", "refusal"):
        raise UsageError(f"{place}.type is {kind!r}; it must be 'text'")
    key = "refusal" if kind == "refusal" else "text"
    text = part.get(key)
    if not isinstance(text, str):
        raise UsageError(f"{place}.{key} is of type {type(text).__name__}; it must be a text")
    return text


def _arguments(arguments: object, place: str) -> dict[str, Any]:
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{place} is not JSON: {error}") from None
    if not isinstance(arguments, Mapping):
        raise UsageError(f"{place} must be a JSON object, as text")
    return dict(arguments)


def _one_system_message(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    count = 0
    while count < len(messages) and messages[count]["role"] == "system":
        count += 1
    if count < 2:
        return messages
    text = _BETWEEN_SYSTEM_MESSAGES.join(message["content"] for message in messages[:count])
    return [{"role": "system", "content": text}, *messages[count:]]
