"""What a reply consists of: text, thinking, and calls of tools."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Text:
    """A piece of the answer or of the thinking.

    Attributes:
        text: Not empty.
        thought: The text is thinking, not part of the answer.
    """

    text: str
    thought: bool = False


@dataclass(frozen=True)
class CallBegin:
    """A call begins; its arguments follow.

    Attributes:
        index: Number of the call in the reply, from 0.
        name: The tool's name as the model wrote it. It may be none of the request's tools.
        call_id: The call's id where the format has one (Kimi, some of Mistral), otherwise ``None``.
    """

    index: int
    name: str
    call_id: str | None = None


@dataclass(frozen=True)
class CallArguments:
    """A piece of a call's arguments.

    Attributes:
        index: The call's number.
        text: Not empty. All pieces of a call that ends with :class:`CallEnd` make one JSON object.
    """

    index: int
    text: str


@dataclass(frozen=True)
class CallEnd:
    """The call is complete."""

    index: int


@dataclass(frozen=True)
class CallBroken:
    """A call that began is malformed or unfinished; its number is not used again.

    Attributes:
        index: The call's number.
        source: All that the model wrote for it, its marks included.
    """

    index: int
    source: str


Event = Text | CallBegin | CallArguments | CallEnd | CallBroken


def merged(events: Iterable[Event]) -> list[Event]:
    """The events with neighbouring pieces of text and of arguments joined.

    Two divisions of one reply into pieces give the same merged events.
    """
    joined: list[Event] = []
    for event in events:
        last = joined[-1] if joined else None
        if isinstance(event, Text) and isinstance(last, Text) and event.thought == last.thought:
            joined[-1] = Text(last.text + event.text, event.thought)
        elif isinstance(event, CallArguments) and isinstance(last, CallArguments):
            joined[-1] = CallArguments(event.index, last.text + event.text)
        else:
            joined.append(event)
    return joined


@dataclass(frozen=True)
class Call:
    """A complete call.

    Attributes:
        name: The tool's name.
        arguments: A JSON object, as text.
        call_id: The model's own id, or ``None``.
    """

    name: str
    arguments: str
    call_id: str | None = None


@dataclass(frozen=True)
class WholeReply:
    """A finished reply.

    Attributes:
        text: The answer; calls that are broken stand in it as the model wrote them.
        thinking: The thinking.
        calls: The complete calls, in their order.
    """

    text: str
    thinking: str
    calls: tuple[Call, ...] = ()


@dataclass
class _OpenCall:
    begin: CallBegin
    pieces: list[str] = field(default_factory=list)


def whole_reply(events: Iterable[Event]) -> WholeReply:
    """Collect all events of one reply."""
    text: list[str] = []
    thinking: list[str] = []
    calls: list[Call] = []
    current: _OpenCall | None = None
    for event in events:
        if isinstance(event, Text):
            (thinking if event.thought else text).append(event.text)
        elif isinstance(event, CallBegin):
            current = _OpenCall(event)
        elif isinstance(event, CallBroken):
            text.append(event.source)
            current = None
        elif current is not None:
            if isinstance(event, CallArguments):
                current.pieces.append(event.text)
            else:
                calls.append(Call(current.begin.name, "".join(current.pieces), current.begin.call_id))
                current = None
    return WholeReply("".join(text), "".join(thinking), tuple(calls))
