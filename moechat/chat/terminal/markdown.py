"""Renders finished blocks of markdown for a terminal, with rich."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, TextIO

from rich.console import Console, ConsoleOptions, RenderResult
from rich.markdown import CodeBlock, Heading, Markdown, MarkdownElement
from rich.segment import Segment
from rich.syntax import Syntax
from rich.text import Text

from moechat.chat.terminal.markdown_blocks import Block, CodeLine, Fence, Unit, new_parser
from moechat.safe_text import neutralise

if TYPE_CHECKING:
    from rich.console import JustifyMethod

# The terminal's own palette suits dark and light backgrounds.
_CODE_THEME = "ansi_dark"


class _Code(CodeBlock):
    """Code in a list or a quotation, without a background, which would be copied as spaces."""

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

    def __init__(self, source: str, *, hard_breaks: bool = True) -> None:
        # Link targets are shown, so that the user sees where a link leads.
        super().__init__(source, code_theme=_CODE_THEME, hyperlinks=False)
        self.parsed = new_parser().parse(source)
        for token in self.parsed:
            for child in token.children or ():
                # Models end lines on purpose: verses, addresses.
                if hard_breaks and child.type == "softbreak":
                    child.type = "hardbreak"


class _Neutralised:
    """The output of a renderable without control characters, trailing spaces, and surrounding blank lines."""

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


def render_page(source: str, stream: TextIO, width: int) -> str:
    """A whole page of markdown as text with styles; paragraphs are refilled.

    Args:
        source: The page.
        stream: The terminal; its type and ``NO_COLOR`` determine the styles.
        width: Cells of a line; lines of code may be longer.
    """
    console = _new_console(stream)
    with console.capture() as captured:
        console.print(_Neutralised(_Markdown(source, hard_breaks=False)), width=width, end="")
    return captured.get()


def _new_console(stream: TextIO) -> Console:
    return Console(file=stream, force_terminal=True, highlight=False, legacy_windows=False)


class Renderer:
    """Turns units of an answer into text with styles.

    Args:
        stream: The terminal; its type and ``NO_COLOR`` determine the styles.
    """

    def __init__(self, stream: TextIO) -> None:
        self._console = _new_console(stream)
        self._first = True
        self._in_code = False

    def render(self, unit: Unit, width: int) -> str:
        """Render the next unit of the answer with the blank line before it; ends with a newline.

        Args:
            unit: The unit.
            width: Most cells of a line; lines of code may be longer.
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
        """Whether a blank line separates the next unit; ``joined`` list items have none."""
        return not (self._first or self._in_code or joined)

    def restart(self) -> None:
        """Start a new text: no blank line before the next unit, no open block of code."""
        self._first = True
        self._in_code = False

    def skip(self, unit: Unit, *, gap: bool) -> None:
        """Skip the next unit of the answer, which the screen shows as plain text already.

        Args:
            unit: The unit.
            gap: Whether the following unit needs a blank line.
        """
        self._first = not gap
        if isinstance(unit, Fence):
            self._in_code = unit.opens

    def _block(self, block: Block, width: int) -> str:
        try:
            return self._printed(_Markdown(block.source), width)
        except Exception:  # arbitrary text may break a parser; plain text always works
            return neutralise(block.source) + "\n"

    def _printed(self, renderable: Markdown | Text, width: int | None) -> str:
        with self._console.capture() as captured:
            if width is None:  # the terminal wraps long lines, so that they are copied unchanged
                self._console.print(renderable, soft_wrap=True)
            else:
                self._console.print(_Neutralised(renderable), width=max(1, width), end="")
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
