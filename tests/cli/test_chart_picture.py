"""The picture in the terminal: lines and bars that fit, with the characters and colors that it can show."""

from __future__ import annotations

import re

import pytest

from moechat.cli.terminal.chart_picture import Look, draw_picture, share_title
from moechat.simulate.plot import Chart, Point

MEBI = 1 << 20
PLAIN, RICH = Look(80, False, False), Look(80, True, True)
LETTERS = {"auto": "a", "static": "b"}


def chart(shares: tuple[float, ...] = (0.125, 0.25, 0.5), floor: float | None = 1.0) -> Chart:
    lines = {
        "auto": tuple(Point(share * 64 * MEBI, 8 - 10 * share) for share in shares),
        "static": tuple(Point(share * 64 * MEBI, 9.0) for share in shares),
    }
    return Chart("demo", lines, 64 * MEBI, floor)


def bare(lines: list[str]) -> list[str]:
    return [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in lines]


def test_without_unicode_lines_are_letters_and_all_is_ascii() -> None:
    lines = draw_picture(chart(), LETTERS, PLAIN)
    assert all(line.isascii() and len(line) <= 80 for line in lines)
    flat = next(line for line in lines if "b" * 40 in line)
    assert float(flat.partition("|")[0]) == pytest.approx(9, rel=0.08)
    rows = [number for number, line in enumerate(lines) if re.search("a+", line.partition("|")[2])]
    assert rows == list(range(rows[0], rows[-1] + 1))  # the line has no gap
    floor = next(line for line in lines if ". . ." in line)
    assert float(floor.partition("|")[0]) == pytest.approx(1, rel=0.08)
    assert "1/8: 8.0 MiB" in lines[-1]
    assert "1/2: 32.0 MiB" in lines[-1]


@pytest.mark.parametrize("width", [40, 80, 100])
def test_on_a_terminal_lines_are_dots_in_colors_with_letters_at_what_was_tried(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # the library looks at standard output, which is no terminal here
    lines = draw_picture(chart(), LETTERS, Look(width, True, True))
    text = bare(lines)
    assert max(map(len, text)) <= width
    assert "\x1b[38;5;" in "".join(lines)
    body = "".join(line.partition("|")[2] for line in text)
    assert body.count("a") == body.count("b") == 3
    assert any(0x2800 < ord(letter) < 0x2900 for letter in body)
    assert "\x1b" not in "".join(draw_picture(chart(), LETTERS, Look(width, True, False)))


def test_one_share_has_bars_in_order_of_their_times() -> None:
    lines = draw_picture(chart((0.5,)), LETTERS, PLAIN)
    assert [line.split()[-2] for line in lines[1:]] == ["1.00", "3.00", "9.00"]
    lengths = [line.count("#") for line in lines]
    assert lengths[3] > 2.5 * lengths[2] > 2.5 * lengths[1] > 0
    assert max(map(len, lines)) <= 80
    assert "█" in "".join(draw_picture(chart((0.5,)), LETTERS, RICH))


def test_equal_times_are_drawn_without_a_floor() -> None:
    same = Chart("demo", {"auto": (Point(MEBI, 5.0), Point(2 * MEBI, 5.0))}, 8 * MEBI)
    assert any("aaaa" in line for line in draw_picture(same, LETTERS, PLAIN))


def test_shares_are_shown_as_people_write_them() -> None:
    assert [share_title(share) for share in (1.0, 0.125, 0.3, 1 / 3, 0.75, 0.137)] == [
        "all", "1/8", "3/10", "1/3", "3/4", "0.137",
    ]  # fmt: skip
