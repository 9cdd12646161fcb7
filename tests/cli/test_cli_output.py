"""What is written: the answer, its control characters, progress, statistics."""

from __future__ import annotations

import io
import re
import time
import unicodedata
import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moechat.chat.terminal.output import PlainAnswer
from moechat.cli import main
from moechat.cli.terminal import consoles as terminal
from moechat.cli.terminal import load_progress as progress_module
from moechat.cli.terminal.answer_stats import print_stats
from moechat.cli.terminal.consoles import neutralise
from moechat.cli.terminal.load_progress import LoadProgress, format_bytes, format_seconds
from moechat.engine import Progress, Stats
from moechat.errors import MoechatError, MoechatWarning


class Screen(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@given(st.text(st.characters(max_codepoint=0x2FF)))
def test_no_control_character_but_newline_and_tab_survives(text: str) -> None:
    shown = neutralise(text)
    assert len(shown) == len(text)
    for before, after in zip(text, shown, strict=True):
        control = unicodedata.category(before) == "Cc" and before not in "\n\t"
        assert (after != before) == control
        assert unicodedata.category(after) != "Cc" or after in "\n\t"


def test_an_escape_sequence_becomes_readable() -> None:
    assert neutralise("\x1b[31mred\x1b[0m\r\x9b2J\x7f\t\n") == "␛[31mred␛[0m␍\ufffd2J␡\t\n"


def test_an_answer_is_escaped_on_a_terminal_and_unchanged_in_a_pipe() -> None:
    for stream, shown in ((Screen(), "a␛b\n"), (io.StringIO(), "a\x1bb\n")):
        answer = PlainAnswer(stream)
        answer.write("a\x1b")
        answer.write("")
        answer.write("b")
        answer.end()
        assert stream.getvalue() == shown


@pytest.mark.parametrize(
    ("pieces", "shown"),
    [([], ""), (["", ""], ""), (["a"], "a\n"), (["a\n"], "a\n"), (["a\n\n", ""], "a\n\n")],
)
def test_an_answer_without_a_final_newline_gets_one(pieces: list[str], shown: str) -> None:
    stream = io.StringIO()
    answer = PlainAnswer(stream)
    for piece in pieces:
        answer.write(piece)
    answer.end()
    answer.end()
    assert stream.getvalue() == shown


def test_a_full_disk_is_reported_with_its_reason() -> None:
    full = open("/dev/full", "w")  # noqa: SIM115 - closing it would fail as well
    with pytest.raises(MoechatError, match="No space left on device"):
        PlainAnswer(full).write("text")
    with pytest.raises(OSError, match="No space left"):
        full.close()


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (2**37, "128 GiB"),
        (2**42, "4.0 TiB"),
    ],
)
def test_bytes_are_formatted_with_units(count: int, text: str) -> None:
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 ms"),
        (0.85, "850 ms"),
        (4.24, "4.2 s"),
        (60, "1:00 min"),
        (185, "3:05 min"),
        (3723, "1:02:03 h"),
    ],
)
def test_seconds_are_formatted_with_units(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


class Clock:
    """Stands in for the clock of the progress display."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(progress_module, "time", clock)
    return clock


@pytest.fixture(autouse=True)
def fresh_console() -> None:
    terminal.console.cache_clear()


GIB = 2**30


def convert(show: LoadProgress, clock: Clock, seconds: int) -> None:
    for second in range(seconds + 1):
        show(Progress("convert", second * GIB, seconds * GIB, f"layer {second}"))
        clock.now += 1


def test_without_a_terminal_progress_is_an_occasional_line(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    with LoadProgress() as show:
        convert(show, clock, 40)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "converting, 3.0 GiB of 40.0 GiB, 37.0 s left, layer 3"
    assert [line.rpartition(" ")[2] for line in lines[:-1]] == ["3", "13", "23", "33"]
    assert lines[-1] == "converted in 41.0 s, and kept for the next time"


def test_quick_steps_show_no_progress(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with LoadProgress() as show:
        for stage in ("verify", "load"):
            show(Progress(stage, 0, 10**6, ""))
            clock.now += 1
            show(Progress(stage, 10**6, 10**6, ""))
    assert capsys.readouterr().err == ""


def test_quiet_shows_no_progress(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with LoadProgress(quiet=True) as show:
        convert(show, clock, 40)
    assert capsys.readouterr().err == ""


def test_a_failed_conversion_is_not_reported_as_done(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    show = LoadProgress()
    show.__enter__()
    show(Progress("convert", 0, GIB, ""))
    show.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert capsys.readouterr().err == ""


def test_an_unfinished_download_is_not_reported_as_done(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    with LoadProgress() as show:
        for stage, share in (("download", 1), ("verify", 1), ("download", 1), ("download", 2)):
            show(Progress(stage, share * GIB, 2 * GIB, ""))
            clock.now += 1
    assert capsys.readouterr().err == ""  # whoever downloads says so when all is here


def test_a_terminal_shows_a_progress_bar_and_erases_it(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen()
    monkeypatch.setattr("sys.stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    with LoadProgress() as show:
        show(Progress("convert", GIB, 4 * GIB, "layer 1"))
        show(Progress("convert", 4 * GIB, 4 * GIB, "layer 4"))
        time.sleep(0.3)  # the bar is drawn ten times a second
        show(Progress("load", 0, None, "dense weights"))
    shown = screen.getvalue()
    assert "\x1b[2K" in shown
    assert "4.0 GiB of 4.0 GiB" in re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown)
    assert "converted in" in shown


def test_the_bar_leaves_room_for_the_echo_of_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen()
    monkeypatch.setattr("sys.stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "60")
    with LoadProgress() as show:
        show(Progress("verify", GIB, 4 * GIB, "model-00001-of-00005.safetensors"))
        time.sleep(0.3)
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", screen.getvalue())
    lines = [line for line in re.split(r"[\r\n]", shown) if line.strip()]
    assert max(map(len, lines)) == 57


def test_names_in_progress_cannot_send_control_sequences(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    evil = "\x1b]0;title\x07\x9b2J\r\nLICENSE\t[red]"
    shown = "␛]0;title␇\ufffd2J␍␊LICENSE␉[red]"
    with LoadProgress() as show:
        show(Progress("verify", 0, 2 * GIB, evil))
        clock.now += 5
        show(Progress("verify", GIB, 2 * GIB, evil))
    assert capsys.readouterr().err.endswith(f", {shown}\n")

    terminal.console.cache_clear()
    screen = Screen()
    monkeypatch.setattr("sys.stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    with LoadProgress() as show:
        show(Progress("verify", GIB, 2 * GIB, evil))
        time.sleep(0.3)  # the bar is drawn ten times a second
    assert shown in screen.getvalue()
    assert "\x1b]0;" not in screen.getvalue()
    assert "\x07" not in screen.getvalue()
    assert "\x9b" not in screen.getvalue()


def test_a_dumb_terminal_gets_no_bar(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen()
    monkeypatch.setattr("sys.stderr", screen)
    monkeypatch.setenv("TERM", "dumb")
    with LoadProgress() as show:
        convert(show, clock, 10)
    assert "converting, 3.0 GiB of 10.0 GiB" in screen.getvalue()
    assert "\x1b" not in screen.getvalue()
    assert "\r" not in screen.getvalue()


def test_the_table_shows_known_and_unknown_statistics(capsys: pytest.CaptureFixture[str]) -> None:
    statistics = Stats(
        load_s=1.5, output_tokens=1234567, tpot_s=0.02, expert_bytes=3 * GIB, seed=1234567
    ).to_json() | {"something_new": 7}
    print_stats(statistics)
    shown = capsys.readouterr().err
    for text in ("1.5 s", "1,234,567", "20 ms", "3.0 GiB", "  1234567", "something new", "50.00"):
        assert text in shown


def test_the_table_shows_cache_and_disk_only_for_paged_experts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_stats(Stats(output_tokens=3).to_json())
    mapped = capsys.readouterr().err
    assert "missed" not in mapped
    assert "transfers" not in mapped
    print_stats(
        Stats(
            hits_full=6,
            hits_prefetched=1,
            hits_top=1,
            misses=2,
            demand_bytes=GIB,
            shared_bytes=GIB // 2,
            stall_s=0.5,
            link_busy_s=1.0,
            busy_s=4.0,
            pages=100,
            pages_peak=50,
            page_bytes=GIB // 100,
            budget_bytes=2 * GIB,
        ).to_json()
    )
    lines = dict(line.rsplit("  ", 1) for line in capsys.readouterr().err.splitlines())
    shown = {title.strip(): value.strip() for title, value in lines.items()}
    expected = {
        "experts found in memory": "60.0 %",
        "prefetched": "10.0 %",
        "found in part": "10.0 %",
        "missed": "20.0 %",
        "fetched on demand": "1.0 GiB",
        "computed by the CPU for the GPU": "512 MiB",
        "waiting for experts": "500 ms",
        "time with transfers": "25.0 %",
        "memory for experts, peak": "512 MiB",
        "memory budget": "2.0 GiB",
    }
    assert {title: shown[title] for title in expected} == expected


def test_our_warnings_look_like_messages_and_others_like_pythons(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    others: list[str] = []
    monkeypatch.setattr(main, "_show_python_warning", lambda message, *_, **__: others.append(str(message)))
    monkeypatch.setattr(warnings, "showwarning", main._show_warning)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("the GPU is small\x1b[2J", MoechatWarning, stacklevel=1)
        assert capsys.readouterr().err.startswith("warning: the GPU is small")
        warnings.warn("of a library", UserWarning, stacklevel=1)
        assert (others, capsys.readouterr().err) == (["of a library"], "")
