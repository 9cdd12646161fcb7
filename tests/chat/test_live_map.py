"""The map below an answer while it is written: on screens, on a pseudo-terminal, and what it costs."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

import pyte
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_terminal import ScriptedChat

from moechat.chat.terminal.live_answer import MarkdownAnswer, wrapping
from moechat.chat.terminal.live_map import LiveMap
from moechat.chat.terminal.output import PlainAnswer, Sink, Thoughts
from moechat.steps import Step

MAP = ["map 0 ####", "map 1 ####", "map 2 ####"]
TEXT = st.text(st.sampled_from("abc  \n\n-*`#|1."), max_size=40)


class Screen(io.StringIO):
    """A terminal whose rows are kept when they leave the window."""

    def __init__(self, columns: int, rows: int) -> None:
        super().__init__()
        self.screen = pyte.HistoryScreen(columns, rows, history=100_000)
        self._stream = pyte.Stream(self.screen)
        self.sent = ""

    def write(self, text: str) -> int:
        self.sent += text
        self._stream.feed(text.replace("\n", "\r\n"))  # as a terminal driver writes it
        return len(text)

    def isatty(self) -> bool:
        return True

    @property
    def everything(self) -> list[str]:
        """All rows, those that have left the window too, without blank ones at the end."""
        gone = [
            "".join(row[column].data for column in range(self.screen.columns))
            for row in self.screen.history.top
        ]
        rows = [row.rstrip() for row in [*gone, *self.screen.display]]
        while rows and not rows[-1]:
            rows.pop()
        return rows


def shown(
    screen: Screen, live: LiveMap | None, sink: Callable[[TextIO], Sink], pieces: Sequence[str]
) -> list[str]:
    """All rows after an answer of these pieces."""
    stream: TextIO = screen if live is None else live.over(screen)
    made = sink(stream)
    for piece in pieces:
        if live is not None:
            live.refresh()
        made.write(piece)
    made.end()
    if live is not None:
        live.end()
    return screen.everything


def live_on(screen: Screen, draw: Callable[[int, int], Sequence[str]], keep: bool = False) -> LiveMap:
    ticks = iter(range(1_000_000))  # each map is looked at twice, and takes no time
    size = (screen.screen.columns, screen.screen.lines)
    return LiveMap(screen, draw, keep=keep, size=lambda: size, clock=lambda: 10.0 * (1 + next(ticks) // 2))


@given(
    pieces=st.lists(TEXT, max_size=12),
    columns=st.integers(12, 40),
    rows=st.integers(9, 20),
    kind=st.sampled_from(["markdown", "plain", "thoughts"]),
    changes=st.booleans(),
)
@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
def test_an_answer_above_a_map_leaves_the_text_that_it_leaves_without_one(
    pieces: list[str], columns: int, rows: int, kind: str, changes: bool
) -> None:
    count = 0

    def draw(width: int, most: int) -> list[str]:
        nonlocal count
        count += changes
        return [f"{line}{count}"[:width] for line in MAP[:most]]

    lines = min(len(MAP), (rows - 1) // 2 - 1)

    def size() -> tuple[int, int]:
        return columns, rows - lines - 1

    def sink(stream: TextIO) -> Sink:
        if kind == "markdown":
            return MarkdownAnswer(stream, size)
        if kind == "thoughts":
            return Thoughts(stream, dim=True, wrap=wrapping(size))
        return PlainAnswer(stream, wrapping(size))

    without = shown(Screen(columns, rows), None, sink, pieces)
    screen = Screen(columns, rows)
    assert shown(screen, live_on(screen, draw), sink, pieces) == without


def test_the_map_is_below_the_text_and_the_last_one_stays_if_wanted() -> None:
    screen = Screen(20, 12)
    live = live_on(screen, lambda columns, most: MAP, keep=True)
    answer = PlainAnswer(live.over(screen), wrapping(live.size))
    answer.write("one")
    live.refresh()
    assert [row.rstrip() for row in screen.screen.display][:5] == ["one", "", *MAP]
    assert (screen.screen.cursor.y, screen.screen.cursor.x) == (0, 3)
    answer.write(" two\nthree four five six seven")
    assert [row.rstrip() for row in screen.screen.display][:7] == [
        *("one two", "three four five six", "seven"),
        *("", *MAP),
    ]
    answer.end()
    live.end()
    live.end()
    assert screen.everything == ["one two", "three four five six", "seven", "", *MAP]
    assert screen.screen.cursor.x == 0
    live.refresh()
    assert screen.everything[-1] == MAP[-1]


def test_only_changed_lines_are_written() -> None:
    screen = Screen(20, 12)
    lines = list(MAP)
    live = live_on(screen, lambda columns, most: lines)
    live.refresh()
    before = len(screen.sent)
    live.refresh()
    assert screen.sent[before:] == ""
    lines[1] = "changed"
    live.refresh()
    assert "changed" in screen.sent[before:]
    assert MAP[0] not in screen.sent[before:]
    assert [row.rstrip() for row in screen.screen.display][2:5] == [MAP[0], "changed", MAP[2]]


@pytest.mark.parametrize(("cost", "most"), [(0.0, 8), (0.001, 8), (0.01, 2), (0.1, 1)])
def test_maps_are_drawn_at_most_eight_times_a_second_and_for_a_fiftieth_of_the_time(
    cost: float, most: int
) -> None:
    now, drawn = 0.0, 0

    def draw(columns: int, rows: int) -> list[str]:
        nonlocal now, drawn
        now += cost
        drawn += 1
        return MAP

    live = LiveMap(Screen(20, 12), draw, keep=False, size=lambda: (20, 12), clock=lambda: now)
    for _ in range(10_000):
        now += 0.001
        live.refresh()
    assert 0 < drawn <= most * now + 1
    assert drawn * cost <= now / 40


def test_text_within_a_row_is_written_as_it_is() -> None:
    screen = Screen(40, 12)
    live = live_on(screen, lambda columns, most: MAP)
    live.refresh()
    before = len(screen.sent)
    live.over(screen).write("a word, \x1b[2mdim\x1b[0m")
    assert screen.sent[before:] == "a word, \x1b[2mdim\x1b[0m"


def test_a_low_window_has_no_map_and_text_takes_all_of_it() -> None:
    screen = Screen(20, 7)
    live = live_on(screen, lambda columns, most: MAP)
    live.refresh()
    assert screen.sent.replace("\x1b[J", "") == ""
    assert live.size() == (20, 7)


def test_another_terminal_or_a_pipe_is_left_alone(tmp_path: Path) -> None:
    live = live_on(Screen(20, 12), lambda columns, most: MAP)
    with open(tmp_path / "file", "w") as file:
        assert live.over(file) is file
    assert live.over(pipe := io.StringIO()) is pipe


def test_steps_are_closed_and_the_map_follows_each() -> None:
    closed, drawn = [], []

    def draw(_columns: int, _most: int) -> list[str]:
        drawn.append(1)
        return MAP

    live = live_on(Screen(20, 12), draw)

    def steps() -> Iterator[Step]:
        try:
            for token in range(5):
                yield Step("x", token)
        finally:
            closed.append(True)

    following = live.following(steps())
    assert [next(following).token_id for _ in range(3)] == [0, 1, 2]
    following.close()
    assert closed == [True]
    assert len(drawn) == 2


# ---- in a chat on a pseudo-terminal


@pytest.fixture
def chat(home: Path) -> Iterator[Callable[..., ScriptedChat]]:
    home.mkdir()
    started: list[ScriptedChat] = []

    def start(*answers: str, **options: Any) -> ScriptedChat:
        started.append(ScriptedChat(home, *answers, **options))
        return started[-1]

    yield start
    for one in started:
        one.close()


@pytest.mark.slow
def test_watch_shows_the_map_during_answers_and_leaves_no_trace(chat: Callable[..., ScriptedChat]) -> None:
    answer = "first words\n\n" + "- an item of a list\n" * 8 + "\nthe end"
    talk = chat(answer, answer, answer, pause_s=0.01, layers=4)
    talk.say("before", "the end")
    plain = talk.shown
    assert "partly in memory" not in talk.written
    talk.enter("/watch")
    assert "below each answer" in talk.shown
    talk.enter("with", whole=False)
    talk.wait("partly in memory")
    assert "0 " in talk.shown
    talk.until(lambda: talk.shown.count("the end") >= 1 and talk.last_line.startswith(">>>"))
    talk.wait_prompt()
    assert "partly in memory" not in talk.shown
    assert "• an item of a list" in plain
    assert talk.shown.count("• an item of a list") >= 8
    talk.enter("/watch off")
    place = len(talk.written)
    talk.say("again", "the end")
    assert "partly in memory" not in talk.written[place:]
    assert talk.leave() == 0


@pytest.mark.slow
def test_ctrl_c_removes_the_map_and_keeps_what_was_written(chat: Callable[..., ScriptedChat]) -> None:
    talk = chat("word " * 400, pause_s=0.01, layers=4, options={"watch": True})
    talk.enter("go on", whole=False)
    talk.wait("partly in memory")
    talk.wait("word word")
    talk.type("\x03")
    talk.wait("what was written is kept")
    talk.wait_prompt()
    assert "partly in memory" not in talk.shown
    assert "word word" in talk.shown
    assert talk.leave() == 0


def test_a_terminal_that_cannot_move_its_cursor_shows_no_live_map(chat: Callable[..., ScriptedChat]) -> None:
    talk = chat("first", layers=4, term="dumb")
    talk.type("/watch\r")
    talk.wait("can move its cursor")


def test_a_model_on_another_server_has_no_map(chat: Callable[..., ScriptedChat]) -> None:
    talk = chat("x")
    talk.enter("/watch")
    assert "another server" in talk.shown
    talk.enter("/watch maybe")
    assert "neither on nor off" in talk.shown
