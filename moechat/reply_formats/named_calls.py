"""Reads calls with the name before a JSON object of arguments."""

from __future__ import annotations

import re

from moechat.reply_formats.call_sink import CallSink
from moechat.reply_formats.json_calls import LONGEST_NAME, checked_name, read_arguments, read_json_calls
from moechat.reply_formats.notations import JsonCalls, NamedCalls
from moechat.reply_formats.source import MalformedError, Marks, Reading, Source

_NUMBERED = re.compile(r"(?:functions\.)?(.+?)(?::[0-9]+)?")
_FENCE = "```"


def read_named_call(source: Source, sink: CallSink, calls: NamedCalls) -> Reading[None]:
    """Read one call, from behind its begin; with ``head="id"`` it may be an array of JSON calls.

    Raises:
        MalformedError: It is no call, or no call any more.
    """
    yield from source.space()
    if calls.head == "id" and (yield from source.peek()) in ("[", "{"):
        yield from read_json_calls(source, sink, JsonCalls(begins=calls.begins), None)
        return
    name, call_id = yield from _read_head(source, calls)
    yield from source.space()
    fenced = yield from source.take(f"{_FENCE}json", _FENCE)
    yield from read_arguments(source, lambda: sink.begin(name, call_id), sink.arguments)
    end = source.at
    if fenced:
        yield from source.space()
        if not (yield from source.take(_FENCE)):
            if source.ends_within((_FENCE,)):
                source.skip_rest()
            else:
                source.at = end
    sink.end()


def _read_head(source: Source, calls: NamedCalls) -> Reading[tuple[str, str | None]]:
    """The name, and the id if there is one."""
    if calls.head == "id":
        marks = Marks(filter(None, (calls.head_end, calls.id_begin, "{")))
        written, mark = yield from source.text_to(marks, LONGEST_NAME)
        call_id: str | None = None
        if mark == calls.id_begin:
            call_id, _ = yield from source.text_to(Marks((calls.head_end,)), LONGEST_NAME)
        elif mark == "{":
            source.at -= 1
        return checked_name(written), call_id.strip() if call_id is not None else None
    written, _ = yield from source.text_to(Marks((calls.head_end,)), LONGEST_NAME)
    if calls.head == "numbered":
        head = checked_name(written)
        numbered = _NUMBERED.fullmatch(head)
        if numbered is None:
            raise MalformedError
        return checked_name(numbered[1]), head
    yield from source.space()
    if (yield from source.peek()) not in ("{", '"', "`"):  # what stood before the mark was a type
        written, _ = yield from source.text_to(Marks(("\n",)), LONGEST_NAME)
    return checked_name(written), None
