"""Transcripts of the real program: every shown text is checked, and a failed check is an error."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from places import ROOT, SCRIPTS
from stage import Stage, Transcript, parts_named


def transcripts(*arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPTS / "transcripts" / "record"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, env=env)


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(Transcript(), Path(sys.executable).parent, tmp_path / "work")


def test_every_documented_exit_status_is_shown_by_a_real_command(tmp_path: Path) -> None:
    done = transcripts("--only", "exits", "--out", str(tmp_path / "out"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "out").read_text() == done.stdout
    for status in (0, 1, 2, 3, 4, 5, 6, 7, 129, 130, 143):
        assert f"\n[status {status}, " in done.stdout
    assert str(ROOT) not in done.stdout
    assert f"{tempfile.gettempdir()}/mt-" not in done.stdout
    assert "$WORK/damaged/experts-00003.safetensors (1.5 MiB) is damaged" in done.stdout


def test_unexpected_program_output_is_an_error(tmp_path: Path) -> None:
    program = tmp_path / "moechat"
    program.write_text("#!/bin/sh\necho something else\n")
    program.chmod(0o755)
    done = transcripts("--only", "start", "--runs", "1", "--program", str(program))
    assert done.returncode == 1
    assert "!! DOES NOT HOLD: moechat show demo does not say 'qwen3_moe'" in done.stdout
    assert "things do not hold" in done.stderr


def test_steps_that_the_machine_does_not_allow_are_skipped_with_a_note() -> None:
    done = transcripts("--only", "disk", env={"PATH": "/nowhere"})
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped: unshare and nsenter (util-linux) are not here" in done.stdout
    assert done.stdout.endswith("; skipped: disk\n")


def test_an_unknown_part_is_refused() -> None:
    done = transcripts("--only", "pipes,exit")
    assert done.returncode == 2
    assert "'exit' is none of session, pipes, exits" in done.stderr
    assert parts_named("b,a", ["a", "b", "c"]) == ["a", "b"]


def test_a_wrong_status_or_a_missing_text_fails_the_check(
    stage: Stage, capsys: pytest.CaptureFixture[str]
) -> None:
    stage.command("echo out; echo err >&2; exit 3", "out", "err", status=3)
    assert stage.record.failures == []
    stage.command("echo out; exit 3", "other", status=2)
    assert [line.partition(": ")[2].rpartition(": ")[2] for line in stage.record.failures] == [
        "status 3 in place of 2",
        "does not say 'other'",
    ]
    shown = capsys.readouterr().out
    assert "$ echo out; echo err >&2; exit 3\nout\n2> err\n[status 3, " in shown
    assert shown.count("!! DOES NOT HOLD: ") == 2


def test_wrapped_paths_are_replaced_by_names(stage: Stage) -> None:
    home = str(stage.home)
    for text in (f"in {home}/x", f"in {home[:9]}\n{home[9:]}/x"):
        assert stage.record.masked(text) == "in ~/x"


def test_the_screen_of_a_terminal_is_shown_in_a_frame(
    stage: Stage, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    program = tmp_path / "greet"
    program.write_text("#!/bin/sh\nread name\nprintf '\\033[1mhello\\033[0m %s 漢\\n' $name\nread name\n")
    program.chmod(0o755)
    stage.program = tmp_path
    stage.columns, stage.rows = 40, 10
    with stage.terminal("greet") as terminal:
        terminal.type("you\r", "hello you")
        stage.seen(terminal, "you", "hello you", "goodbye")
        stage.left(terminal, "\r", "Enter")
    shown = capsys.readouterr().out.split("\n")
    assert "| " + "hello you 漢".ljust(39) + " |" in shown
    assert stage.record.failures == [": after you: 'goodbye' is not on the screen"]
