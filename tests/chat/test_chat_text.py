"""What a model writes: made harmless, rendered while it streams."""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterator
from pathlib import Path

import pyte
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from moechat.chat.terminal.live_answer import MarkdownAnswer, Rows, cells
from moechat.chat.terminal.markdown_blocks import Block, BlockSplitter, CodeLine, Unit
from moechat.safe_text import encodable, neutralise, one_line

ANSWER = """\
# Fox & hound

Hello **world**, a rather long paragraph with `code` in it, that is folded.
A second line of it.

1. one
2. two with **bold**
   - nested

   ```sh
   ls
   ```
3. three

| name | n |
|------|---|
| fox  | 1 |

```python
def f(x):
    '''doc'''

    return x  # 漢字
```
> quoted &#27;[31m 漢字 👩 <b>html</b>

[link](http://x.y) ***
Setext
======
- - deep

~~~
open to the end"""
MARKUP = st.lists(
    st.sampled_from(
        [*"ab *_`#>-+|1.)(][!<&;=~\n\n\n\t\\", "漢", "👍", "```\n", "- ", "1. ", "\n\n", "> ", "    "]
    ),
    max_size=60,
).map("".join)


class Screen(io.StringIO):
    """A terminal that shows what was written to it."""

    def __init__(self, columns: int, rows: int) -> None:
        super().__init__()
        self.columns, self.rows = columns, rows
        self._screen = pyte.Screen(columns, rows)
        self._stream = pyte.Stream(self._screen)

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self._stream.feed(text.replace("\n", "\r\n"))
        return super().write(text)

    def resize(self, columns: int) -> None:
        self.columns = columns
        self._screen.resize(self.rows, columns)

    @property
    def shown(self) -> str:
        return "\n".join(line.rstrip() for line in self._screen.display).rstrip()

    @property
    def answer(self) -> MarkdownAnswer:
        return MarkdownAnswer(self, size=lambda: (self.columns, self.rows))


def shown(pieces: list[str], columns: int = 60, rows: int = 100) -> str:
    screen = Screen(columns, rows)
    answer = screen.answer
    for piece in pieces:
        answer.write(piece)
    answer.end()
    return screen.shown


def cut(text: str, places: list[int]) -> list[str]:
    marks = sorted({min(place, len(text)) for place in places} | {0, len(text)})
    return [text[start:end] for start, end in itertools.pairwise(marks)]


@given(st.text())
def test_only_newline_and_tab_remain_of_control_characters(text: str) -> None:
    for made, allowed in ((neutralise(text), "\n\t"), (one_line(text), "")):
        assert len(made) == len(text)
        for character in made:
            code = ord(character)
            assert character in allowed or not (code < 0x20 or 0x7F <= code < 0xA0)
    assert one_line("a\u2028b\nc") == "a␊b␊c"


def test_direction_overrides_are_replaced() -> None:
    turned = "a\u202ecod.exe\u202c \u2066x\u2069 \u202ab"
    assert neutralise(turned) == one_line(turned) == "a�cod.exe� �x� �b"
    assert neutralise("\u200fא") == "\u200fא"
    assert one_line("a\u200fb\u061c\u200e") == "a�b��"
    screen = Screen(60, 10)
    answer = screen.answer
    answer.write("safe \u202etext\n\n`\u202ecode`")
    answer.end()
    assert "\u202e" not in screen.getvalue()


@given(st.text(st.characters(codec=None)))
def test_invalid_utf8_can_still_be_written(text: str) -> None:
    encodable(text).encode("utf-8")


@pytest.mark.parametrize(
    "sequence", ["\x1b]0;title\x07", "\x1b[2J", "\x9b31m", "\x1bPq\x1b\\", "\x1b[31mred"]
)
@pytest.mark.parametrize(
    "around", ["{}", "# {}", "- {}", "```{}\nx", "```\n{}\n```", "| {} |\n|-|\n", "`{}`"]
)
def test_sequences_in_an_answer_never_reach_the_terminal(sequence: str, around: str) -> None:
    screen = Screen(60, 30)
    answer = screen.answer
    answer.write(around.format(sequence) + "\n\n&#27;[2J&#x9b;1m")
    answer.end()
    written = screen.getvalue()
    assert sequence not in written
    for broken in ("\x07", "\x1b]", "\x1bP", "\x9b", "\x1b[2J"):
        assert broken not in written


def units(text: str) -> list[Unit]:
    splitter = BlockSplitter()
    *lines, rest = text.split("\n")
    return [unit for line in lines for unit in splitter.line(line)] + splitter.end(rest)


def test_blocks_are_finished_as_soon_as_they_are_final() -> None:
    splitter = BlockSplitter()

    def steps(text: str) -> Iterator[list[Unit]]:
        return (splitter.line(line) for line in text.split("\n"))

    assert list(steps("# a\nb\nc\n")) == [[Block("# a")], [], [], [Block("b\nc")]]
    assert list(steps("- a\n- b\n\nc\n")) == [
        [],
        [Block("- a")],
        [],
        [Block("- b", joined=True)],
        [Block("c")],
    ]
    assert [len(found) for found in steps("```py\nx\n\n```")] == [1, 1, 1, 1]
    assert splitter.pending == []


def test_an_endless_table_is_split_before_it_becomes_slow() -> None:
    found = units("| a | b |\n|---|---|\n" + "| 1 | 2 |\n" * 1000)
    assert 2 <= len(found) <= 4
    assert sum(len(unit.source.split("\n")) for unit in found if isinstance(unit, Block)) == 1002


