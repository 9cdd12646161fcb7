"""The values of arguments that models write as text, typed by the tool's schema."""

from __future__ import annotations

import ast
import json
import warnings
from collections.abc import Mapping
from typing import Any

from moechat.reply_formats.tools import Tool

ALL_TYPES = frozenset({"string", "integer", "number", "boolean", "null", "array", "object"})
_WORDS = {"true": True, "false": False, "null": None, "none": None}
# Longer ones are not tried as Python: its parser needs much memory.
_LONGEST_LITERAL = 1 << 16


def types_of(tool: Tool | None, parameter: str) -> frozenset[str]:
    """The JSON types that a parameter may have; all of them if it is unknown."""
    schema = tool.schema_of(parameter) if tool is not None else None
    return types_in(tool, schema) if tool is not None and schema is not None else ALL_TYPES


def types_in(tool: Tool, schema: Mapping[str, Any]) -> frozenset[str]:
    """The JSON types that a value within a tool's parameters may have; all of them if that is unknown."""
    return _types(tool, schema, set()) or ALL_TYPES


def _types(tool: Tool, schema: Mapping[str, Any], seen: set[int]) -> frozenset[str]:
    """As :func:`types_in`; nothing for a schema that has been seen, since schemas may refer to themselves."""
    resolved = tool.resolved(schema)
    if resolved is None:
        return ALL_TYPES
    if id(resolved) in seen:
        return frozenset()
    seen.add(id(resolved))
    named = resolved.get("type")
    names = [named] if isinstance(named, str) else named
    if isinstance(names, list):
        return frozenset(name for name in names if isinstance(name, str)) & ALL_TYPES
    for key in ("anyOf", "oneOf"):
        options = resolved.get(key)
        if isinstance(options, list) and options:
            mappings = [option for option in options if isinstance(option, Mapping)]
            return frozenset().union(*(_types(tool, option, seen) for option in mappings))
    for key, values in (("enum", resolved.get("enum")), ("const", [resolved.get("const")])):
        if key in resolved and isinstance(values, list) and values:
            return frozenset(type_name(value) for value in values)
    return ALL_TYPES


def type_name(value: object) -> str:
    """The JSON type of a value; ``integer`` for whole numbers."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int):
        return "integer"
    if isinstance(value, float):
        return "number"
    return "string" if isinstance(value, str) else "object" if isinstance(value, Mapping) else "array"


def text_options(schema: Mapping[str, Any]) -> list[str] | None:
    """The texts that a value may be, if the schema lists them (``enum``, ``const``); otherwise ``None``."""
    options = [schema["const"]] if "const" in schema else schema.get("enum")
    if (
        isinstance(options, list)
        and options
        and all(isinstance(option, str) and option for option in options)
    ):
        return options
    return None


def typed_value(text: str, types: frozenset[str]) -> Any:
    """The value that a text stands for.

    JSON, and Python's literals, which templates and models write too, are recognised where their type is
    allowed; otherwise the text itself is the value, so that nothing is lost.

    Args:
        text: What the model wrote.
        types: The allowed types, see :func:`types_of`.
    """
    if types == {"string"}:
        return text
    for value in _readings(text.strip()):
        kind = type_name(value)
        if kind == "string":
            continue  # a text in quotes is the text with its quotes
        if kind in types or (kind == "integer" and "number" in types):
            return value
        if kind == "number" and "integer" in types and float(value).is_integer():
            return int(value)
    return text


def _readings(text: str) -> list[Any]:
    if text.lower() in _WORDS:
        return [_WORDS[text.lower()]]
    try:
        value = json.loads(text, parse_constant=_refuse)
        json.dumps(value, allow_nan=False)  # numbers may be too large
        return [value]
    except (ValueError, RecursionError):
        pass
    if text[:1] in ("[", "{", "(") and len(text) <= _LONGEST_LITERAL:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                value = ast.literal_eval(text)
            json.dumps(value, allow_nan=False)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            return []
        return [value]
    return []


def _refuse(constant: str) -> None:
    raise ValueError(constant)
