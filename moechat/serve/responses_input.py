"""Input of OpenAI's responses, as the messages of its chats."""

from __future__ import annotations

from typing import Any

from moechat.serve.api_errors import ApiError
from moechat.serve.fields import Fields
from moechat.serve.media import instead
from moechat.serve.responses_tools import function_name, input_arguments

# Calls of tools that OpenAI's servers run. They are skipped: the answers that follow hold what was found.
_HOSTED_CALLS = (
    "web_search_call",
    "file_search_call",
    "code_interpreter_call",
    "image_generation_call",
    "tool_search_call",
    "tool_search_output",
)
_TEXTS = ("input_text", "output_text", "text", "refusal")


def chat_messages(fields: Fields) -> list[dict[str, Any]]:
    """The messages of ``instructions`` and ``input``.

    Raises:
        ApiError: Something in them has the wrong form, or is no text.
    """
    messages: list[dict[str, Any]] = []
    instructions = fields.text("instructions", most=1 << 26)
    if instructions:
        messages.append({"role": "system", "content": instructions})
    given = fields.values.get("input")
    if isinstance(given, str) and given:
        return [*messages, {"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise fields.error("input", "input must be a text or a list of items, and not empty")
    for number, item in enumerate(given):
        place = f"input[{number}]"
        if not isinstance(item, dict):
            raise _wrong(place, "it must be an object")
        _add(messages, item, place)
    return messages


def _add(messages: list[dict[str, Any]], item: dict[str, Any], place: str) -> None:
    kind = item.get("type", "message")
    if kind == "message":
        messages.append({"role": item.get("role"), "content": _content(item.get("content"), place)})
    elif kind in ("function_call", "custom_tool_call"):
        arguments = item.get("arguments") or "{}"
        if kind == "custom_tool_call":
            arguments = input_arguments(_content(item.get("input"), place))
        function = {"name": _function(item, place), "arguments": arguments}
        call = {"id": item.get("call_id") or item.get("id"), "type": "function", "function": function}
        # Calls of one turn are items of their own, and one message in a chat.
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        messages[-1].setdefault("tool_calls", []).append(call)
    elif kind in ("function_call_output", "custom_tool_call_output"):
        output = _content(item.get("output"), place, of_tool=True)
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
    elif kind == "reasoning":
        parts = item.get("content") or []
        text = "".join(part.get("text", "") for part in parts if isinstance(part, dict))
        if text:
            messages.append({"role": "assistant", "content": "", "reasoning_content": text})
    elif kind not in _HOSTED_CALLS:
        raise _wrong(f"{place}.type", f"items of the type {str(kind)[:40]} are not supported")


def _function(item: dict[str, Any], place: str) -> Any:
    """The name of the function that stands for the tool of a call."""
    name, namespace = item.get("name"), item.get("namespace") or ""
    if not isinstance(name, str) or not isinstance(namespace, str):
        raise _wrong(f"{place}.name", "the names of a tool and of its namespace must be texts")
    return function_name(namespace, name)


def _content(value: Any, place: str, *, of_tool: bool = False) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise _wrong(f"{place}.content", "it must be a text or a list of parts")
    pieces = []
    for number, part in enumerate(value):
        at = f"{place}.content[{number}]"
        kind = part.get("type") if isinstance(part, dict) else None
        other = instead(str(kind)) if of_tool else None
        if other is not None:
            pieces.append(other)
            continue
        if not isinstance(part, dict) or kind not in _TEXTS:
            raise _wrong(f"{at}.type", "models here take text only")
        text = part.get("text", part.get("refusal"))
        if not isinstance(text, str):
            raise _wrong(f"{at}.text", "it must be a text")
        pieces.append(text)
    return "".join(pieces)


def _wrong(place: str, wanted: str) -> ApiError:
    return ApiError(400, f"{place}: {wanted}", param=place)