@given(MARKUP)
@settings(max_examples=60, deadline=None)
def test_every_line_is_in_exactly_one_block_and_in_order(text: str) -> None:
    lines = []
    for unit in units(text):
        if isinstance(unit, Block):
            lines.extend(unit.source.split("\n"))
        else:
            lines.append(unit.text if isinstance(unit, CodeLine) else unit.line)
    kept = [line.strip() for line in lines if line.strip()]
    assert kept == [line.strip() for line in text.split("\n") if line.strip()]


@pytest.mark.parametrize("columns", [60, 20, 7])
def test_the_rendered_answer_does_not_depend_on_how_it_was_streamed(columns: int) -> None:
    whole = shown([ANSWER], columns)
    assert shown(list(ANSWER), columns) == whole
    for size in (2, 3, 7, 50):
        pieces = [ANSWER[start : start + size] for start in range(0, len(ANSWER), size)]
        assert shown(pieces, columns) == whole


@given(MARKUP, st.lists(st.integers(0, 80)), st.sampled_from([(60, 100), (9, 100), (20, 6)]))
@settings(max_examples=80, deadline=None)
def test_any_text_split_anywhere_is_rendered_the_same(
    text: str, places: list[int], size: tuple[int, int]
) -> None:
    assert shown(cut(text, places), *size) == shown([text], *size)


def test_a_finished_answer_is_rendered() -> None:
    page = shown([ANSWER])
    for line in ("Fox & hound", " 2 two with bold", "    • nested", " fox   1", "    return x  # 漢字"):
        assert line in page.split("\n"), page
    assert "<b>html</b>" in page
    assert "link (http://x.y)" in page
    assert "**bold**" not in page


def test_only_the_unfinished_block_is_redrawn() -> None:
    screen = Screen(60, 30)
    answer = screen.answer
    answer.write("finished *one*\n\n")
    before = len(screen.getvalue())
    for piece in ("next ", "paragraph ", "of *words*"):
        answer.write(piece)
    assert screen.getvalue()[before:] == "\nnext paragraph of *words*"
    answer.end()
    assert screen.shown == "finished one\n\nnext paragraph of words"


def test_a_narrower_window_leaves_unfinished_text_unchanged() -> None:
    screen = Screen(60, 30)
    answer = screen.answer
    answer.write("the *first*\n\na paragraph with **stars** that is long enough")
    screen.resize(30)
    answer.write(" here\n\nthe *last*")
    answer.end()
    lines = screen.shown.split("\n")
    assert lines[0] == "the first"
    assert lines[2] == "a paragraph with **stars** tha"  # this terminal cuts lines off
    assert lines[-1] == "the last"


def test_a_narrower_window_that_still_fits_the_text_wraps_what_follows() -> None:
    screen = Screen(60, 30)
    answer = screen.answer
    answer.write("short")
    screen.resize(20)
    words = " ".join(f"w{n}" for n in range(20))
    answer.write(f" {words}")
    assert all(len(line) < 20 for line in screen.shown.split("\n"))
    answer.write("\n\nthe *last*")
    answer.end()
    assert screen.shown.replace("\n", " ").split() == ["short", *words.split(), "the", "last"]


def test_a_wider_window_changes_nothing() -> None:
    screen = Screen(30, 30)
    answer = screen.answer
    answer.write("a paragraph with **stars** that is")
    screen.resize(60)
    answer.write(" long\n\nthe *last*")
    answer.end()
    assert screen.shown == "a paragraph with stars that is long\n\nthe last"


def test_a_block_taller_than_the_window_stays_plain_and_whole() -> None:
    words = " ".join(f"w{n}" for n in range(60))
    page = shown([f"**a** {words}\n\nthe *last*"], 20, 10)
    assert page.split("\n")[-1] == "the last"
    assert "w59" in page


@given(st.text(st.sampled_from([*"abc  \n", "漢", "👍"]), max_size=60), st.integers(4, 20))
@example(" a漢漢", 4)  # the word that is moved and the next character are more than a row
def test_rows_never_exceed_the_width_and_are_all_counted(text: str, width: int) -> None:
    screen = Screen(width + 1, 90)
    rows = Rows(width)
    for char in text:
        screen.write(rows.add(char))
    assert all(cells(line) <= width for line in screen.shown.split("\n"))
    screen.write(rows.erase())
    assert screen.shown == ""
    assert screen._screen.cursor.y == 0


def test_names_of_commands_settings_and_models_are_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from prompt_toolkit.completion import CompleteEvent
    from prompt_toolkit.document import Document

    from moechat.chat.terminal.editor import _ChatCompleter

    monkeypatch.setenv("MOECHAT_HOME", str(tmp_path))
    store = tmp_path / "data" / "models" / "org--little-4bit"
    store.mkdir(parents=True)
    (store / "manifest.json").write_text(
        '{"source": {"name": "org/little", "revision": "0123456789abcdef"}, "model_type": "olmoe", '
        '"geometry": {"bits": 4}, "files": {}}'
    )

    def completed(text: str) -> list[str]:
        return [found.text for found in _ChatCompleter().get_completions(Document(text), CompleteEvent())]

    assert completed("/re") == ["regen", "read ", "rename "]
    assert completed("/set tem") == ["temperature "]
    assert completed("/model ") == ["demo", "org/little@0123456789ab"]
    assert completed("/model org") == ["org/little@0123456789ab"]
    assert completed("//model ") == completed("model ") == []
