"""Embeds untrusted markdown in a document without affecting the rest of it."""

from __future__ import annotations

import re

# The document uses two levels of headings.
_LEVELS_BELOW = 2
_LOWEST_LEVEL = 6
# HTML that ends only at its own end mark, or with the document: comments, scripts and similar.
_OPEN_ENDED = re.compile(r"( {0,3})<(?=[!?]|(?:script|pre|style|textarea)\b)", re.IGNORECASE)
_HEADING = re.compile(r"( {0,3})(#{1,6})(?=\s|$)")
_UNDERLINE = re.compile(r"\s*(=+|-+)\s*")
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")


def embed_markdown(text: str) -> str:
    """Change markdown so that it neither affects following text nor looks like part of the document.

    Lowers headings by two levels, escapes underlined headings and open-ended HTML, and closes an open fence.
    """
    from markdown_it import MarkdownIt

    parser = MarkdownIt()
    parser.core.ruler.enableOnly(["normalize", "block"])
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    # Escaping HTML or an underline changes the meaning of the lines after it, so parse until nothing is left
    # to escape.
    while True:
        tokens = [token for token in parser.parse("\n".join(lines)) if token.level == 0 and token.map]
        escaped = False
        for token in tokens:
            start, end = token.map or (0, 0)
            if token.type == "html_block" and _OPEN_ENDED.match(lines[start]):
                lines[start] = _OPEN_ENDED.sub(r"\1\\<", lines[start], count=1)
                escaped = True
            elif token.type == "heading_open" and not token.markup.startswith("#"):
                place = end - 1
                while True:  # consecutive underlines at once
                    lines[place] = "\\" + lines[place].lstrip()
                    place += 1
                    if place == len(lines) or not _UNDERLINE.fullmatch(lines[place]):
                        break
                escaped = True
        if not escaped:
            break
    for token in tokens:
        if token.type == "heading_open" and token.map:
            lines[token.map[0]] = _HEADING.sub(_lower, lines[token.map[0]], count=1)
    if tokens and tokens[-1].type == "fence" and (closing := _closing(lines, tokens[-1].map or [0, 0])):
        lines.append(closing)
    return "\n".join(lines)


def _lower(found: re.Match[str]) -> str:
    return found[1] + "#" * min(_LOWEST_LEVEL, len(found[2]) + _LEVELS_BELOW)


def _closing(lines: list[str], place: list[int]) -> str:
    """The line that closes a fence, which spans the lines ``[place[0], place[1])``; empty if it is closed."""
    opened = _FENCE.match(lines[place[0]])
    if opened is None:
        return ""
    mark, last = opened[1], lines[place[1] - 1]
    # What is indented by four columns, or a tab, is code and closes nothing.
    closes = re.fullmatch(rf" {{0,3}}{mark[0]}{{{len(mark)},}}[ \t]*", last)
    return "" if closes and place[1] - 1 > place[0] else mark
