"""Grammars that make a model call tools, in its own format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from moechat.errors import UsageError
from moechat.reply_formats import channels
from moechat.reply_formats.json_text import dumped
from moechat.reply_formats.lark import LarkWriter, either, quoted
from moechat.reply_formats.listed_arguments import braced_call, python_call
from moechat.reply_formats.notations import (
    BracedCalls,
    ElementCalls,
    JsonCalls,
    NamedCalls,
    PythonCalls,
    ReplyFormat,
    TaggedCalls,
)
from moechat.reply_formats.tools import Tool
from moechat.reply_formats.values import text_options, types_in, types_of

# Schemas may refer to themselves; deeper values, and those beyond this number of rules, are text.
_DEEPEST_ELEMENT = 4
_MOST_RULES = 2000
_SPACE = "/[ \\n]{1,4}/"


def call_grammar(
    format: ReplyFormat,
    tools: Sequence[Tool],
    choice: str | None = None,
    parallel: bool = True,
    *,
    tokens: Mapping[str, int] | None = None,
    thinking: bool = False,
) -> str:
    """A grammar for replies that call tools, for the request's ``tool_choice``.

    The arguments follow the tool's schema: as JSON by llguidance; where the format writes values as text,
    each has its type, required ones are there, and all come in the order of the schema. Members that the
    schema does not name are allowed only if it says so (``additionalProperties``), and only in JSON.

    Args:
        format: The model's format.
        tools: The request's tools.
        choice: Name of the tool to call; ``None``: any of them (``tool_choice`` is ``required``).
        parallel: Several calls are allowed, where the format can write them.
        tokens: Ids of special tokens by their text, see :func:`grammar_tokens`.
        thinking: The prompt ends inside a thought. Otherwise a thought may come before the call.

    Returns:
        The grammar in llguidance's dialect of Lark.

    Raises:
        UsageError: The format has no calls, or there is no such tool.
    """
    calls = format.calls
    if calls is None:
        raise UsageError(
            "this model's chat template has no tools, so it cannot be made to call one",
            hint="leave out tool_choice, or use a model whose template has tools",
        )
    chosen = [tool for tool in tools if choice is None or tool.name == choice]
    if not chosen:
        raise UsageError(
            f"tool_choice names {choice!r}, which is none of the request's tools"
            if choice is not None
            else "tool_choice needs a call, but the request has no tools"
        )
    writer = LarkWriter(tokens or {})
    writer.rule("start", "beginning calls")
    writer.rule("beginning", _beginning(writer, format, thinking=thinking))
    if isinstance(calls, JsonCalls):
        body = _json_calls(writer, calls, chosen, parallel=parallel)
    elif isinstance(calls, NamedCalls):
        body = _named_calls(writer, calls, chosen, parallel=parallel)
    elif isinstance(calls, TaggedCalls):
        body = _tagged_calls(writer, calls, chosen, parallel=parallel)
    elif isinstance(calls, PythonCalls):
        body = _python_calls(writer, calls, chosen, parallel=parallel)
    elif isinstance(calls, BracedCalls):
        body = _repeated(either([braced_call(writer, calls, tool) for tool in chosen]), "", parallel=parallel)
    elif isinstance(calls, ElementCalls):
        body = _element_calls(writer, calls, chosen, parallel=parallel)
    else:
        body = _channel_call(writer, chosen)
    writer.rule("calls", body)
    return writer.text()


def closed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of an object without members that it does not name, unless it allows them itself."""
    names = schema.get("properties", {}).keys()
    if (
        set(schema.get("required", ())) <= names
        and "additionalProperties" not in schema
        and not _combined(schema)
    ):
        return {**schema, "additionalProperties": False}
    return dict(schema)


def _combined(schema: Mapping[str, Any]) -> bool:
    return any(key in schema for key in ("anyOf", "allOf", "oneOf", "$ref", "patternProperties"))


def _beginning(writer: LarkWriter, format: ReplyFormat, *, thinking: bool) -> str:
    """What stands before the calls: the rest of a thought, a thought, or nothing; and white space."""
    if format.channels:
        analysis = writer.literal(f"{channels.CHANNEL}analysis{channels.MESSAGE}")
        next_message = writer.literal(f"{channels.START}assistant")
        return f"({analysis} {writer.until(channels.END)} {next_message})?"
    if not format.thoughts:
        return f"{_SPACE}?"
    thought = format.thoughts[0]
    if thinking:
        return f"{writer.until(thought.close)} {_SPACE}?"
    opened = writer.literal(thought.open + thought.label)
    return f"{_SPACE}? ({opened} {writer.until(thought.close)} {_SPACE}?)?"


