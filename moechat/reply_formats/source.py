"""The text of a reply while it arrives, for readers that are generators.

A reader runs until it needs characters that have not arrived, and then yields; it goes on when more has come.
So its code reads like that of a parser of a complete text, and it cannot depend on where the pieces end.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable
from typing import TypeVar

_T = TypeVar("_T")
# A reader: yields when it needs more text, and returns its result.
Reading = Generator[None, None, _T]

SPACE = " \t\r\n"
# A part of a mark that is at least so long is taken for one where a limit cuts the reply: `<` is mostly text.
LEAST_PART = 3


class MalformedError(Exception):
    """The text is no call; the parser keeps it as text."""


class Marks:
    """A set of marks that are searched together.

    Args:
        texts: Not empty; no mark is part of another. The order does not matter.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        self.texts = tuple(sorted(set(texts)))
        self._pattern = re.compile("|".join(re.escape(text) for text in self.texts) or r"(?!)")
        self._longest = max((len(text) for text in self.texts), default=0)

    def search(self, text: str, begin: int) -> tuple[int, str] | None:
        """The place and text of the first mark from ``begin`` on."""
        found = self._pattern.search(text, begin)
        return None if found is None else (found.start(), found.group())

    def held(self, text: str, begin: int) -> int:
        """Number of characters at the end of ``text[begin:]`` that may begin a mark."""
        for length in range(min(self._longest - 1, len(text) - begin), 0, -1):
            end = text[-length:]
            if any(mark.startswith(end) and len(mark) > length for mark in self.texts):
                return length
        return 0


class Source:
    """A reply with a reading position.

    Attributes:
        at: The position; readers move it, and may move it back to where they began.
        ended: No more text comes.
        cut: The limit of tokens has ended it.
        ran_out: A reader wanted more text than there is; reset it before a reader that you ask this of.
    """

    def __init__(self) -> None:
        self._text = ""
        self._special: list[tuple[int, int]] = []  # places of special tokens
        self.at = 0
        self.ended = False
        self.cut = False
        self.ran_out = False

    def add(self, text: str, *, special: bool = False) -> None:
        """Append text that has arrived."""
        if special:
            self._special.append((len(self._text), len(self._text) + len(text)))
        self._text += text

    def forget(self) -> None:
        """Drop the text before the position; positions shift."""
        # Not for each piece: a long reply would be copied again and again.
        if self.at > 4096 or self.at == len(self._text):
            self._special = [
                (begin - self.at, end - self.at) for begin, end in self._special if end > self.at
            ]
            self._text = self._text[self.at :]
            self.at = 0

    def raw(self, begin: int, end: int) -> str:
        """The text between two positions."""
        return self._text[begin:end]

    def is_special(self, begin: int, end: int) -> bool:
        """Whether the text between two positions arrived as a special token."""
        return (begin, end) in self._special

    def without_part(self, piece: str, marks: Marks, least: int) -> str:
        """A piece of text without a part of a mark at its end, if a limit has cut the reply there.

        Args:
            piece: Stands at the position.
            marks: The marks.
            least: Characters of the shortest part that is not taken for text.
        """
        if self.cut and self.at + len(piece) >= len(self._text):
            part = marks.held(piece, 0)
            if part >= least:
                return piece[:-part]
        return piece

    def rest(self, begin: int) -> str:
        """The text from a place on."""
        return self._text[begin:]

    @property
    def cut_short(self) -> bool:
        """Whether a reader wanted more text where a limit has cut the reply."""
        return self.cut and self.ran_out

    def skip_rest(self) -> None:
        """Move behind all text."""
        self.at = len(self._text)

    @property
    def exhausted(self) -> bool:
        """Whether all text has been read and no more comes."""
        return self.ended and self.at >= len(self._text)

    def ends_within(self, options: Iterable[str]) -> bool:
        """Whether the reply ends at the position, behind a first part of one of the options."""
        rest = self._text[self.at :]
        return self.ended and any(
            option.startswith(rest) for option in options if 0 < len(rest) < len(option)
        )

    def more(self) -> Reading[bool]:
        """Wait for more text; ``False`` if there is none."""
        length = len(self._text)
        while len(self._text) == length:
            if self.ended:
                self.ran_out = True
                return False
            yield
        return True

    def peek(self) -> Reading[str]:
        """The character at the position; empty at the end of the reply."""
        while self.at >= len(self._text):
            if not (yield from self.more()):
                return ""
        return self._text[self.at]

    def space(self) -> Reading[None]:
        """Move over white space."""
        while (character := (yield from self.peek())) and character in SPACE:
            self.at += 1

    def take(self, *options: str) -> Reading[str]:
        """Move over the longest of the options that stands at the position; empty if none does."""
        longest = max(map(len, options))
        while True:
            here = self._text[self.at : self.at + longest]
            if not any(len(option) > len(here) and option.startswith(here) for option in options):
                break
            if self.ended:
                self.ran_out = True
                break
            yield
        found = max((option for option in options if here.startswith(option)), key=len, default="")
        self.at += len(found)
        return found

    def expect(self, *options: str) -> Reading[str]:
        """As :meth:`take`.

        Raises:
            MalformedError: None of them stands there.
        """
        found = yield from self.take(*options)
        if not found:
            raise MalformedError
        return found

    def take_run(self, pattern: re.Pattern[str]) -> str:
        """Move over what the pattern matches at the position in the text that is here; may be empty."""
        found = pattern.match(self._text, self.at)
        if found is None:
            return ""
        self.at = found.end()
        return found.group()

    def pass_to(self, marks: Marks, emit: Callable[[str], None], *, forget: bool = False) -> Reading[str]:
        """Move over the text up to the first mark, and over the mark.

        Args:
            marks: Where to stop.
            emit: Called with pieces of the text before the mark as soon as they are certain.
            forget: Drop the text that has been passed; no reader may keep a position in it.

        Returns:
            The mark; empty at the end of the reply.
        """
        while True:
            found = marks.search(self._text, self.at)
            if found is not None:
                place, mark = found
                if place > self.at:
                    emit(self._text[self.at : place])
                self.at = place + len(mark)
                return mark
            held = 0 if self.ended else marks.held(self._text, self.at)
            certain = len(self._text) - held
            if certain > self.at:
                emit(self._text[self.at : certain])
                self.at = certain
                if forget:
                    self.forget()
            if not (yield from self.more()) and not held:
                return ""

    def text_to(self, marks: Marks, most: int | None = None) -> Reading[tuple[str, str]]:
        """The text up to the first mark, and the mark; moves over both.

        Raises:
            MalformedError: The reply ends before a mark, or the text has more than ``most`` characters.
        """
        pieces: list[str] = []

        def collect(piece: str) -> None:
            pieces.append(piece)
            if most is not None and sum(map(len, pieces)) > most:
                raise MalformedError

        mark = yield from self.pass_to(marks, collect)
        if not mark:
            raise MalformedError
        return "".join(pieces), mark
