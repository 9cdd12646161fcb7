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
        anywhere: A thought may begin later than at the beginning of a reply. Only for marks that are special
            tokens: an answer may contain ``<think>``.
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
        frames: Marks before the first call that have no meaning of their own.
        closers: Marks behind calls. They are dropped there.
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
    """Calls that are JSON objects with the members ``name`` and ``arguments`` (or ``parameters``).

    Behind a begin stand an object, several of them, or an array.

    Attributes:
        array: The calls of a reply are written as one array.
        arguments: The member of the arguments, as it is written; both are read.
        lines: Line breaks stand around the JSON, as it is written; both forms are read.
    """

    array: bool = False
    arguments: Literal["arguments", "parameters"] = "arguments"
    lines: bool = False


Calls = JsonCalls


@dataclass(frozen=True)
class ReplyFormat:
    """How the replies of a model are written.

    Attributes:
        name: For messages and tests.
        thoughts: Marks of thinking.
        calls: How calls of tools are written; ``None``: the model has no tools.
        thinking_field: The member of a message in which its chat templates look for earlier thinking.
        short_ids: Its chat templates demand ids of calls of nine letters and digits.
    """

    name: str
    thoughts: tuple[ThoughtMarks, ...] = ()
    calls: Calls | None = None
    thinking_field: str = "reasoning_content"
    short_ids: bool = False