def _repeated(call: str, between: str, *, parallel: bool) -> str:
    return f"{call} ({between} {call})*" if parallel else call


def _json_calls(writer: LarkWriter, calls: JsonCalls, tools: Sequence[Tool], *, parallel: bool) -> str:
    ids = f'"{calls.call_id}": "' if calls.call_id else ""
    number = f"{quoted('{' + ids)} /[0-9]{{1,2}}/ {quoted(chr(34) + ', ')}" if ids else quoted("{")
    call = writer.rule(
        "call",
        f"{number} "
        + either(
            [
                f"{quoted(f'{dumped(calls.name)}: {dumped(tool.name)}, {dumped(calls.arguments)}: ')} "
                f'{writer.json(closed(tool.parameters))} "}}"'
                for tool in tools
            ]
        ),
    )
    if calls.bare_begin:
        return _repeated(call, quoted("; "), parallel=parallel)
    line = "\n" if calls.lines else ""
    opened = writer.literal(calls.begins[0] + ("[" if calls.array else line))
    ending = ("]" if calls.array else line) + "".join(calls.closers)
    closing = f" {writer.literal(ending)}" if ending else ""
    if calls.array:
        return f"{opened} {_repeated(call, quoted(', '), parallel=parallel)}{closing}"
    framed = writer.rule("framed", f"{opened} {call}{closing}")
    return _repeated(framed, f"{_SPACE}?", parallel=parallel)


def _named_calls(writer: LarkWriter, calls: NamedCalls, tools: Sequence[Tool], *, parallel: bool) -> str:
    frame_close = calls.closers[-1] if calls.frames else ""
    call_close = calls.closers[0] if calls.closers else ""

    def written(tool: Tool) -> str:
        arguments = writer.json(closed(tool.parameters))
        begin = calls.begins[0]
        if calls.head == "typed":
            head = writer.literal(f"{begin}function{calls.head_end}{tool.name}\n```json\n")
            return f"{head} {arguments} {writer.literal(f'{chr(10)}```{call_close}')}"
        if calls.head == "numbered":
            numbered = writer.literal(f"{begin}functions.{tool.name}:")
            head = f"{numbered} /[0-9]+/ {writer.literal(calls.head_end)}"
        else:
            head = writer.literal(f"{begin}{tool.name}{calls.head_end}")
        return f"{head} {arguments}" + (f" {writer.literal(call_close)}" if call_close else "")

    call = writer.rule("call", either([written(tool) for tool in tools]))
    row = _repeated(call, f"{_SPACE}?", parallel=parallel)
    if not calls.frames:
        return row
    return f"{writer.literal(calls.frames[0])} {row} {_SPACE}? {writer.literal(frame_close)}"


def _tagged_calls(writer: LarkWriter, calls: TaggedCalls, tools: Sequence[Tool], *, parallel: bool) -> str:
    line = f"{_SPACE}?" if calls.lines else ""
    bodies = []
    for tool in tools:
        begin = writer.literal(calls.begins[0] + tool.name + calls.name_end.strip())
        arguments = " ".join(
            _tagged_argument(writer, calls, tool, key) for key in tool.parameters.get("properties", {})
        )
        bodies.append(f"{begin} {line} {arguments} {writer.literal(calls.close)}")
    call = writer.rule("call", either(bodies))
    if not calls.frames:
        return _repeated(call, line, parallel=parallel)
    opened, closing = writer.literal(calls.frames[0]), writer.literal(calls.closers[-1])
    if calls.framed:
        framed = writer.rule("framed", f"{opened} {line} {call} {line} {closing}")
        return _repeated(framed, line, parallel=parallel)
    return f"{opened} {line} {_repeated(call, line, parallel=parallel)} {line} {closing}"


