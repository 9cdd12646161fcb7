"""A conversation as a page: whatever its texts hold, they stay where they belong."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from moechat.history.conversation import Conversation, Turn
from moechat.history.nested_markdown import embed_markdown
from moechat.history.transcript import write_as

MARKUP = st.lists(
    st.sampled_from(
        [
            *"ab *_`#>-=+|1.)~<\n\n\n\t\\", "```\n", "```py\n", "~~~\n", "# ", "## Assistant\n", "- ", "> ",
            "    ", "<!--", "-->", "<pre>", "<script", "\n---\n", "\n===\n", "  ", "[a]: b\n", "\r\n",
        ]
    ),
    max_size=30,
).map("".join)  # fmt: skip


def headings(page: str) -> list[str]:
    """Headings of the first two levels, as a reader of the page sees them."""
    tokens = MarkdownIt().parse(page)
    return [
        following.content
        for token, following in itertools.pairwise(tokens)
        if token.type == "heading_open" and token.level == 0 and token.tag in ("h1", "h2")
    ]


def page_of(*texts: str) -> str:
    talked = Conversation(system="be kind", title="A title")
    for question, answer in zip(texts[::2], texts[1::2], strict=True):
        talked.add(Turn(question, answer, thinking="## hm\n```", mark="stopped", model="demo"))
    return write_as(talked, "md")


@pytest.mark.parametrize(
    "text",
    [
        "Here:\n\n```python\nimport os",
        "~~~~\ncode\n~~~",
        "## Assistant\n\nI agree",
        "# Conversation",
        "Assistant\n---------",
        "Assistant\n===",
        "<!-- never ended",
        "<pre>\n## User",
        "<script>\n\n## User",
        "- a list\n  ```py\n  open in it",
        "> a quote\n> ```\n> open in it",
        "1. a\n\n   ## in a list",
        "```\n\t```\n",
        "~~~\n    ~~~",
    ],
)
def test_a_text_cannot_hide_or_forge_turns(text: str) -> None:
    expected = ["A title", "System", "User", "Assistant", "User", "Assistant"]
    assert headings(page_of(text, text, "second", text)) == expected


@given(MARKUP, MARKUP)
def test_any_texts_keep_the_turns_of_the_conversation(question: str, answer: str) -> None:
    expected = ["A title", "System", "User", "Assistant", "User", "Assistant"]
    assert headings(page_of(question, answer, "second", answer)) == expected


@pytest.mark.parametrize(
    "text",
    ["plain\n\n- a\n- b", "```python\n# a comment\n## User\n```", "a\n\n---\n\nb", "| a |\n|---|\n| 1 |"],
)
def test_harmless_text_is_unchanged(text: str) -> None:
    assert embed_markdown(text) == text


def test_headings_of_an_answer_are_below_those_of_the_page() -> None:
    assert embed_markdown("# A\n\n##### B") == "### A\n\n###### B"


def test_an_endlessly_repeated_text_is_still_written() -> None:
    assert embed_markdown("a\n" + "---\n" * 3000).count("\\---") == 3000
