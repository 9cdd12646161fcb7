"""Messages are wrapped between words."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from moechat.chat.commands import help_text
from moechat.cli.terminal.wrapping import wrap


@pytest.mark.parametrize("width", [20, 40, 80])
def test_the_help_of_the_chat_breaks_no_word(width: int) -> None:
    shown = wrap(help_text(), width)
    assert shown.split() == help_text().split()
    assert max(map(cell_len, shown.split("\n"))) <= width


def test_a_second_column_goes_on_below_itself_where_there_is_room() -> None:
    line = "/load FILE   go on with a conversation from a .json file"
    assert wrap(line, 40).split("\n") == [
        "/load FILE   go on with a conversation",
        "             from a .json file",
    ]
    assert wrap(line, 20).split("\n") == ["/load FILE   go on", "with a conversation", "from a .json file"]


def test_a_word_longer_than_the_line_is_left_to_the_terminal() -> None:
    path = "/home/someone/a/long/path"
    assert wrap(f"saved as {path} now", 12) == f"saved as\n{path}\nnow"


def test_a_label_counts_on_the_first_line() -> None:
    assert wrap("one two three", 12, first=7) == "one\ntwo three"


@given(st.text("ab 漢\n", max_size=60), st.integers(1, 30), st.integers(0, 9))
def test_only_white_space_changes_and_only_long_words_exceed_the_width(
    text: str, width: int, first: int
) -> None:
    shown = wrap(text, width, first=first)
    assert shown.split() == text.split()
    for number, line in enumerate(shown.split("\n")):
        taken = first if number == 0 else 0
        assert taken + cell_len(line.rstrip()) <= width or len(line.split()) <= 1
