"""Renders chat templates in the confined process, as transformers' ``apply_chat_template`` does."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from moechat.confined.limits import TEMPLATE_CHARACTERS, Limits
from moechat.confined.process import SHARED, LimitError, RefusedError
from moechat.errors import ModelRulesError

HINT = (
    "it comes with the model (chat_template.jinja, tokenizer_config.json or the GGUF file) and may be "
    "damaged or hostile: get the model from its publisher, or take another"
)
# Names under which clients send an answer's thinking; templates read the first, those of gpt-oss the second.
_THINKING = ("reasoning_content", "thinking", "reasoning")


def render_messages(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    name: str,
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    options: Mapping[str, Any] | None = None,
    add_generation_prompt: bool = True,
) -> str:
    """Chat messages as text, by the chat template of a tokenizer.

    Args:
        tokenizer: A transformers tokenizer with a chat template.
        messages: As transformers takes them.
        name: Of the model, for messages.
        tools: Descriptions of tools.
        options: Further variables.
        add_generation_prompt: End with the beginning of an answer.

    Raises:
        RefusedError: There is no message, or the template raised an exception: it does not take these.
        ModelRulesError: The template exceeds a limit.
    """
    if not messages:
        raise RefusedError("there is no message")
    described = list(tools) if tools else None
    template = str(tokenizer.get_chat_template(tools=described))
    variables = {
        **tokenizer.special_tokens_map,
        **(options or {}),
        "messages": [_message(message) for message in messages],
        "tools": described,
        "documents": None,
        "add_generation_prompt": add_generation_prompt,
    }
    return render(template, variables, name)


def render(template: str, variables: Mapping[str, Any], name: str) -> str:
    """A template with variables.

    Args:
        template: Its text.
        variables: Values that JSON has; others become a text with the name of their type.
        name: Of the model, for messages.

    Raises:
        RefusedError: The template raised an exception.
        ModelRulesError: It exceeds a limit.
    """
    _require_size(template, name)
    values = _plain(variables)
    limits = Limits.of_template(_characters(values))
    try:
        return SHARED.request(limits, "render", template, values, limits.output, limits.steps)
    except LimitError as error:
        raise ModelRulesError(f"the chat template of {name} {_exceeded(error, limits)}", hint=HINT) from None


def free_variables(template: str) -> frozenset[str] | None:
    """The names that a template reads and does not set; ``None`` if they cannot be found.

    Args:
        template: Its text.

    Raises:
        RefusedError: It has a fault.
    """
    if len(template) > TEMPLATE_CHARACTERS:
        return None
    try:
        return frozenset(json.loads(SHARED.request(Limits.of_template(0), "variables", template)))
    except LimitError:
        return None


def _require_size(template: str, name: str) -> None:
    if len(template) > TEMPLATE_CHARACTERS:
        raise ModelRulesError(
            f"the chat template of {name} has {len(template):,} characters; at most {TEMPLATE_CHARACTERS:,} "
            "are read",
            hint=HINT,
        )


def _exceeded(error: LimitError, limits: Limits) -> str:
    known = {
        "output": f"writes more than {limits.output:,} characters",
        "steps": f"repeats itself more than {limits.steps:,} times in loops and macros",
        "memory": f"takes more than {limits.memory >> 20:,} MiB of memory",
        "time": f"takes more than {limits.cpu_s:.0f} s",
        "depth": "calls itself, or is nested, deeper than 1,000 levels",
    }
    return known.get(error.name, f"has broken the process that renders it: {error.name}")


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message without missing values, its thinking under every name that templates know."""
    stated = {key: value for key, value in message.items() if value is not None}
    thinking = next((stated[key] for key in _THINKING if key in stated), None)
    return stated if thinking is None else {"thinking": thinking, **stated, _THINKING[0]: thinking}


def _plain(value: Any) -> Any:
    """A value of plain types only: what a template cannot call methods of, and what can be sent."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, Mapping):
        return {_plain(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_plain, value)) if type(value) in (list, tuple) else [*map(_plain, value)]
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    return f"<{type(value).__name__}>"


def _characters(value: Any) -> int:
    """About the size of plain values."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(_characters(key) + _characters(entry) for key, entry in value.items())
    if isinstance(value, list | tuple):
        return sum(map(_characters, value))
    return 8