def _tagged_argument(writer: LarkWriter, calls: TaggedCalls, tool: Tool, key: str) -> str:
    types = types_of(tool, key)
    line = f"{_SPACE}?" if calls.lines else ""
    edge = "\n" if calls.trim_lines else ""
    text = "string" in types
    key_end = calls.string_key_end if text and calls.string_key_end else calls.key_end
    value_open = calls.value_open + edge
    opened = writer.literal(calls.key_open + key + key_end)
    if value_open:
        opened += f" {line if calls.value_open else ''} {writer.literal(value_open)}"
    close = edge + calls.value_close
    schema = tool.schema_of(key) or {}
    options = text_options(schema)
    if text and options is None:
        value = writer.until(close)
    else:
        fixed = either([quoted(option) for option in options]) if text and options else None
        value = f"{fixed or writer.json(schema, tool.parameters)} {writer.literal(close)}"
    argument = writer.numbered("argument", f"{opened} {value} {line}")
    return argument if key in tool.parameters.get("required", ()) else f"{argument}?"


def _python_calls(writer: LarkWriter, calls: PythonCalls, tools: Sequence[Tool], *, parallel: bool) -> str:
    call = writer.rule("call", either([python_call(writer, tool) for tool in tools]))
    if calls.bare_begin:
        opening, closing = "", ""
    else:
        opening, closing = calls.begins[0], calls.closers[-1]
    if calls.listed:
        opening, closing = f"{opening}[", f"]{closing}"
    row = _repeated(call, quoted(", " if calls.listed else "\n"), parallel=parallel)
    return f"{writer.literal(opening)} {row} {writer.literal(closing)}"


def _element_calls(writer: LarkWriter, calls: ElementCalls, tools: Sequence[Tool], *, parallel: bool) -> str:
    bodies = []
    for tool in tools:
        begin = writer.literal(calls.begins[0] + tool.name + calls.name_end)
        arguments = _elements(writer, calls, tool, tool.parameters, 0)
        bodies.append(f"{begin} {_SPACE}? {arguments} {writer.literal(calls.close)}")
    row = _repeated(writer.rule("call", either(bodies)), f"{_SPACE}?", parallel=parallel)
    closing = writer.literal(calls.closers[-1])
    return f"{writer.literal(calls.frames[0])} {_SPACE}? {row} {_SPACE}? {closing}"


def _elements(
    writer: LarkWriter, calls: ElementCalls, tool: Tool, schema: Mapping[str, Any], depth: int
) -> str:
    """The members of an object, in their order."""
    members = []
    for key in schema.get("properties", {}):
        member = _element(writer, calls, tool, tool.member_schema(schema, key) or {}, key, depth)
        members.append(member if key in schema.get("required", ()) else f"{member}?")
    return " ".join(members)


def _element(
    writer: LarkWriter, calls: ElementCalls, tool: Tool, schema: Mapping[str, Any], key: str, depth: int
) -> str:
    """A rule for one element, with its value and the white space behind it."""
    opened, close = writer.literal(f"{calls.prefix}<{key}>"), f"{calls.prefix}</{key}>"
    types = types_in(tool, schema)
    nested = depth < _DEEPEST_ELEMENT and writer.size < _MOST_RULES
    options = text_options(schema)
    if options is not None:
        value = f"{either([quoted(option) for option in options])} {writer.literal(close)}"
    elif types == {"object"} and schema.get("properties") and nested:
        members = _elements(writer, calls, tool, schema, depth + 1)
        value = f"{_SPACE}? {members} {writer.literal(close)}"
    elif types == {"array"} and nested:
        item = _element(writer, calls, tool, tool.item_schema(schema) or {}, calls.item, depth + 1)
        value = f"{_SPACE}? {item}* {writer.literal(close)}"
    elif "string" in types:
        value = writer.until(close)
    else:
        value = f"{writer.json(schema, tool.parameters)} {writer.literal(close)}"
    return writer.numbered("element", f"{opened} {value} {_SPACE}?")


def _channel_call(writer: LarkWriter, tools: Sequence[Tool]) -> str:
    """One message to a tool; its last mark ends the reply, so there is one call only."""
    bodies = []
    for tool in tools:
        to = f"to=functions.{tool.name}"
        in_channel = writer.literal(
            f"{channels.CHANNEL}commentary {to} {channels.CONSTRAIN}json{channels.MESSAGE}"
        )
        in_role = writer.literal(f" {to}{channels.CHANNEL}commentary json{channels.MESSAGE}")
        bodies.append(f"({in_channel} | {in_role}) {writer.json(closed(tool.parameters))}")
    return f"{either(bodies)} {writer.literal(channels.CALL)}?"
