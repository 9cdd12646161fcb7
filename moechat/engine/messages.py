"""Checks chat messages before a chat template reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from moechat.errors import UsageError

ROLES = ("system", "developer", "user", "assistant", "tool")
_HINT = 'write messages as {"role": "user", "content": "…"}'


def check_messages(messages: Sequence[Any], template: str) -> list[dict[str, Any]]:
    """The messages as a chat template expects them: content is text, or missing beside tool calls.

    Args:
        messages: Each with ``role`` and ``content``; content may also be a list of parts of type ``text``,
            which are joined. Other keys are left as they are.
        template: The chat template; roles that it names are accepted besides the usual ones.

    Raises:
        UsageError: There is no message, or one is malformed; the error gives its number and the fault.
    """
    if not messages:
        raise UsageError("the prompt is empty")
    return [
        _checked(message, f"message {number} of {len(messages)}", template)
        for number, message in enumerate(messages, 1)
    ]


def _checked(message: Any, where: str, template: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise UsageError(f"{where} is of type {type(message).__name__}, not a message", hint=_HINT)
    role = message.get("role")
    if role is None:
        raise UsageError(f"{where} has no role", hint=_HINT)
    if not isinstance(role, str):
        raise UsageError(f"{where}: its role is of type {type(role).__name__}, not a text", hint=_HINT)
    if role not in ROLES and f"'{role}'" not in template and f'"{role}"' not in template:
        raise UsageError(
            f"{where} has the role {role!r}, which the model does not know",
            hint=f"choose one of {', '.join(ROLES)}",
        )
    content = message.get("content")
    if content is None:
        if message.get("tool_calls"):
            return dict(message)
        raise UsageError(f"{where}, of the role {role}, has no content", hint=_HINT)
    return {**message, "content": _text(content, where)}


def _text(content: Any, where: str) -> str:
    if isinstance(content, list | tuple):
        content = "".join(_part(part, where) for part in content)
    if not isinstance(content, str):
        raise UsageError(f"{where}: its content is of type {type(content).__name__}, not a text", hint=_HINT)
    try:
        content.encode()
    except UnicodeEncodeError as error:
        raise UsageError(
            f"{where}: its content is not Unicode text: {error}", hint='decode it with errors="replace"'
        ) from error
    return content


def _part(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    text = part.get("text") if kind == "text" else None
    if isinstance(text, str):
        return text
    fault = "a part without a text" if kind in (None, "text") else f"a part of the type {kind}"
    raise UsageError(f"{where}: its content has {fault}", hint="moechat reads text only")
