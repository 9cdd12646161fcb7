"""Splits streamed markdown into finished blocks.

A block is finished when no following text can change it. This is decided once per line, from the previous
lines alone, so that the blocks do not depend on the pieces in which the text arrives.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    from markdown_it import MarkdownIt
    from markdown_it.token import Token

# Previous lines of code that highlighting a line takes into account; more would make long code slow.
_CONTEXT_LINES = 200
# Most lines of a block, which is parsed again with every line.
_MAX_LINES = 400
_ENDED_BY_BLANK = ("paragraph_open", "blockquote_open", "table_open", "heading_open")
_LISTS = ("bullet_list_open", "ordered_list_open")
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")


@dataclass(frozen=True)
class Block:
    """A finished block, or an item of a list.

    Attributes:
        source: Its markdown, without surrounding blank lines.
        joined: An item that follows another of its list without a blank line.
    """

    source: str
    joined: bool = False


@dataclass(frozen=True)
class Fence:
    """A line that begins or ends a block of code.

    Attributes:
        line: The line, unchanged.
        opens: Whether it begins the block.
    """

    line: str
    opens: bool


@dataclass(frozen=True)
class CodeLine:
    """A finished line of code.

    Attributes:
        text: Without the newline and the indentation of the fence.
        language: From the fence; may be empty.
        before: Up to ``_CONTEXT_LINES`` previous lines, each with its newline.
    """

    text: str
    language: str
    before: str


Unit = Block | Fence | CodeLine


@dataclass
class _OpenCode:
    """An unfinished block of code."""

    mark: str
    indent: int
    language: str
    lines: list[str]


class BlockSplitter:
    """Takes lines and returns the units that they finish.

    Attributes:
        pending: Lines of unfinished blocks, without newlines.
        joined: Whether ``pending`` is an item that follows another of its list without a blank line.
    """

    # Invariant: pending begins with the first line of a block, or is empty.
    def __init__(self) -> None:
        self.pending: list[str] = []
        self._code: _OpenCode | None = None
        self.joined = False

    @property
    def in_code(self) -> bool:
        """Whether the next line is code."""
        return self._code is not None

    def line(self, line: str) -> list[Unit]:
        """Add a line, without its newline."""
        if self._code is not None:
            return [self._code_line(self._code, line)]
        if not self.pending and not line.strip():
            return []
        self.pending.append(line)
        if len(self.pending) >= _MAX_LINES:
            units = list(self._block(0, len(self.pending)))
            self.pending = []
            return units
        return list(self._cut())

    def end(self, rest: str) -> list[Unit]:
        """Add the last line, which has no newline, and finish all blocks."""
        units = self.line(rest) if rest else []
        if self.pending:
            units.extend(self._block(0, len(self.pending)))
            self.pending = []
        self._code, self.joined = None, False
        return units

    def _code_line(self, code: _OpenCode, line: str) -> Unit:
        closing = line.strip(" ")
        if (
            len(closing) >= len(code.mark)
            and set(closing) == {code.mark[0]}
            and len(line) - len(line.lstrip(" ")) < 4
        ):
            self._code = None
            return Fence(line, opens=False)
        indent = min(code.indent, len(line) - len(line.lstrip(" ")))
        unit = CodeLine(line[indent:], code.language, "".join(code.lines[-_CONTEXT_LINES:]))
        code.lines.append(unit.text + "\n")
        return unit

    def _cut(self) -> Iterator[Unit]:
        tokens = _parser().parse("\n".join(self.pending) + "\n")
        blocks = [token for token in tokens if token.level == 0 and token.map and token.nesting >= 0]
        if not blocks:
            return  # for example, only link definitions
        for token in blocks[:-1]:
            yield from self._items(tokens, token, keep_last=False)
        last = blocks[-1]
        start = _start(last)
        if last.type == "fence" and (opened := _FENCE.match(self.pending[start])):
            language = last.info.split()[0] if last.info.split() else ""
            mark = opened[1]
            self._code = _OpenCode(mark, opened.start(1), language, [])
            yield Fence(self.pending[start], opens=True)
            self.pending, self.joined = [], False
        elif last.type in _LISTS:
            kept = yield from self._items(tokens, last, keep_last=True)
            self.pending = self.pending[kept:]
        elif self._is_finished(last):
            yield from self._block(start, len(self.pending))
            self.pending = []
        else:
            self.pending = self.pending[start:]

    def _is_finished(self, token: Token) -> bool:
        if token.type in ("hr", "heading_open"):
            return True
        return token.type in _ENDED_BY_BLANK and not self.pending[-1].strip()

    def _items(self, tokens: list[Token], token: Token, *, keep_last: bool) -> Generator[Unit, None, int]:
        """Yield the blocks of a token, one per item of a list; returns the first line not yielded."""
        start, end = token.map or (0, 0)
        if token.type not in _LISTS:
            yield from self._block(start, end)
            return end
        starts = [
            _start(item)
            for item in tokens
            if item.type == "list_item_open" and item.level == 1 and item.map and start <= item.map[0] < end
        ]
        for place, following in zip(starts, [*starts[1:], end], strict=True):
            if following == end and keep_last:
                return place
            yield from self._block(place, following)
            self.joined = following != end
        return end

    def _block(self, start: int, end: int) -> Iterator[Unit]:
        lines = self.pending[start:end]
        while lines and not lines[-1].strip():
            lines.pop()
        joined, self.joined = self.joined, False
        if lines:
            yield Block("\n".join(lines), joined)


def _start(token: Token) -> int:
    return token.map[0] if token.map else 0


@cache
def _parser() -> MarkdownIt:
    """A parser of block structure only, without inline markup."""
    parser = new_parser()
    parser.core.ruler.enableOnly(["normalize", "block"])
    return parser


def new_parser() -> MarkdownIt:
    """A parser for chat markdown, with tables and strikethrough; HTML is plain text."""
    from markdown_it import MarkdownIt

    return MarkdownIt().enable(["strikethrough", "table"]).disable(["html_block", "html_inline"])
