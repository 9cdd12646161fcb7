"""Reads replies that consist of messages in channels, as gpt-oss writes them.

For example ``<|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>commentary to=functions.NAME
<|constrain|>json<|message|>{…}<|call|>``. A message in the channel ``analysis`` is thinking; one with a
recipient (``to=``, in the role or behind the channel) is a call; all others are for the user.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

from moechat.reply_formats.call_sink import CallSink
from moechat.reply_formats.json_calls import checked_name, read_arguments
from moechat.reply_formats.source import LEAST_PART, MalformedError, Marks, Reading, Source

CHANNEL, MESSAGE, START, END = "<|channel|>", "<|message|>", "<|start|>", "<|end|>"
CALL, RETURN, CONSTRAIN = "<|call|>", "<|return|>", "<|constrain|>"
CHANNEL_MARKS = (CHANNEL, MESSAGE, START, END, CALL, RETURN, CONSTRAIN)

_BEGINS = (CHANNEL, START)
_ENDS = (END, CALL, RETURN)
_IN_TEXT = Marks((*_BEGINS, *_ENDS))
_HEADER_END = Marks((MESSAGE,))
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_NO_TOOLS = frozenset({"assistant", "user", "all"})
_LONGEST_HEADER = 512

EmitText = Callable[[str, bool], None]


def read_messages(
    source: Source, sink: CallSink, emit: EmitText, begin: str, *, with_calls: bool
) -> Reading[None]:
    """Read all messages of a reply.

    Args:
        source: The position is behind ``begin``.
        sink: Receives calls.
        emit: Receives text, and whether it is thinking.
        begin: The mark at which the first header begins: a channel or a start; or ``to=``, where the prompt
            ends within the header.
        with_calls: Messages with a recipient are calls; otherwise they are thinking.
    """
    mark = begin
    while mark:
        thought = False  # behind the end of a message stands text without a header
        if mark not in _ENDS:
            thought = yield from _read_header(source, sink, emit, mark, with_calls=with_calls)
        mark = yield from source.pass_to(_IN_TEXT, partial(_emit, source, emit, thought), forget=True)


def _emit(source: Source, emit: EmitText, thought: bool, text: str) -> None:
    if text := source.without_part(text, _IN_TEXT, LEAST_PART):
        emit(text, thought)


def _read_header(
    source: Source, sink: CallSink, emit: EmitText, mark: str, *, with_calls: bool
) -> Reading[bool]:
    """Read a header, and the message if it is a call; returns whether the text that follows is thinking."""
    begin = source.at - len(mark)
    try:
        written, _ = yield from source.text_to(_HEADER_END, _LONGEST_HEADER)
    except MalformedError:
        if not source.ended:  # too long for a header
            source.at = begin + len(mark)
            emit(mark, False)
        return False
    header = mark + written
    _, in_channel, channel = header.rpartition(CHANNEL)
    recipient = _RECIPIENT.search(header.replace(CONSTRAIN, " "))
    if recipient is not None and recipient[1] not in _NO_TOOLS:
        if not with_calls:
            return True
        yield from _read_call(source, sink, emit, begin, recipient[1])
        return False
    return bool(in_channel) and channel.split()[:1] == ["analysis"]


def _read_call(source: Source, sink: CallSink, emit: EmitText, begin: int, recipient: str) -> Reading[None]:
    behind = source.at
    sink.attempt(begin, "")
    source.ran_out = False
    try:
        name = checked_name(recipient.removeprefix("functions."))
        yield from read_arguments(source, lambda: sink.begin(name), sink.arguments)
        sink.end()
        end = source.at
        yield from source.space()
        if not source.exhausted and not (yield from source.take(*_ENDS)):
            source.at = end
    except MalformedError:
        if source.cut_short:
            source.skip_rest()
        if sink.open:
            sink.broken()
        elif not source.cut_short:
            source.at = behind
            emit(source.raw(begin, behind), False)
