"""The map of experts in the terminal."""

from __future__ import annotations

import re
import shlex

import pexpect
import pyte
import pytest
from cli_support import TERMINAL, Cli
from hypothesis import given
from hypothesis import strategies as st

from moechat.cli.terminal.map_of_experts import live_lines, map_lines
from moechat.offload.expert_map import ExpertMap, Place

MAP = ExpertMap((3, 12), ("mmp.", "w.cm"), ("9000", "0000"), 5)


def test_the_characters_cover_every_place() -> None:
    lines = [line.plain for line in map_lines(MAP, 80, colored=False)]
    assert lines == [
        " 3 ##+.",
        "12 >.c#",
        "# 3 in memory   + 1 partly in memory   > 1 on its way   c 1 computed by the CPU",
        ". 2 not in memory",
    ]


def test_colors_differ_for_every_place() -> None:
    rows = map_lines(MAP, 80, colored=True)[:2]
    assert [row.plain for row in rows] == [" 3 ████", "12 ████"]
    styles = {str(span.style) for row in rows for span in row.spans}
    assert len(styles - {"dim"}) == len(Place)


def test_experts_that_share_a_character_have_the_place_of_most() -> None:
    found = ExpertMap((0,), ("mmm...p..wwm..mpp.",), (), 0)
    lines = [line.plain for line in map_lines(found, 10, colored=False)]
    # Three each; of several places that are as frequent, the first of the legend.
    assert lines[0] == "0 #..>.+"
    assert lines[-1] == "a character is 3 experts"


@given(
    layers=st.integers(1, 5),
    experts=st.integers(1, 600),
    width=st.integers(28, 200),
    colored=st.booleans(),
    data=st.data(),
)
def test_no_line_is_wider_than_the_terminal(
    layers: int, experts: int, width: int, colored: bool, data: st.DataObject
) -> None:
    row = st.text(st.sampled_from("mpwc."), min_size=experts, max_size=experts)
    places = tuple(data.draw(row) for _ in range(layers))
    found = ExpertMap(tuple(range(layers)), places, (), 0)
    lines = [line.plain for line in map_lines(found, width, colored=colored)]
    assert max(map(len, lines)) <= width
    counts = {
        title: int(n.replace(",", ""))
        for n, title in re.findall(r"([\d,]+) ([a-zA-Z ]+?)(?:   |\n|$)", "\n".join(lines[layers:]))
    }
    counts.pop("experts", None)
    assert sum(counts.values()) == layers * experts


@given(
    layers=st.integers(1, 100),
    experts=st.integers(1, 300),
    columns=st.integers(4, 200),
    rows=st.integers(0, 60),
    data=st.data(),
)
def test_a_live_map_fits_any_window(
    layers: int, experts: int, columns: int, rows: int, data: st.DataObject
) -> None:
    kinds = [data.draw(st.sampled_from("mpwc.")) for _ in range(3)]
    places = tuple((kinds[n % 3] * experts) for n in range(layers))
    found = ExpertMap(tuple(range(layers)), places, (), 0)
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in live_lines(found, columns, rows)]
    assert (lines == []) == (rows < 3)
    assert len(lines) <= max(0, rows)
    assert all(len(line) <= columns for line in lines)


def test_layers_that_share_a_line_have_the_place_of_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moechat.cli.terminal.map_of_experts._has_colors", lambda: False)
    found = ExpertMap(tuple(range(6)), ("mm..", "mmm.", "....", "..p.", "pppp", "pp.."), (), 0)
    assert live_lines(found, 80, 5)[0] == "0 ###."  # of as many, the first of the legend
    assert live_lines(found, 80, 5)[-1] == "a line is 2 layers"
    assert len(live_lines(found, 80, 7)) == 7


def test_map_in_a_chat_shows_the_experts_of_the_demo(cli: Cli) -> None:
    session = cli.terminal("run", "demo", "--no-save", forked=True)
    session.expect("for help")
    session.send("/map\r")
    session.expect("128 in memory")
    session.send("/bye\r")
    session.expect(pexpect.EOF)


STORY = ("run", "demo", "Tell me a story about a fox.", "--max-tokens", "40", "--temperature", "0")


def screen_of(session: pexpect.spawn[str]) -> list[str]:
    """All rows that a program leaves on its terminal."""
    session.expect(pexpect.EOF)
    columns, rows = TERMINAL["dimensions"][1], 100
    screen = pyte.Screen(columns, rows)
    pyte.Stream(screen).feed(session.before)
    return [row.rstrip() for row in screen.display]


@pytest.mark.slow
def test_watch_leaves_the_answer_and_the_last_map_below_it(cli: Cli) -> None:
    without = cli.run(*STORY)
    rows = screen_of(cli.terminal(*STORY, "--watch", "--raw", forked=True))
    text = " ".join(" ".join(rows).split())
    assert " ".join(without.out.decode().split()) in text
    assert text.index("128 in memory") > text.index("Once upon a time")
    assert [row for row in rows if row][-1] == "(cut off after 40 tokens)"


@pytest.mark.slow
def test_watch_leaves_a_pipe_the_text_alone_and_draws_on_the_terminal(cli: Cli) -> None:
    without = cli.run(*STORY)
    session = cli.terminal_shell(f"$M {shlex.join(STORY)} --watch > text.txt")
    rows = screen_of(session)
    assert (cli.directory / "text.txt").read_bytes() == without.out
    assert "128 in memory" in "\n".join(rows)
    assert "Once upon" not in "\n".join(rows)


def test_watch_without_a_terminal_is_an_error_before_anything_is_loaded(cli: Cli) -> None:
    result = cli.run(*STORY, "--watch")
    assert (result.status, result.out) == (2, b"")
    assert "--watch draws on the terminal of stderr" in result.err
    for other in (("--quiet",), ("--remote", "http://127.0.0.1:9/v1")):
        result = cli.run(*STORY, "--watch", *other)
        assert result.status == 2
        assert "--watch" in result.err
    result = cli.run("run", "demo", "--watch", "--jsonl", "prompts.jsonl")
    assert result.status == 2
    assert "--watch" in result.err
