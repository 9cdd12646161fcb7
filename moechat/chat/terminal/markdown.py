"""Finished blocks of markdown as text for a terminal, with rich."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, TextIO

from rich.console import Console, ConsoleOptions, RenderResult
from rich.markdown import CodeBlock, Heading, Markdown, MarkdownElement
from rich.segment import Segment
from rich.syntax import Syntax
from rich.text import Text

from moechat.chat.blocks import Block, CodeLine, Fence, Unit, new_parser
from moechat.chat.neutral import neutralise

if TYPE_CHECKING:
    from rich.console import JustifyMethod

# Colours of the terminal's own palette: they fit dark and light ones.
_CODE_THEME = "ansi_dark"


class _Code(CodeBlock):
    """Code inside a list or a quotation: no background, which would be copied as blanks."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield _highlight(str(self.text).rstrip(), self.lexer_name)


class _Heading(Heading):
    LEVEL_ALIGN: ClassVar[dict[str, JustifyMethod]] = dict.fromkeys(
        ("h1", "h2", "h3", "h4", "h5", "h6"), "left"
    )


class _Markdown(Markdown):
    elements: ClassVar[dict[str, type[MarkdownElement]]] = {
        **Markdown.elements,
        "fence": _Code,
        "code_block": _Code,
        "heading_open": _Heading,
    }

    def __init__(self, source: str) -> None:
        # With links spelled out: what is shown must not lead elsewhere unseen.
        super().__init__(source, code_theme=_CODE_THEME, hyperlinks=False)
        self.parsed = new_parser().parse(source)
        for token in self.parsed:
            for child in token.children or ():
                if child.type == "softbreak":  # a model that ends a line means it: verses, addresses
                    child.type = "hardbreak"


class _Harmless:
    """What another renderable gives, without control characters, blanks at ends of lines, and blank lines
    around it.
    """

    def __init__(self, inner: Markdown | Text) -> None:
        self._inner = inner

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        segments = (
            Segment(neutralise(segment.text), segment.style)
            for segment in console.render(self._inner, options)
            if not segment.control
        )
        blank_lines, shown = 0, False
        for line in Segment.split_lines(segments):
            while line and not line[-1].text.strip():
                line.pop()
            if not line:
                blank_lines += 1
                continue
            line[-1] = Segment(line[-1].text.rstrip(), line[-1].style)
            yield Segment("\n" * blank_lines if shown else "")
            yield from line
            yield Segment.line()
            blank_lines, shown = 0, True


class Renderer:
    """Turns units of an answer into text with styles.

    Args:
        stream: The terminal; its kind, ``NO_COLOR`` and the like decide about styles.
    """

    def __init__(self, stream: TextIO) -> None:
        self._console = Console(file=stream, force_terminal=True, highlight=False, legacy_windows=False)
        self._first = True
        self._in_code = False

    def render(self, unit: Unit, width: int) -> str:
        """One unit with the blank line that belongs before it, every line ended.

        Args:
            unit: The next one of the answer.
            width: Cells of a line; lines of code may be longer.
        """
        gap = self.has_gap(joined=isinstance(unit, Block) and unit.joined)
        if isinstance(unit, Block):
            text = self._block(unit, width)
        elif isinstance(unit, CodeLine):
            text = self._printed(_last_line(unit), None)
        else:
            self._in_code = unit.opens
            text = self._printed(Text(neutralise(unit.line), style="dim"), None)
        self._first = False
        return "\n" + text if gap else text

    def has_gap(self, *, joined: bool) -> bool:
        """Whether a blank line belongs before the next unit, which may be joined to the one before."""
        return not (self._first or self._in_code or joined)

    def begin_anew(self) -> None:
        """What comes next stands below text that was not rendered: no blank line, whatever is open."""
        self._first = True
        self._in_code = False

    def skip(self, unit: Unit, *, gap: bool) -> None:
        """A unit that is on the screen already.

        Args:
            unit: The next one of the answer.
            gap: No blank line stands below it yet.
        """
        self._first = not gap
        if isinstance(unit, Fence):
            self._in_code = unit.opens

    def _block(self, block: Block, width: int) -> str:
        try:
            return self._printed(_Markdown(block.source), width)
        except Exception:  # a parser of text that anything may have written; plain text always works
            return neutralise(block.source) + "\n"

    def _printed(self, renderable: Markdown | Text, width: int | None) -> str:
        with self._console.capture() as captured:
            if width is None:  # the terminal itself folds what is too long: it is copied as it was
                self._console.print(renderable, soft_wrap=True)
            else:
                self._console.print(_Harmless(renderable), width=max(1, width), end="")
        return captured.get()


def _highlight(code: str, language: str) -> Text:
    text = Syntax(
        "", language or "text", theme=_CODE_THEME, background_color="default", tab_size=4
    ).highlight(neutralise(code))
    text.rstrip()
    text.expand_tabs(4)
    return text


def _last_line(unit: CodeLine) -> Text:
    if not unit.text.strip():
        return Text(neutralise(unit.text))
    lines = _highlight(unit.before + unit.text, unit.language).split("\n")
    return lines[-1]
