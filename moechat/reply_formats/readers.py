"""Chooses the reader of a notation of calls."""

from __future__ import annotations

from collections.abc import Mapping

from moechat.reply_formats.braced_calls import read_braced_call
from moechat.reply_formats.call_sink import CallSink
from moechat.reply_formats.element_calls import read_element_call
from moechat.reply_formats.json_calls import read_json_calls
from moechat.reply_formats.named_calls import read_named_call
from moechat.reply_formats.notations import (
    BracedCalls,
    Calls,
    ElementCalls,
    JsonCalls,
    NamedCalls,
    PythonCalls,
    TaggedCalls,
)
from moechat.reply_formats.python_calls import read_python_calls
from moechat.reply_formats.source import MalformedError, Reading, Source
from moechat.reply_formats.tagged_calls import read_tagged_call
from moechat.reply_formats.tools import Tool


def read_calls(
    source: Source, sink: CallSink, calls: Calls, begin: str, tools: Mapping[str, Tool]
) -> Reading[None]:
    """Read the calls behind a mark.

    Args:
        source: The position is behind the mark.
        sink: Receives the calls.
        calls: The notation.
        begin: The mark that begins them; empty at the beginning of a reply.
        tools: The request's tools by name.

    Raises:
        MalformedError: What follows is no call, or no call any more.
    """
    names = None if begin else tools
    if isinstance(calls, JsonCalls):
        yield from read_json_calls(source, sink, calls, names)
    elif isinstance(calls, PythonCalls):
        yield from read_python_calls(source, sink, calls, names)
    elif isinstance(calls, NamedCalls):
        yield from read_named_call(source, sink, calls)
    elif isinstance(calls, TaggedCalls):
        yield from read_tagged_call(source, sink, calls, tools)
    elif isinstance(calls, BracedCalls):
        yield from read_braced_call(source, sink, calls)
    elif isinstance(calls, ElementCalls):
        yield from read_element_call(source, sink, calls, tools)
    else:  # messages in channels are read from the beginning of the reply
        raise MalformedError
