"""Reads calls that are JSON objects."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection

from moechat.reply_formats.call_sink import CallSink
from moechat.reply_formats.json_text import Emit, dumped, read_value, read_whole_string
from moechat.reply_formats.notations import JsonCalls
from moechat.reply_formats.source import MalformedError, Reading, Source

LONGEST_NAME = 256
_IDS = ("id", "tool_call_id")


def checked_name(name: str) -> str:
    """A tool's name without the white space around it.

    Raises:
        MalformedError: It cannot be a name.
    """
    name = name.strip()
    if not name or len(name) > LONGEST_NAME or not name.isprintable():
        raise MalformedError
    return name


def read_json_calls(
    source: Source, sink: CallSink, calls: JsonCalls, names: Collection[str] | None
) -> Reading[None]:
    """Read an object, several, or an array of them, from behind the mark that begins them.

    Args:
        source: The reply.
        sink: Receives the calls.
        calls: The notation.
        names: The names that a call may have; ``None``: any.

    Raises:
        MalformedError: One of them is no call.
    """
    yield from source.space()
    if (yield from source.take("[")):
        while True:
            yield from _read_object(source, sink, calls, names)
            yield from source.space()
            if source.exhausted or (yield from source.expect(",", "]")) == "]":
                return
    while True:
        yield from _read_object(source, sink, calls, names)
        end = source.at
        yield from source.space()
        if calls.bare_begin and (yield from source.take(";", ",")):
            yield from source.space()
        first = yield from source.peek()
        if first != "{":
            if first or not source.cut:  # else what stands between calls is dropped with the next one
                source.at = end
            return


def _read_object(
    source: Source, sink: CallSink, calls: JsonCalls, names: Collection[str] | None
) -> Reading[None]:
    yield from source.space()
    yield from source.expect("{")
    name: str | None = None
    call_id: str | None = None
    held: list[str] | None = None  # arguments before the name
    while True:
        yield from source.space()
        key = yield from read_whole_string(source)
        yield from source.space()
        yield from source.expect(":")
        yield from source.space()
        if key in ("name", "tool_name") and name is None:
            name = checked_name((yield from read_whole_string(source)))
            if names is not None and name not in names:
                raise MalformedError
        elif key in ("arguments", "parameters") and held is None and not sink.open:
            if name is None:
                held = []
                yield from read_arguments(source, lambda: None, held.append)
            else:
                begin = _beginner(sink, name, call_id)
                yield from read_arguments(source, begin, sink.arguments)
        elif key in _IDS and not sink.open and (yield from source.peek()) == '"':
            call_id = yield from read_whole_string(source)
        elif key == "type" or key in _IDS:
            yield from read_value(source, lambda _: None)
        else:
            raise MalformedError
        yield from source.space()
        if (yield from _ends(source, calls, complete=name is not None and (sink.open or held is not None))):
            break
    if name is None or (names is not None and held is None and not sink.open):
        raise MalformedError
    if not sink.open:
        sink.begin(name, call_id)
        sink.arguments("".join(held or ["{}"]))
    sink.end()


def _beginner(sink: CallSink, name: str, call_id: str | None) -> Callable[[], None]:
    return lambda: sink.begin(name, call_id)


def _ends(source: Source, calls: JsonCalls, *, complete: bool) -> Reading[bool]:
    """Whether the object ends here; a complete call may lack its last brace at the end."""
    found = yield from source.take(",", "}")
    if found:
        return found == "}"
    if complete:
        begin = source.at
        closed = source.exhausted or (calls.closers and (yield from source.take(*calls.closers)))
        source.at = begin
        if closed or source.ends_within(calls.closers):
            return True
    raise MalformedError


def read_arguments(source: Source, begin: Callable[[], None], emit: Emit) -> Reading[None]:
    """Read an object of arguments; models also write it as a string that contains JSON, or ``null``.

    Args:
        source: The position is at the value.
        begin: Called once it is certain that arguments follow.
        emit: Receives the object in pieces.

    Raises:
        MalformedError: It is something else.
    """
    yield from source.space()
    first = yield from source.peek()
    if first == "{":
        begin()
        yield from read_value(source, emit)
        return
    if first == '"':
        text = yield from read_whole_string(source)
        try:
            value = json.loads(text or "{}")
            written = dumped(value)
        except (ValueError, RecursionError):
            raise MalformedError from None
        if not isinstance(value, dict):
            raise MalformedError
    else:
        yield from source.expect("null")
        written = "{}"
    begin()
    emit(written)
