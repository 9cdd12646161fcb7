"""``moechat help``: topics, pages and searches, in a pipe and on a terminal."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from cli_support import PROGRAM, Cli
from terminal_support import Terminal

from moechat.manual import page, topics


def test_topics_are_listed_with_a_line_each(cli: Cli) -> None:
    result = cli.call("help")
    assert result.status == 0
    lines = result.out.decode().splitlines()
    for topic in topics():
        assert any(line.split() == [topic.name, *topic.summary.split()] for line in lines), topic.name


def test_a_page_in_a_pipe_is_plain_markdown(cli: Cli) -> None:
    result = cli.call("help", "gpu")
    assert (result.status, result.out.decode(), result.err) == (0, page("gpu"), "")


def test_an_unknown_topic_is_a_usage_error_with_near_matches(cli: Cli) -> None:
    result = cli.call("help", "configuratoin")
    assert (result.status, result.out) == (2, b"")
    assert result.err == (
        "error: the manual has no topic 'configuratoin'\nhint: similar topics: configuration\n"
    )


def test_a_search_shows_topic_heading_and_line(cli: Cli) -> None:
    result = cli.call("help", "--search", "turing")
    assert result.status == 0
    assert "gpu: Requirements: - An NVIDIA GPU: Turing" in result.out.decode()
    within = cli.call("help", "chat", "--search", "turing")
    assert (within.status, within.out) == (0, b"")
    assert "does not contain 'turing'" in within.err
    assert cli.call("help", "--search", " ").status == 2


def test_topics_are_completed(cli: Cli) -> None:
    words = {"_MOECHAT_COMPLETE": "complete_bash", "COMP_WORDS": "moechat help me", "COMP_CWORD": "2"}
    done = subprocess.run(PROGRAM, env={**cli.environment, **words}, capture_output=True, text=True)
    assert done.stdout.split() == ["memory-and-plans"]


@pytest.mark.parametrize("arguments", [["help"], ["help", "chat"], ["help", "--search", "context"]])
def test_nothing_heavy_is_imported(cli: Cli, arguments: list[str]) -> None:
    script = (
        f"import sys\nfrom moechat.cli.main import main\nmain({arguments!r})\n"
        "heavy = ('torch', 'transformers', 'numpy', 'moechat.engine', 'rich', 'moechat._native')\n"
        "print([name for name in heavy if name in sys.modules], file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], env=cli.environment, cwd=cli.directory, capture_output=True, text=True
    )
    assert done.stderr.splitlines() == ["[]"]


def on_terminal(cli: Cli, *arguments: str, rows: int = 600, **variables: str) -> Terminal:
    environment = {**cli.environment, **variables}
    return Terminal(
        [*PROGRAM, "help", *arguments],
        cwd=cli.directory,
        environment=environment,
        rows=rows,
        columns=90,
        patience_s=60,
    )


def test_a_page_on_a_terminal_is_rendered(cli: Cli) -> None:
    terminal = on_terminal(cli, "gpu")
    assert terminal.end() == 0
    assert "\x1b[1" in terminal.written
    assert "# Running on a GPU" not in terminal.shown
    assert "Running on a GPU" in terminal.shown
    assert "NVIDIA GPU: Turing" in terminal.shown


def test_a_dumb_terminal_gets_plain_markdown(cli: Cli) -> None:
    terminal = Terminal(
        [*PROGRAM, "help", "gpu"],
        cwd=cli.directory,
        environment=cli.environment,
        term="dumb",
        rows=600,
        patience_s=60,
    )
    assert terminal.end() == 0
    assert "# Running on a GPU" in terminal.shown
    assert "\x1b[" not in terminal.written


def test_a_long_page_opens_in_the_pager(cli: Cli, tmp_path: Path) -> None:
    pager = tmp_path / "pager"
    pager.write_text('#!/bin/sh\ncat >"$0.text"; echo "paged $1 with $LESS"\n')
    pager.chmod(0o755)
    terminal = on_terminal(cli, "gpu", rows=20, PAGER=f"{pager} --flag")
    assert terminal.end() == 0
    assert "paged --flag with FRX" in terminal.shown
    text = (tmp_path / "pager.text").read_text(encoding="utf-8")
    assert "CUDA graphs" in text

    short = on_terminal(cli, "gpu", PAGER=str(pager))
    assert short.end() == 0
    assert "paged" not in short.shown


@pytest.mark.parametrize("pager", ["", "cat", "no-such-program-here"])
def test_without_a_pager_a_long_page_is_written_out(cli: Cli, pager: str) -> None:
    terminal = on_terminal(cli, "gpu", rows=20, PAGER=pager)
    assert terminal.end() == 0
    assert "Running on a GPU" in terminal.written
    assert "switches graphs off" in terminal.written


def test_settings_do_not_reach_the_search(cli: Cli, tmp_path: Path) -> None:
    own = replace(cli, home=tmp_path / "home", extra={"MOECHAT_SEARCH": "gpu"})
    assert own.call("help", "chat").out.decode() == page("chat")
    (own.home / "config").mkdir(parents=True)
    (own.home / "config" / "config.toml").write_text('ram = "2G"\n[run]\nseed = 1\n')
    assert own.call("help", "chat").status == 0
    assert os.environ.get("MOECHAT_SEARCH") is None
