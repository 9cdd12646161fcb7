"""The line that says what is awaited: when it comes, what it says, and that it is gone before the answer."""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from chat_support import OneModel, RecordedOutput, ScriptedEngine, ScriptedReader
from test_terminal import ScriptedChat

from moechat.chat.chat_options import ChatOptions
from moechat.chat.repl import Chat
from moechat.chat.terminal.output import PlainAnswer
from moechat.chat.terminal.waiting_line import WaitingLine


@pytest.fixture
def start(home: Path) -> Iterator[Callable[..., ScriptedChat]]:
    home.mkdir()
    started: list[ScriptedChat] = []

    def begin(*answers: str, **settings: Any) -> ScriptedChat:
        started.append(ScriptedChat(home, *answers, **settings))
        return started[-1]

    yield begin
    for one in started:
        one.close()


def test_a_long_prompt_shows_its_progress_and_erases_it(
    start: Callable[..., ScriptedChat],
) -> None:
    chat = start("the answer", prompt_s=4)
    chat.type("12345678\r", "reading 0 of 8 tokens, 1 s")
    chat.wait("reading 4 of 8 tokens, 2 s")
    chat.wait("the answer")
    chat.wait_prompt()
    assert "reading" not in chat.shown
    assert ">>> 12345678\nthe answer\n>>>" in chat.shown


def test_hidden_thinking_shows_a_notice(start: Callable[..., ScriptedChat]) -> None:
    chat = start("<think>" + "x" * 60 + "</think>yes", pause_s=0.03, options={"hide_thinking": True})
    chat.type("well?\r", "thinking, 1 s")
    chat.wait("yes")
    chat.wait_prompt()
    assert "thinking" not in chat.shown
    assert "xxx" not in chat.shown


def test_stopping_before_the_first_word_erases_the_line(
    start: Callable[..., ScriptedChat],
) -> None:
    chat = start("never", prompt_s=60)
    chat.type("well?\r", "reading 0 of 5 tokens")
    chat.type("\x03", "(stopped; the question is not kept)")
    chat.wait_prompt()
    assert "reading" not in chat.shown


@pytest.mark.parametrize(
    ("more", "prompt_s"),
    [({}, 0.2), ({"options": {"quiet": True}}, 1.5), ({"term": "dumb"}, 1.5)],
    ids=["quick", "quiet", "dumb"],
)
def test_quick_answers_and_quiet_chats_show_no_progress(
    start: Callable[..., ScriptedChat], more: dict[str, Any], prompt_s: float
) -> None:
    chat = start("the answer", prompt_s=prompt_s, **more)
    chat.type("well?\r", "the answer")
    chat.wait_prompt()
    assert "reading" not in chat.written
    assert "thinking" not in chat.written


def test_a_pipe_shows_no_progress(capsys: pytest.CaptureFixture[str]) -> None:
    engine = ScriptedEngine([["yes"]], prompt_s=0.8)
    reader = ScriptedReader(["well?"])
    assert Chat(OneModel(engine), ChatOptions(), RecordedOutput(), reader=reader).run() == 0
    assert capsys.readouterr().err == "\n"


def test_the_line_is_erased_before_the_first_character_and_hidden_for_others() -> None:
    stream = io.StringIO()
    waiting = WaitingLine(stream, shown=True, busy="thinking")
    sink = waiting.before(PlainAnswer(stream))
    waiting.start()
    waiting.progress(3, 9)

    def until(text: str, count: int) -> None:
        deadline = time.monotonic() + 10
        while stream.getvalue().count(text) < count and time.monotonic() < deadline:
            time.sleep(0.01)

    until("reading 3 of 9", 1)
    with waiting.hidden():
        stream.write("notice\n")
    until("reading 3 of 9", 2)
    sink.write("")
    sink.write("yes")
    time.sleep(0.4)
    sink.end()
    waiting.remove()
    written = stream.getvalue()
    assert "\r\x1b[Knotice\n\r\x1b[2mreading 3 of 9" in written
    assert written.endswith("\r\x1b[Kyes\n")
