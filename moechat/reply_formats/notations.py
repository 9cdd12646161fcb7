"""How models mark thinking and write calls of tools, as data for the parser and for grammars."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class ThoughtMarks:
    """The marks around thinking.

    Attributes:
        open: Before it; often written by the chat template at the end of the prompt.
        close: After it.
        label: Text after ``open`` that belongs to the mark.
        anywhere: A thought may begin later than at the beginning of a reply, if its mark is a special token:
            an answer may contain the text of the mark.
    """

    open: str
    close: str
    label: str = ""
    anywhere: bool = False


@dataclass(frozen=True, kw_only=True)
class CallMarks:
    """The marks of calls that the parser searches in text.

    Attributes:
        begins: Any of them begins a call, or a row of calls. The first is the usual one.
        frames: Marks before the first call that have no meaning of their own. The first is the usual one.
        closers: Marks behind calls; they are dropped there. The last is that of a frame, if there is one.
        inner: Other marks within calls that may be special tokens.
        bare_begin: Characters by which a reply may begin with a call without a mark.
    """

    begins: tuple[str, ...]
    frames: tuple[str, ...] = ()
    closers: tuple[str, ...] = ()
    inner: tuple[str, ...] = ()
    bare_begin: str = ""


@dataclass(frozen=True, kw_only=True)
class JsonCalls(CallMarks):
    """Calls that are JSON objects with the members ``name`` and ``arguments``, or others for them.

    Behind a begin stand an object, several of them, or an array.

    Attributes:
        array: The calls of a reply are written as one array.
        name: The member of the name, as it is written; all are read.
        arguments: The member of the arguments, as it is written; all are read.
        call_id: The member of the call's id, if one is written; its values are "0", "1", and so on.
        lines: Line breaks stand around the JSON, as it is written; both forms are read.
    """

    array: bool = False
    name: Literal["name", "tool_name"] = "name"
    arguments: Literal["arguments", "parameters"] = "arguments"
    call_id: Literal["", "tool_call_id"] = ""
    lines: bool = False


@dataclass(frozen=True, kw_only=True)
class NamedCalls(CallMarks):
    """Calls with the name before a JSON object of arguments.

    Attributes:
        head: What stands between a begin and the arguments.

            - ``plain``: the name (DeepSeek-V3.1);
            - ``typed``: ``function``, the mark, the name; a code fence around the arguments (DeepSeek-V3);
            - ``numbered``: ``functions.NAME:NUMBER``, which is the call's id too (Kimi);
            - ``id``: the name, sometimes an id (Mistral); or no name but JSON calls in an array.
        head_end: The mark behind the head; for ``typed`` the one in it.
        id_begin: For ``id``: the mark between name and id.
    """

    head: Literal["plain", "typed", "numbered", "id"]
    head_end: str
    id_begin: str = ""


@dataclass(frozen=True, kw_only=True)
class TaggedCalls(CallMarks):
    """Calls with a tag for each argument; values are text, typed by the tool's schema.

    ``BEGIN name NAME_END``, then for each argument ``KEY_OPEN key KEY_END VALUE_OPEN value VALUE_CLOSE``,
    then ``CLOSE``.

    Attributes:
        name_end: Behind the name, which may also end at the first argument's tag or at ``close``.
        close: Behind the arguments.
        key_open: Before an argument's name.
        key_end: Behind it.
        value_open: Before the value, if that is not ``key_end``.
        value_close: Behind the value.
        string_key_end: Behind the name of an argument that is a string, where the notation distinguishes
            them; ``key_end`` is then behind those of others, whose values are JSON.
        framed: Every call stands in a frame of its own, as it is written; otherwise all stand in one.
        trim_lines: A line break at the begin and at the end of a value belongs to its tags.
        lines: Line breaks stand between tags, as it is written; all forms are read.
    """

    name_end: str
    close: str
    key_open: str
    key_end: str
    value_open: str = ""
    value_close: str
    string_key_end: str = ""
    framed: bool = False
    trim_lines: bool = False
    lines: bool = False


@dataclass(frozen=True, kw_only=True)
class PythonCalls(CallMarks):
    """Calls as Python writes them, ``name(key=value)``, in a list or one in each line.

    Attributes:
        listed: They stand in a list, as it is written; both are read.
    """

    listed: bool = True


@dataclass(frozen=True, kw_only=True)
class BracedCalls(CallMarks):
    """Calls as ``call:name{key:value}`` with a mark around strings (Gemma).

    Attributes:
        quote: The mark.
    """

    quote: str


@dataclass(frozen=True, kw_only=True)
class ElementCalls(CallMarks):
    """Calls with an element named after each argument, ``<key>value</key>``, nested for objects and arrays.

    ``BEGIN name NAME_END``, the elements, ``CLOSE``.

    Attributes:
        prefix: Stands before every tag, so that values may contain tags (MiniMax-M3).
        name_end: Behind the name.
        close: Behind the arguments.
        item: Name of the elements of arrays.
    """

    prefix: str
    name_end: str
    close: str
    item: str = "item"


@dataclass(frozen=True, kw_only=True)
class ChannelCalls(CallMarks):
    """Calls that are messages to a tool, in a reply that consists of messages in channels (gpt-oss)."""


Calls = JsonCalls | NamedCalls | TaggedCalls | PythonCalls | BracedCalls | ElementCalls | ChannelCalls


@dataclass(frozen=True)
class ReplyFormat:
    """How the replies of a model are written.

    Attributes:
        name: For messages and tests.
        thoughts: Marks of thinking.
        calls: How calls of tools are written; ``None``: the model has no tools.
        answer: The two marks around an answer, which carry nothing; recognised at its beginning.
        channels: Replies consist of messages in channels, see :mod:`moechat.reply_formats.channels`.
        thinking_field: The member of a message in which its chat templates look for earlier thinking.
        short_ids: Its chat templates demand ids of calls of nine letters and digits.
    """

    name: str
    thoughts: tuple[ThoughtMarks, ...] = ()
    calls: Calls | None = None
    answer: tuple[str, ...] = ()
    channels: bool = False
    thinking_field: str = "reasoning_content"
    short_ids: bool = False
