"""Grammars of calls whose arguments are a list with commas: Python's, and Gemma's."""

from __future__ import annotations

from collections.abc import Callable

from moechat.reply_formats.json_text import dumped
from moechat.reply_formats.lark import LarkWriter, either, quoted
from moechat.reply_formats.notations import BracedCalls
from moechat.reply_formats.tools import Tool
from moechat.reply_formats.values import ALL_TYPES, text_options, types_of

_INTEGER = "/-?(0|[1-9][0-9]{0,18})/"
_NUMBER = "/-?(0|[1-9][0-9]{0,18})(\\.[0-9]{1,18})?([eE][+-]?[0-9]{1,3})?/"
# Text within quotes; the escapes are those that Python and JSON have in common.
_STRING = r"""/"([^"\\\x00-\x1f]|\\["\\nrt])*"|'([^'\\\x00-\x1f]|\\['\\nrt])*'/"""


def python_call(writer: LarkWriter, tool: Tool) -> str:
    """``name(key=value, …)``."""
    strings = writer.rule("py_string", _STRING)
    words = {"boolean": '("True" | "False")', "null": '"None"'}
    values = _values(writer, "py", strings, words, colon=": ", key=strings)
    arguments = _arguments(writer, tool, "=", ", ", values, strings, sorted_keys=False)
    return f"{quoted(f'{tool.name}(')} {arguments} {quoted(')')}"


def braced_call(writer: LarkWriter, calls: BracedCalls, tool: Tool) -> str:
    """``call:name{key:value,…}``; keys in the order in which Gemma's template writes them."""
    strings = writer.rule("gemma_string", f"{writer.literal(calls.quote)} {writer.until(calls.quote)}")
    words = {"boolean": '("true" | "false")', "null": '"null"'}
    values = _values(writer, "gemma", strings, words, colon=":", key="/[A-Za-z_][A-Za-z0-9_.-]*/")
    arguments = _arguments(writer, tool, ":", ",", values, writer.literal(calls.quote), sorted_keys=True)
    opened = writer.literal(f"{calls.begins[0]}call:{tool.name}{{")
    return f"{opened} {arguments} {writer.literal('}' + calls.closers[0])}"


def _values(
    writer: LarkWriter, name: str, strings: str, words: dict[str, str], *, colon: str, key: str
) -> Callable[[frozenset[str]], str]:
    """Expressions for values of JSON types; those within arrays and objects may have any type."""
    comma = quoted(", " if colon == ": " else ",")
    any_value = f"{name}_value"
    member = f"{key} {quoted(colon)} {any_value}"
    of_type = {
        "string": strings,
        "integer": _INTEGER,
        "number": _NUMBER,
        **words,
        "array": writer.rule(f"{name}_array", f'"[" ({any_value} ({comma} {any_value})*)? "]"'),
        "object": writer.rule(f"{name}_object", f'"{{" ({member} ({comma} {member})*)? "}}"'),
    }
    kinds = sorted(ALL_TYPES - {"integer"})
    writer.rule(any_value, " | ".join(of_type[kind] for kind in kinds))

    def expression(types: frozenset[str]) -> str:
        if types == ALL_TYPES:
            return any_value
        wanted = types - {"integer"} if "number" in types else types
        return either([of_type[kind] for kind in sorted(wanted)])

    return expression


def _arguments(
    writer: LarkWriter,
    tool: Tool,
    colon: str,
    comma: str,
    values: Callable[[frozenset[str]], str],
    quote: str,
    *,
    sorted_keys: bool,
) -> str:
    """Arguments in their order, commas between those that are there."""
    keys = list(tool.parameters.get("properties", {}))
    if sorted_keys:
        keys.sort(key=str.lower)
    required = tool.parameters.get("required", ())
    first = rest = ""  # the arguments from a place on: if none stands before them, and if some do
    for key in reversed(keys):
        options = text_options(tool.schema_of(key) or {})
        if options is None:
            value = values(types_of(tool, key))
        elif sorted_keys:
            value = either([f"{quote} {quoted(option)} {quote}" for option in options])
        else:
            value = either([quoted(dumped(option)) for option in options])
        item = writer.numbered("argument", f"{quoted(key + colon)} {value}")
        here, behind = f"{item} {rest}".strip(), f"{quoted(comma)} {item} {rest}".strip()
        if key not in required:
            here = f"{here} | {first}" if first else f"({here})?"
            behind = f"{behind} | {rest}" if rest else f"({behind})?"
        first, rest = writer.numbered("first", here), writer.numbered("rest", behind)
    return first
