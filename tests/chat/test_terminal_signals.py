"""A chat on a pseudo-terminal that is stopped, hung up, or pasted into while it answers."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
import termios
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from places import SUPPORT
from terminal_support import Terminal
from test_terminal import PATIENCE_S, ScriptedChat, questions

from moechat.history.session_database import Sessions, sessions_path


class InShell(ScriptedChat):
    """The same as a job of a shell, which has the terminal while the chat is stopped."""

    def __init__(self, home: Path, *answers: str, columns: int = 70, rows: int = 24, **settings: Any) -> None:
        environment = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
        Terminal.__init__(
            self,
            ["bash", "--norc", "--noprofile", "-i"],
            cwd=home.parent,
            environment={
                **environment,
                "MOECHAT_HOME": str(home),
                "LC_ALL": "C.UTF-8",
                "PS1": "shell$ ",
                "HISTFILE": "",
            },
            columns=columns,
            rows=rows,
            patience_s=PATIENCE_S,
        )
        self.wait("shell$")
        script = SUPPORT / "scripted_chat.py"
        described = json.dumps({"answers": [list(answer) for answer in answers], **settings})
        command = home.parent / "command"
        command.write_text("exec " + shlex.join([sys.executable, str(script), described]))
        self.type("clear; sh ./command\r")
        self.until(lambda: any(line.startswith(">>>") for line in self.shown.split("\n")))


@pytest.fixture
def start(home: Path) -> Iterator[Callable[..., ScriptedChat]]:
    home.mkdir()
    started: list[ScriptedChat] = []

    def begin(*answers: str, kind: type[ScriptedChat] = ScriptedChat, **settings: Any) -> ScriptedChat:
        started.append(kind(home, *answers, **settings))
        return started[-1]

    yield begin
    for one in started:
        one.close()


def paste(chat: ScriptedChat, text: str) -> None:
    """What a terminal sends when text is pasted: marks around it only while the program wants them."""
    marked = chat.written.rfind("\x1b[?2004h") > chat.written.rfind("\x1b[?2004l")
    chat.child.send(f"\x1b[200~{text}\x1b[201~" if marked else text)


def test_lines_pasted_during_an_answer_are_one_message(start: Callable[..., ScriptedChat]) -> None:
    chat = start("word " * 20, "second", "third", pause_s=0.01, save=True)
    chat.type("go on\r", "word word")
    paste(chat, "d\re\rf")
    chat.wait("... f")
    chat.type("\r", "second")
    chat.wait_prompt()
    assert chat.leave() == 0
    assert questions() == ["go on", "d\ne\nf"]
    assert chat.written.rstrip().endswith("\x1b[?2004l")


@pytest.mark.parametrize("during", ["the prompt", "an answer"])
def test_closing_the_window_saves_the_chat(start: Callable[..., ScriptedChat], during: str) -> None:
    chat = start("first", "word " * 200, pause_s=0.02, save=True)
    chat.say("one", "first")
    if during == "an answer":
        chat.type("two\r", "word word")
    chat.child.kill(signal.SIGHUP)
    chat.until(lambda: not chat.child.isalive())
    assert (chat.child.exitstatus, chat.child.signalstatus) == (129, None)
    with Sessions(sessions_path()) as sessions:
        turns = sessions.get(1).turns
    assert [turn.mark for turn in turns] == ["", "stopped"][: 1 + (during == "an answer")]
    assert turns[-1].answer.startswith("first" if during == "the prompt" else "word word")


def test_a_chat_that_loses_its_terminal_saves_its_answer(start: Callable[..., ScriptedChat]) -> None:
    chat = start("word " * 200, pause_s=0.02, save=True)
    chat.type("one\r", "word word")
    process = chat.child.ptyproc
    process.fileobj.close()  # as when the connection of ssh is gone: the system sends SIGHUP
    process.closed = chat.child.closed = True
    _, status = os.waitpid(chat.child.pid, 0)
    process.terminated = True
    assert os.waitstatus_to_exitcode(status) == 129
    with Sessions(sessions_path()) as sessions:
        assert sessions.get(1).turns[0].answer.startswith("word word")


def test_a_chat_resumed_during_an_answer_controls_the_keys_again(
    start: Callable[..., ScriptedChat],
) -> None:
    answer = "alpha beta " + "word " * 60 + "*omega*\n\nthe *last* one"
    chat = start(answer, "second", kind=InShell, pause_s=0.02, save=True, rows=40)
    chat.type("go\r", "alpha beta word word")
    chat.type("\x1a", "Stopped")
    chat.wait("shell$")
    chat.type("fg\r")
    chat.until(lambda: chat.shown.count("word") > 25)
    paste(chat, "mean\rwhile")
    chat.wait("the last one")
    chat.wait("... while")
    assert chat.shown.count("mean") == 1
    assert chat.shown.count("alpha") == 1
    assert "*omega*" in chat.shown  # of a block that could not be erased
    chat.type("\r", "second")
    chat.wait_prompt()
    chat.type("\x04", "shell$ ")
    assert questions() == ["go", "mean\nwhile"]


def test_a_chat_resumed_at_its_prompt_leaves_the_terminal_to_the_editor(
    start: Callable[..., ScriptedChat],
) -> None:
    chat = start("one", kind=InShell)
    chat.type("half", ">>> half")
    chat.type("\x1a", "Stopped")
    chat.wait("shell$")
    chat.type("fg\r")
    chat.wait_prompt()
    assert not termios.tcgetattr(chat.child.child_fd)[3] & termios.ISIG
    chat.type("\r", "one")


def test_a_chat_stopped_by_sigstop_at_its_prompt_keeps_the_editors_keys(
    start: Callable[..., Terminal],
) -> None:
    chat = start("one")
    chat.type("half", ">>> half")
    chat.child.kill(signal.SIGSTOP)
    chat.child.kill(signal.SIGCONT)
    chat.type(" a line", ">>> half a line")
    assert not termios.tcgetattr(chat.child.child_fd)[3] & termios.ISIG
    chat.type("\x03")
    chat.wait_prompt()
    chat.say("whole", "one")
