"""The map of experts in the terminal."""

from __future__ import annotations

import re

import pexpect
from cli_support import Cli
from hypothesis import given
from hypothesis import strategies as st

from moechat.cli.terminal.map_of_experts import map_lines
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
    assert len(styles) == len(Place)


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


def test_map_in_a_chat_shows_the_experts_of_the_demo(cli: Cli) -> None:
    session = cli.terminal("run", "demo", "--no-save", forked=True)
    session.expect("for help")
    session.send("/map\r")
    session.expect("128 in memory")
    session.send("/bye\r")
    session.expect(pexpect.EOF)
