"""Where a prompt comes from: argument, stdin, or both."""

from __future__ import annotations

import io
import os
import threading
import time
from pathlib import Path

import pytest

from moechat.cli.commands.prompt_input import read_prompt
from moechat.errors import UsageError


class Stdin:
    """A stdin for :func:`read_prompt`: some bytes in a file, a pipe or a pretended terminal."""

    def __init__(self, stream: io.BufferedReader, terminal: bool = False) -> None:
        self.buffer = stream
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal


@pytest.fixture
def give(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):  # type: ignore[no-untyped-def]
    def give(data: bytes, *, terminal: bool = False) -> None:
        path = tmp_path / "stdin"
        path.write_bytes(data)
        monkeypatch.setattr("sys.stdin", Stdin(path.open("rb"), terminal))

    return give


@pytest.mark.parametrize(
    ("argument", "data", "prompt"),
    [
        ("question", b"", "question"),
        ("question", b"text\n", "text\n\nquestion"),
        ("question", b"text", "text\n\nquestion"),
        ("question", b"\n", "question"),
        (None, b"text\n", "text"),
        (None, b"two\nlines\n\n", "two\nlines\n"),
        (None, b"dos\r\n", "dos"),
        (None, b"\xef\xbb\xbfmarked\n", "marked"),
        (None, "日本\n".encode(), "日本"),
        ("-", b"text\n", "text"),
        (" question ", b"", " question "),
        ("  ", b"text\n", "text"),
        ("question", b" \t\n\n", "question"),
    ],
)
def test_a_prompt_is_stdin_a_blank_line_and_the_argument(give, argument, data, prompt) -> None:  # type: ignore[no-untyped-def]
    give(data)
    assert read_prompt(argument) == prompt


def test_stdin_on_a_terminal_is_read_only_with_a_dash(give) -> None:  # type: ignore[no-untyped-def]
    for argument, prompt in ((None, None), ("question", "question"), ("-", "typed")):
        give(b"typed\n", terminal=True)
        assert read_prompt(argument) == prompt


@pytest.mark.parametrize(
    ("argument", "data"),
    [
        (None, b""),
        (None, b"\n"),
        ("-", b""),
        ("", b""),
        ("  ", b""),
        ("\n\t", b" \n"),
        (None, b" \r\n \n"),
        ("\u3000", b""),
    ],
)
def test_an_empty_prompt_is_a_usage_error(give, argument, data) -> None:  # type: ignore[no-untyped-def]
    give(data)
    with pytest.raises(UsageError, match="the prompt is empty"):
        read_prompt(argument)


def test_the_error_for_invalid_utf8_names_its_position(give) -> None:  # type: ignore[no-untyped-def]
    give("naïve".encode("latin-1"))
    with pytest.raises(UsageError, match="byte 0xef at offset 2"):
        read_prompt(None)


def test_an_endless_stdin_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with open("/dev/zero", "rb") as zeros:
        monkeypatch.setattr("sys.stdin", Stdin(zeros))
        with pytest.raises(UsageError, match="more than 64 MiB"):
            read_prompt(None)


@pytest.mark.parametrize("quiet", [False, True])
def test_waiting_for_a_silent_pipe_is_explained(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], quiet: bool
) -> None:
    reading, writing = os.pipe()

    def write_late() -> None:
        time.sleep(2.5)
        os.write(writing, b"late")
        os.close(writing)

    writer = threading.Thread(target=write_late)
    with os.fdopen(reading, "rb") as stream:
        monkeypatch.setattr("sys.stdin", Stdin(stream))
        writer.start()
        assert read_prompt(None, quiet=quiet) == "late"
        writer.join()
    assert ("waiting for stdin" in capfd.readouterr().err) == (not quiet)
