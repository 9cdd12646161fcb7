"""Helpers for tests of reply formats."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from moechat.reply_formats import Event, ReplyFormat, ReplyParser, Tool, merged, validated_tools
from moechat.reply_formats.channels import CHANNEL_MARKS

# Arguments of every JSON type.
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "height": {"type": "number"},
        "wind": {"type": "boolean"},
        "units": {"type": "array", "items": {"type": "string"}},
        "place": {"type": "object", "properties": {"street": {"type": "string"}}},
        "note": {"type": ["string", "null"]},
    },
    "required": ["city"],
}


def function(name: str, parameters: dict[str, Any] | None = None) -> dict[str, Any]:
    """A tool as clients send it."""
    return {"type": "function", "function": {"name": name, "description": name, "parameters": parameters}}


TOOLS: tuple[Tool, ...] = validated_tools([function("get_weather", WEATHER), function("now")])


def parse(
    format: ReplyFormat, pieces: str | Sequence[str], tools: Sequence[Tool] = TOOLS, **arguments: Any
) -> list[Event]:
    """Merged events of a reply given in pieces; a text is one piece."""
    parser = ReplyParser(format, tools, **arguments)
    events: list[Event] = []
    for piece in [pieces] if isinstance(pieces, str) else pieces:
        events += parser.feed(piece)
    return merged([*events, *parser.end()])


def parse_tokens(
    format: ReplyFormat, text: str, special: Sequence[str], tools: Sequence[Tool] = TOOLS, **arguments: Any
) -> list[Event]:
    """Merged events of a reply in which some marks are special tokens."""
    parser = ReplyParser(format, tools, **arguments)
    events: list[Event] = []
    while text:
        places = [(text.index(mark), mark) for mark in special if mark in text]
        place, mark = min(places, default=(len(text), ""))
        events += parser.feed(text[:place])
        if mark:
            events += parser.special(mark)
        text = text[place + len(mark) :]
    return merged([*events, *parser.end()])


def parse_cut(
    format: ReplyFormat, pieces: str | Sequence[str], special: Sequence[str] = (), **arguments: Any
) -> list[Event]:
    """Merged events of a reply that a limit of tokens has cut; some of the pieces are special tokens."""
    parser = ReplyParser(format, TOOLS, **arguments)
    events: list[Event] = []
    for piece in [pieces] if isinstance(pieces, str) else pieces:
        events += parser.special(piece) if piece in special else parser.feed(piece)
    return merged([*events, *parser.end(cut=True)])


def divided(text: str, cuts: Sequence[int]) -> list[str]:
    """The text cut at these places."""
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[begin:end] for begin, end in itertools.pairwise(places)]


def call_marks(format: ReplyFormat) -> list[str]:
    """Marks of a format that tokenizers have as single tokens."""
    calls = format.calls
    assert calls is not None
    marks = (
        [*CHANNEL_MARKS] if format.channels else [*calls.begins, *calls.frames, *calls.closers, *calls.inner]
    )
    marks += [mark for thought in format.thoughts for mark in (thought.open, thought.close)]
    for within in ("｜DSML｜", "]<]minimax[>["):  # tokens that are parts of all the others
        if within in marks:
            return [within, *(mark for thought in format.thoughts for mark in (thought.open, thought.close))]
    return [mark for mark in dict.fromkeys(marks) if re.fullmatch(r"<[^ =]+>|\[[A-Z/_]+\]", mark)]


CUTS = st.lists(st.integers(0, 1 << 16), max_size=8)


def same_however_divided(format: ReplyFormat, text: str, **arguments: Any) -> list[Event]:
    """The events of a reply, after checking them for every cut into two, and into characters."""
    events = parse(format, text, **arguments)
    for pieces in [list(text), *([text[:n], text[n:]] for n in range(1, len(text)))]:
        assert parse(format, pieces, **arguments) == events, pieces
    return events
