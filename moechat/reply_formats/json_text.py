"""Reads JSON while it arrives, and writes it again in one form."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from moechat.reply_formats.source import MalformedError, Reading, Source

Emit = Callable[[str], None]

_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_NUMBER_CHARACTERS = re.compile(r"[-+.0-9eE]+")
_HEXADECIMAL = frozenset("0123456789abcdefABCDEF")
_ESCAPES = frozenset('"\\/bfnrt')
DEEPEST = 64  # levels of nested values; each is a few frames of the interpreter


def escaped(text: str) -> str:
    """The text as the inside of a JSON string, for any division of it into pieces."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def dumped(value: object) -> str:
    """A value as JSON, in the form that :func:`read_value` writes."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def read_value(source: Source, emit: Emit, depth: int = 0) -> Reading[str]:
    """Read one JSON value, emitting it piece by piece as it arrives.

    White space around the values of arrays and objects is written as ``json.dumps`` does. Line breaks and
    other control characters within strings, which JSON forbids and models write, become escapes.

    Returns:
        The first character of the value, by which its type is known.

    Raises:
        MalformedError: It is not JSON, or nested more than 64 levels deep; the position is at the first
            character that cannot follow.
    """
    if depth > DEEPEST:
        raise MalformedError
    yield from source.space()
    first = yield from source.peek()
    if first == '"':
        yield from read_string(source, emit)
    elif first == "{":
        yield from _read_sequence(source, emit, "}", depth)
    elif first == "[":
        yield from _read_sequence(source, emit, "]", depth)
    elif first in ("t", "f", "n"):
        emit((yield from source.expect("true", "false", "null")))
    else:
        yield from _read_number(source, emit)
    return first


def read_string(source: Source, emit: Emit) -> Reading[None]:
    """Read a string with its quotes; the position is at the first one.

    Raises:
        MalformedError: It is no string, or has no end.
    """
    emit((yield from source.expect('"')))
    while True:
        piece = source.take_run(_PLAIN)
        if piece:
            emit(piece)
        character = yield from source.peek()
        if not character:
            raise MalformedError
        if character == '"':
            source.at += 1
            emit('"')
            return
        if character == "\\":
            yield from _read_escape(source, emit)
        elif character < " ":
            source.at += 1
            emit(escaped(character))


def read_whole_string(source: Source) -> Reading[str]:
    """The value of a string.

    Raises:
        MalformedError: As :func:`read_string`.
    """
    pieces: list[str] = []
    yield from read_string(source, pieces.append)
    return str(json.loads("".join(pieces)))


def _read_escape(source: Source, emit: Emit) -> Reading[None]:
    begin = source.at
    source.at += 1
    kind = yield from source.peek()
    length = 6 if kind == "u" else 2
    if kind != "u" and kind not in _ESCAPES:
        source.at = begin
        raise MalformedError
    while source.at < begin + length:
        character = yield from source.peek()
        if not character or (source.at > begin + 1 and character not in _HEXADECIMAL):
            source.at = begin
            raise MalformedError
        source.at += 1
    emit(source.raw(begin, begin + length))


def _read_number(source: Source, emit: Emit) -> Reading[None]:
    begin = source.at
    while source.take_run(_NUMBER_CHARACTERS):
        if not (yield from source.peek()):
            break
    text = source.raw(begin, source.at)
    if not _NUMBER.fullmatch(text):
        source.at = begin
        raise MalformedError
    emit(text)


def _read_sequence(source: Source, emit: Emit, close: str, depth: int) -> Reading[None]:
    """An array or an object, from its opening bracket."""
    emit(source.raw(source.at, source.at + 1))
    source.at += 1
    yield from source.space()
    if (yield from source.take(close)):
        emit(close)
        return
    while True:
        if close == "}":
            yield from source.space()
            yield from read_string(source, emit)
            yield from source.space()
            yield from source.expect(":")
            emit(": ")
        yield from read_value(source, emit, depth + 1)
        yield from source.space()
        if (yield from source.expect(",", close)) == close:
            emit(close)
            return
        emit(", ")
