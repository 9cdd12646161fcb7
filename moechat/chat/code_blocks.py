"""The blocks of code in an answer, as markdown marks them."""

from __future__ import annotations


def last_code_block(text: str) -> str | None:
    """The text of the last fenced or indented block of code; ``None`` if there is none.

    A fence that the answer does not close, because it was cut off, ends with the answer.
    """
    from markdown_it import MarkdownIt

    blocks = [
        token.content
        for token in MarkdownIt("commonmark").parse(text)
        if token.type in ("fence", "code_block")
    ]
    return blocks[-1].removesuffix("\n") if blocks else None
