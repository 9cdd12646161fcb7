"""Reads calls as Gemma writes them."""

from __future__ import annotations

import re

from moechat.reply_formats.call_sink import CallSink
from moechat.reply_formats.json_calls import LONGEST_NAME, checked_name
from moechat.reply_formats.json_text import DEEPEST, Emit, dumped, escaped
from moechat.reply_formats.notations import BracedCalls
from moechat.reply_formats.source import MalformedError, Marks, Reading, Source

_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_WORDS = {"true": "true", "false": "false", "null": "null", "none": "null"}
_KEY_END = Marks((":",))
_BARE_END = Marks((",", "}", "]"))
_BRACE = Marks(("{",))


def read_braced_call(source: Source, sink: CallSink, calls: BracedCalls) -> Reading[None]:
    """Read one call, ``call:name{…}``, from behind its begin.

    Raises:
        MalformedError: It is no call, or no call any more.
    """
    yield from source.space()
    yield from source.expect("call:")
    written, _ = yield from source.text_to(_BRACE, LONGEST_NAME)
    sink.begin(checked_name(written))
    reader = _ValueReader(source, sink.arguments, Marks((calls.quote,)))
    yield from reader.members("}", 0)
    sink.end()


class _ValueReader:
    """Reads values and writes them as JSON."""

    def __init__(self, source: Source, emit: Emit, quote: Marks) -> None:
        self._source = source
        self._emit = emit
        self._quote = quote

    def members(self, close: str, depth: int) -> Reading[None]:
        """The inside of an object or an array, from behind its opening bracket to behind the closing one."""
        source, emit = self._source, self._emit
        if depth > DEEPEST:
            raise MalformedError
        emit("{" if close == "}" else "[")
        yield from source.space()
        if not (yield from source.take(close)):
            while True:
                if close == "}":
                    emit(f"{dumped((yield from self._key()))}: ")
                yield from self._value(depth)
                yield from source.space()
                if (yield from source.expect(",", close)) == close:
                    break
                emit(", ")
        emit(close)

    def _key(self) -> Reading[str]:
        source = self._source
        yield from source.space()
        if (yield from source.take(*self._quote.texts)):
            key, _ = yield from source.text_to(self._quote)
            yield from source.space()
            yield from source.expect(":")
            return key
        key, _ = yield from source.text_to(_KEY_END)
        return key.strip().strip('"')

    def _value(self, depth: int) -> Reading[None]:
        source, emit = self._source, self._emit
        yield from source.space()
        begin = yield from source.take(*self._quote.texts, "{", "[")
        if begin == "{":
            yield from self.members("}", depth + 1)
        elif begin == "[":
            yield from self.members("]", depth + 1)
        elif begin:
            emit('"')
            if not (yield from source.pass_to(self._quote, lambda piece: emit(escaped(piece)))):
                raise MalformedError
            emit('"')
        else:
            written, mark = yield from source.text_to(_BARE_END)
            source.at -= len(mark)
            word = written.strip()
            if not word:
                raise MalformedError
            emit(_WORDS.get(word.lower()) or (word if _NUMBER.fullmatch(word) else dumped(word)))
