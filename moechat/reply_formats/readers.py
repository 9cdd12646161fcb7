"""Chooses the reader of a notation of calls."""

from __future__ import annotations

from collections.abc import Mapping

from moechat.reply_formats.call_sink import CallSink
from moechat.reply_formats.json_calls import read_json_calls
from moechat.reply_formats.notations import Calls
from moechat.reply_formats.source import Reading, Source
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
    yield from read_json_calls(source, sink, calls, None if begin else tools)
