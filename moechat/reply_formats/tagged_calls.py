"""Reads calls with a tag for each argument."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from moechat.reply_formats.call_sink import CallSink
from moechat.reply_formats.json_calls import LONGEST_NAME, checked_name, read_arguments
from moechat.reply_formats.json_text import Emit, dumped, escaped
from moechat.reply_formats.notations import TaggedCalls
from moechat.reply_formats.source import MalformedError, Marks, Reading, Source
from moechat.reply_formats.tools import Tool
from moechat.reply_formats.values import typed_value, types_of


def read_tagged_call(
    source: Source, sink: CallSink, calls: TaggedCalls, tools: Mapping[str, Tool]
) -> Reading[None]:
    """Read one call, from behind its begin.

    A value ends at its closing tag if a tag of the call follows, so that it may contain the text of the tag.
    Arguments may also be one JSON object, as DeepSeek writes them at times.

    Raises:
        MalformedError: It is no call, or no call any more.
    """
    ends = Marks(filter(None, (calls.name_end, calls.key_open, calls.close)))
    written, mark = yield from source.text_to(ends, LONGEST_NAME)
    if mark != calls.name_end:
        source.at -= len(mark)
    name = checked_name(written)
    yield from source.space()
    here = source.at
    if (yield from source.peek()) == "{":
        yield from read_arguments(source, lambda: sink.begin(name), sink.arguments)
        yield from source.space()
        if not source.exhausted:
            yield from source.expect(calls.close)
        sink.end()
        return
    yield from source.expect(calls.key_open, calls.close)
    source.at = here
    sink.begin(name)
    yield from _read_arguments(source, sink.arguments, calls, tools.get(name))
    sink.end()


def _read_arguments(source: Source, emit: Emit, calls: TaggedCalls, tool: Tool | None) -> Reading[None]:
    outer = tuple(closer for closer in calls.closers if closer != calls.close)
    key_ends = Marks(filter(None, (calls.key_end, calls.string_key_end)))
    keys: set[str] = set()
    emit("{")
    while True:
        yield from source.space()
        here = source.at
        mark = yield from source.take(calls.key_open, calls.close, *outer)
        if mark != calls.key_open:
            if mark in outer:
                source.at = here  # the call's own closing tag is missing
            elif not mark:
                raise MalformedError
            emit("}")
            return
        written, key_end = yield from source.text_to(key_ends)
        key = written.strip()
        if key in keys or not key:
            raise MalformedError
        if calls.value_open:
            yield from source.space()
            yield from source.expect(calls.value_open)
        emit(f"{', ' if keys else ''}{dumped(key)}: ")
        keys.add(key)
        types = types_of(tool, key)
        if calls.string_key_end:
            types = frozenset({"string"}) if key_end == calls.string_key_end else types - {"string"}
        yield from _read_value(source, emit, calls, types)


def _read_value(source: Source, emit: Emit, calls: TaggedCalls, types: frozenset[str]) -> Reading[None]:
    if types == {"string"}:
        emit('"')
        trimmer = _LineTrimmer(lambda text: emit(escaped(text)), trim=calls.trim_lines)
        yield from _pass_value(source, trimmer.add, calls)
        trimmer.end()
        emit('"')
        return
    pieces: list[str] = []
    trimmer = _LineTrimmer(pieces.append, trim=calls.trim_lines)
    yield from _pass_value(source, trimmer.add, calls)
    trimmer.end()
    emit(dumped(typed_value("".join(pieces), types)))


def _pass_value(source: Source, emit: Emit, calls: TaggedCalls) -> Reading[None]:
    """Move over a value and its closing tag; emits the value's text."""
    outer = tuple(closer for closer in calls.closers if closer != calls.close)
    ends = Marks((calls.value_close, calls.close) if outer else (calls.value_close,))
    follow = {
        calls.value_close: (calls.key_open, calls.close, *outer),
        calls.close: outer,  # the value's own closing tag is missing
    }
    while True:
        mark = yield from source.pass_to(ends, emit)
        if not mark:
            raise MalformedError
        behind = source.at
        yield from source.space()
        found = (yield from source.take(*follow[mark])) or (mark == calls.value_close and source.exhausted)
        source.at = behind
        if found:
            source.at -= 0 if mark == calls.value_close else len(mark)
            return
        emit(mark)


class _LineTrimmer:
    """Leaves out one line break at the beginning of a text and one at its end."""

    def __init__(self, emit: Callable[[str], None], *, trim: bool) -> None:
        self._emit = emit
        self._trim = trim
        self._begun = False
        self._held = ""

    def add(self, piece: str) -> None:
        if self._trim:
            if not self._begun and piece:
                piece, self._begun = piece.removeprefix("\n"), True
            piece = self._held + piece
            self._held = "\n" if piece.endswith("\n") else ""
            piece = piece.removesuffix("\n")
        if piece:
            self._emit(piece)

    def end(self) -> None:
        self._held = ""
