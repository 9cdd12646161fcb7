"""Reads calls whose arguments are nested elements, as MiniMax-M3 writes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moechat.reply_formats.call_sink import CallSink
from moechat.reply_formats.json_calls import LONGEST_NAME, checked_name
from moechat.reply_formats.json_text import DEEPEST, Emit, dumped, escaped
from moechat.reply_formats.notations import ElementCalls
from moechat.reply_formats.source import MalformedError, Marks, Reading, Source
from moechat.reply_formats.tools import Tool
from moechat.reply_formats.values import ALL_TYPES, typed_value, types_in

_NAME_END = Marks((">",))
Schema = Mapping[str, Any]


def read_element_call(
    source: Source, sink: CallSink, calls: ElementCalls, tools: Mapping[str, Tool]
) -> Reading[None]:
    """Read one call, from behind its begin.

    Raises:
        MalformedError: It is no call, or no call any more.
    """
    written, _ = yield from source.text_to(Marks((calls.name_end,)), LONGEST_NAME)
    name = checked_name(written)
    yield from source.space()
    here = source.at
    yield from source.expect(calls.close, f"{calls.prefix}<")
    source.at = here
    sink.begin(name)
    tool = tools.get(name, Tool(name, parameters={}))
    reader = _ElementReader(source, sink.arguments, calls, tool)
    yield from reader.members(tool.parameters, calls.close, 0)
    sink.end()


class _ElementReader:
    """Reads elements and writes their values as JSON."""

    def __init__(self, source: Source, emit: Emit, calls: ElementCalls, tool: Tool) -> None:
        self._source = source
        self._emit = emit
        self._calls = calls
        self._tool = tool
        self._open = f"{calls.prefix}<"

    def members(self, schema: Schema | None, close: str, depth: int) -> Reading[None]:
        """The elements of an object, up to and with ``close``."""
        keys: set[str] = set()
        self._emit("{")
        while key := (yield from self._element(close)):
            if key in keys:
                raise MalformedError
            self._emit(f"{', ' if keys else ''}{dumped(key)}: ")
            keys.add(key)
            member = self._tool.member_schema(schema, key) if schema is not None else None
            yield from self._value(member, key, depth + 1)
        self._emit("}")

    def _items(self, schema: Schema | None, close: str, depth: int) -> Reading[None]:
        """The elements of an array, up to and with ``close``."""
        item = self._tool.item_schema(schema) if schema is not None else None
        between = ""
        self._emit("[")
        while key := (yield from self._element(close)):
            if key != self._calls.item:
                raise MalformedError
            self._emit(between)
            between = ", "
            yield from self._value(item, key, depth + 1)
        self._emit("]")

    def _element(self, close: str) -> Reading[str]:
        """Move behind the next element's name, and return it; empty behind ``close``."""
        yield from self._source.space()
        if (yield from self._source.expect(close, self._open)) == close:
            return ""
        name, _ = yield from self._source.text_to(_NAME_END)
        if not name or name.startswith("/"):
            raise MalformedError
        return name

    def _value(self, schema: Schema | None, key: str, depth: int) -> Reading[None]:
        """A value and the end of its element."""
        if depth > DEEPEST:
            raise MalformedError
        source = self._source
        close = f"{self._calls.prefix}</{key}>"
        types = types_in(self._tool, schema) if schema is not None else ALL_TYPES
        if types == {"string"}:
            self._emit('"')
            if not (yield from source.pass_to(Marks((close,)), lambda piece: self._emit(escaped(piece)))):
                raise MalformedError
            self._emit('"')
            return
        begin = source.at
        yield from source.space()
        here = source.at
        found = yield from source.take(close, self._open)
        if found == self._open:
            first, _ = yield from source.text_to(_NAME_END)
            source.at = here
            listed = "array" in types and ("object" not in types or first == self._calls.item)
            yield from (self._items if listed else self.members)(schema, close, depth)
        elif found and types & {"array", "object"} and "string" not in types:
            self._emit("[]" if "array" in types else "{}")
        else:
            source.at = begin
            text, _ = yield from source.text_to(Marks((close,)))
            self._emit(dumped(typed_value(text, types)))
