"""Reads calls as Python writes them."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Collection
from typing import Any

from moechat.reply_formats.call_sink import CallSink
from moechat.reply_formats.json_calls import checked_name, read_json_calls
from moechat.reply_formats.json_text import dumped
from moechat.reply_formats.notations import JsonCalls, PythonCalls
from moechat.reply_formats.source import MalformedError, Reading, Source

_NAME_CHARACTERS = re.compile(r"[\w.-]+")
_NAME = re.compile(r"[A-Za-z_][\w.-]*")
_WORDS = {"true": True, "false": False, "null": None}
_PLAIN = re.compile(r"[^()'\"\\]+")
# Longer calls are not tried: Python's parser needs much memory.
_LONGEST_CALL = 1 << 18


def read_python_calls(
    source: Source, sink: CallSink, calls: PythonCalls, names: Collection[str] | None
) -> Reading[None]:
    """Read calls, in a list or one after another, from behind their begin.

    A call is emitted when it is complete: before that, Python's quotes may still change what it means.

    Args:
        source: The reply.
        sink: Receives the calls.
        calls: The notation.
        names: The names that a call may have; ``None``: any.

    Raises:
        MalformedError: One of them is no call.
    """
    yield from source.space()
    here = source.at
    listed = bool((yield from source.take("[")))
    if listed:
        yield from source.space()
        if (yield from source.peek()) == "{":  # some models write JSON between these marks
            source.at = here
            yield from read_json_calls(source, sink, JsonCalls(begins=calls.begins), names)
            return
    while True:
        yield from _read_call(source, sink, names)
        end = source.at
        yield from source.space()
        if listed:
            if source.exhausted or (yield from source.expect(",", "]")) == "]":
                return
            yield from source.space()
        elif not _NAME.match((yield from source.peek())):
            source.at = end
            return


def _read_call(source: Source, sink: CallSink, names: Collection[str] | None) -> Reading[None]:
    begin = source.at
    while source.take_run(_NAME_CHARACTERS):
        yield from source.peek()
    name = checked_name(source.raw(begin, source.at))
    if not _NAME.fullmatch(name) or (names is not None and name not in names):
        raise MalformedError
    yield from source.space()
    yield from source.expect("(")
    arguments = _arguments("f(" + (yield from _arguments_text(source)))
    sink.begin(name)
    sink.arguments(dumped(arguments))
    sink.end()


def _arguments_text(source: Source) -> Reading[str]:
    """The text from behind the opening parenthesis to behind the closing one.

    Line breaks within quotes, which Python forbids and models write, are escaped.
    """
    begin = source.at
    pieces: list[str] = []
    depth = 1
    quote = ""
    while depth:
        piece = source.take_run(_PLAIN)
        pieces.append(piece.replace("\n", "\\n").replace("\r", "\\r") if quote else piece)
        character = yield from source.peek()
        if not character or source.at - begin > _LONGEST_CALL:
            raise MalformedError
        if not _PLAIN.match(character):
            pieces.append(character)
            source.at += 1
            if character == "\\":
                pieces.append((yield from source.peek()))
                source.at += 1
            elif quote:
                quote = "" if character == quote else quote
            elif character in "'\"":
                quote = character
            else:
                depth += 1 if character == "(" else -1
    return "".join(pieces)


def _arguments(call: str) -> dict[str, Any]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(call, mode="eval").body
        if not isinstance(tree, ast.Call) or tree.args:
            raise MalformedError
        arguments = {keyword.arg or "": _value(keyword.value) for keyword in tree.keywords}
        dumped(arguments)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        raise MalformedError from None
    if "" in arguments or len(arguments) != len(tree.keywords):
        raise MalformedError
    return arguments


def _value(node: ast.expr) -> Any:
    """The value of a literal; JSON's names for true, false and null are known too."""
    if isinstance(node, ast.Constant) and (
        node.value is None or isinstance(node.value, bool | int | float | str)
    ):
        return node.value
    if isinstance(node, ast.Name) and node.id in _WORDS:
        return _WORDS[node.id]
    if isinstance(node, ast.List | ast.Tuple | ast.Set):
        return [_value(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        keys = [_value(key) if key is not None else None for key in node.keys]
        if all(isinstance(key, str) for key in keys):
            return dict(zip(keys, map(_value, node.values), strict=True))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = _value(node.operand)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return -value if isinstance(node.op, ast.USub) else value
    raise MalformedError
