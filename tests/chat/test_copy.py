"""``/copy``: programs of the desktop, the terminal, and neither."""

from __future__ import annotations

import base64
import io
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from chat_support import ScriptedEngine, talk
from hypothesis import given
from hypothesis import strategies as st

from moechat.chat.code_blocks import last_code_block
from moechat.chat.terminal.clipboard import MOST_OSC_BYTES, Copied, copy_to_clipboard
from moechat.errors import MoechatError

CODE = 'Here:\n\n```python\nprint(1)\n```\n\nand\n\n```sh\nls -l\necho "a"\n```\nDone.'


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A place for programs, with no others in the path and no desktop; returns it."""
    programs = tmp_path / "bin"
    programs.mkdir()
    monkeypatch.setenv("PATH", str(programs))
    monkeypatch.setenv("TERM", "xterm")
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "SSH_TTY", "SSH_CONNECTION", "TMUX", "WSL_DISTRO_NAME"):
        monkeypatch.delenv(name, raising=False)
    return programs


def program(directory: Path, name: str, status: int = 0) -> Path:
    """A program that keeps its arguments and input; returns where."""
    kept = directory / f"{name}.kept"
    path = directory / name
    path.write_text(f'#!/bin/sh\nprintf "%s|" "$@" > {kept}\n/bin/cat >> {kept}\nexit {status}\n')
    path.chmod(0o755)
    return kept


def asked(stream: Terminal) -> str | None:
    """The text that the terminal was asked to copy."""
    found = re.search("\x1b]52;c;([A-Za-z0-9+/=]*)\x07", stream.getvalue())
    return None if found is None else base64.b64decode(found[1]).decode()


def test_a_program_of_the_desktop_takes_the_text(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", terminal := Terminal())
    monkeypatch.setenv("DISPLAY", ":0")
    monkeypatch.setenv("WAYLAND_DISPLAY", "wayland-0")
    x11 = program(bare, "xclip")
    assert copy_to_clipboard("grüße\n") == Copied("xclip", terminal=True)
    assert x11.read_text() == "-selection|clipboard|grüße\n"
    assert asked(terminal) == "grüße\n"
    x11.unlink()
    program(bare, "xclip", status=1)
    wayland = program(bare, "wl-copy")
    assert copy_to_clipboard("b").program == "wl-copy"
    assert wayland.read_text().endswith("|b")


def test_over_ssh_only_the_terminal_is_asked(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", terminal := Terminal())
    monkeypatch.setenv("DISPLAY", "localhost:10.0")
    monkeypatch.setenv("SSH_TTY", "/dev/pts/1")
    kept = program(bare, "xclip")
    assert copy_to_clipboard("a") == Copied("", terminal=True)
    assert asked(terminal) == "a"
    assert not kept.exists()


def test_tmux_passes_the_text_on(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setenv("TMUX", "/tmp/tmux-1/default,1,0")
    kept = program(bare, "tmux")
    assert copy_to_clipboard("a").program == "tmux"
    assert kept.read_text() == "load-buffer|-w|-|a"


@pytest.mark.parametrize("term", ["dumb", "linux", ""])
def test_without_a_program_and_a_capable_terminal_it_fails(
    term: str, bare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", terminal := Terminal())
    monkeypatch.setenv("TERM", term)
    with pytest.raises(MoechatError, match="this terminal has none") as error:
        copy_to_clipboard("a")
    assert "/save FILE" in str(error.value.hint)
    assert terminal.getvalue() == ""


def test_a_text_that_is_too_long_for_a_terminal_is_not_cut(
    bare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", terminal := Terminal())
    longest = "a" * (MOST_OSC_BYTES // 4 * 3)
    assert copy_to_clipboard(longest) == Copied("", terminal=True)
    assert asked(terminal) == longest
    with pytest.raises(MoechatError, match="75,001 characters are too many for a terminal"):
        copy_to_clipboard(longest + "a")


def test_the_chat_copies_the_last_answer_or_its_code(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    engine = ScriptedEngine([["no code"], [CODE]])
    output = talk(engine, ["/copy", "one", "/copy code", "/copy", "two", "/copy code", "/copy all"], raw=True)
    assert [message for message, _ in output.errors] == [
        "there is no answer to copy yet",
        "the last answer has no block of code",
        "/copy all: it takes nothing, or code",
    ]
    assert asked(terminal) == "no code"
    texts = [base64.b64decode(one).decode() for one in re.findall("52;c;([^\x07]*)\x07", terminal.getvalue())]
    assert texts == ["no code", 'ls -l\necho "a"']
    assert output.notices[-1] == (
        "sent to the terminal's clipboard: 14 characters in 2 lines; some terminals ignore that"
    )


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (CODE, 'ls -l\necho "a"'),
        ("none `inline` here", None),
        ("~~~\na\n```\nb\n~~~", "a\n```\nb"),
        ("````md\n```\nx\n```\n````", "```\nx\n```"),
        ("```python\ncut off", "cut off"),
        ("1. item\n\n   ```\n   inside\n   ```", "inside"),
        ("text\n\n    indented\n", "indented"),
        ("```\n\n```", ""),
    ],
)
def test_the_last_block_of_code_is_found_as_markdown_marks_it(text: str, code: str | None) -> None:
    assert last_code_block(text) == code


@given(st.lists(st.text(st.characters(codec="ascii", exclude_characters="`~\r\x00")), min_size=1, max_size=4))
def test_code_in_fences_comes_back(blocks: list[str]) -> None:
    text = "\n\n".join(f"words\n\n````\n{block}\n````" for block in blocks)
    found: Any = last_code_block(text)
    assert found.splitlines() == blocks[-1].splitlines()
