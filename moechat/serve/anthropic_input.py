"""Messages and tools in Anthropic's form, as those of OpenAI's chats."""

from __future__ import annotations

import json
from typing import Any

from moechat.serve.api_errors import ApiError
from moechat.serve.fields import Fields
from moechat.serve.media import instead, named

_CLEAR_THINKING = "clear_thinking_20251015"


def chat_messages(fields: Fields) -> list[dict[str, Any]]:
    """The messages, with the system prompt as the first.

    Raises:
        ApiError: Something in them has the wrong form, or is no text.
    """
    given = fields.items("messages")
    if not given:
        raise fields.error("messages", "messages must be a list of at least one message")
    messages: list[dict[str, Any]] = []
    system = fields.values.get("system")
    if system is not None:
        messages.append({"role": "system", "content": _text(system, "system")})
    for number, message in enumerate(given):
        place = f"messages[{number}]"
        if not isinstance(message, dict) or message.get("role") not in ("user", "assistant", "system"):
            raise _wrong(place, "it must be an object with the role user or assistant")
        content = message.get("content")
        if isinstance(content, str):
            messages.append({"role": message["role"], "content": content})
        elif not isinstance(content, list):
            raise _wrong(f"{place}.content", "it must be a text or a list of blocks")
        elif message["role"] == "assistant":
            messages.append(_assistant(content, f"{place}.content"))
        else:
            messages += _user(content, message["role"], f"{place}.content")
    _clear_thinking(messages, _kept_thoughts(fields))
    return messages


def chat_tools(fields: Fields) -> list[dict[str, Any]]:
    """The tools.

    Raises:
        ApiError: One is not a function with a schema.
    """
    tools = []
    for number, tool in enumerate(fields.items("tools") or []):
        place = f"tools[{number}]"
        if not isinstance(tool, dict):
            raise _wrong(place, "it must be an object")
        if tool.get("type") not in (None, "custom"):
            raise _wrong(
                f"{place}.type", "tools of the server are not supported; describe one with input_schema"
            )
        function = {"name": tool.get("name"), "parameters": tool.get("input_schema")}
        if tool.get("description") is not None:
            function["description"] = tool["description"]
        tools.append({"type": "function", "function": function})
    return tools


def _kept_thoughts(fields: Fields) -> int | None:
    """Of how many of the last messages with thinking ``context_management`` keeps it; ``None``: of all.

    Raises:
        ApiError: Something else than thinking is to be cleared.
    """
    management = fields.inner("context_management")
    kept: int | None = None
    for number, edit in enumerate((None if management is None else management.items("edits")) or []):
        place = f"context_management.edits[{number}]"
        if _kind(edit, place) != _CLEAR_THINKING:
            raise _wrong(place, "only thinking can be cleared; send the messages that count")
        if edit.get("keep") == "all":
            continue
        keep = Fields(edit, f"{place}.").inner("keep")
        if keep is not None and keep.choice("type", ("all", "thinking_turns")) == "all":
            continue
        turns = (None if keep is None else keep.whole("value", 1, 1_000_000)) or 1
        kept = turns if kept is None else min(kept, turns)
    return kept


def _clear_thinking(messages: list[dict[str, Any]], kept: int | None) -> None:
    """Drop the thinking of all messages but the last ``kept`` that have it; ``None``: of none."""
    thoughts = [message for message in messages if "reasoning_content" in message]
    for message in thoughts[: -kept if kept is not None else 0]:
        del message["reasoning_content"]


def _assistant(blocks: list[Any], place: str) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    for number, block in enumerate(blocks):
        at = f"{place}[{number}]"
        kind = _kind(block, at)
        if kind == "text":
            message["content"] += _field(block, "text", at)
        elif kind == "thinking":
            message["reasoning_content"] = message.get("reasoning_content", "") + _field(
                block, "thinking", at
            )
        elif kind == "tool_use":
            try:
                arguments = json.dumps(block.get("input") or {}, ensure_ascii=False)
            except (ValueError, RecursionError):
                raise _wrong(f"{at}.input", "it must be JSON") from None
            call = {"name": _field(block, "name", at), "arguments": arguments}
            calls = message.setdefault("tool_calls", [])
            calls.append({"id": _field(block, "id", at), "type": "function", "function": call})
        elif kind != "redacted_thinking":
            raise _wrong(f"{at}.type", f"an assistant's message cannot have {kind}")
    return message


def _user(blocks: list[Any], role: str, place: str) -> list[dict[str, Any]]:
    """Results of tools are messages of their own; they come first, as they answer the message before."""
    results, texts = [], []
    for number, block in enumerate(blocks):
        at = f"{place}[{number}]"
        kind = _kind(block, at)
        if kind == "text":
            texts.append(_field(block, "text", at))
        elif kind == "tool_result":
            text = _text(block.get("content") or "", f"{at}.content", of_tool=True)
            if block.get("is_error") is True:
                text = f"error: {text}"
            call_id = _field(block, "tool_use_id", at)
            results.append({"role": "tool", "tool_call_id": call_id, "content": text})
        else:
            raise _wrong(f"{at}.type", f"{named(kind)} cannot be read; models here take text")
    return results + ([{"role": role, "content": "\n".join(texts)}] if texts or not results else [])


def _text(value: Any, place: str, *, of_tool: bool = False) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise _wrong(place, "it must be a text or a list of text blocks")
    pieces = []
    for number, block in enumerate(value):
        at = f"{place}[{number}]"
        kind = _kind(block, at)
        other = instead(kind) if of_tool else None
        if kind != "text" and other is None:
            raise _wrong(f"{at}.type", f"{named(kind)} cannot be read; models here take text")
        pieces.append(other or _field(block, "text", at))
    return "\n".join(pieces)


def _kind(block: Any, place: str) -> str:
    kind = block.get("type") if isinstance(block, dict) else None
    if not isinstance(kind, str):
        raise _wrong(place, "it must be an object with a type")
    return kind[:40]


def _field(block: dict[str, Any], name: str, place: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise _wrong(f"{place}.{name}", "it must be a text")
    return value


def _wrong(place: str, wanted: str) -> ApiError:
    return ApiError(400, f"{place}: {wanted}", param=place)
