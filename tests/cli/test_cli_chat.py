"""The chat: its rules with a scripted engine, then a real session on a pseudo-terminal."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from cli_support import Cli

from moechat.cli import interactive
from moechat.cli.interactive import Chat
from moechat.cli.options import RunOptions
from moechat.cli.run import _answer_once
from moechat.engine import Stats, Step
from moechat.errors import MoechatError, PromptTooLongError, StoreDamagedError, UsageError

Messages = list[dict[str, str]]
PROMPT_TOKENS = r"prompt tokens(?:\x1b\[\d+m| )+(\d+)\r\n"


@dataclass
class ScriptedEngine:
    """Answers with what the test wrote down; a piece that is an exception is raised.

    Attributes:
        answers: The pieces of one answer after the other.
        room: Most characters of all messages together, with what is reserved for the answer.
        reserves: What every call reserved.
        asked: The messages of every call that was not refused.
    """

    answers: list[list[str | BaseException]]
    room: int = 10**9
    asked: list[Messages] = field(default_factory=list)
    name: str = "scripted"
    context_length: int = 100
    stats: Stats = field(default_factory=Stats)
    reserves: list[int] = field(default_factory=list)

    def generate(self, prompt: Messages, *, reserve: int = 1, **settings: Any) -> Iterator[Step]:
        size = sum(len(message["content"]) for message in prompt)
        self.reserves.append(reserve)
        if size + reserve > self.room:
            raise PromptTooLongError(f"{size} tokens; the context holds {self.room}")
        self.asked.append([dict(message) for message in prompt])
        return self._steps(self.answers.pop(0))

    def idle(self) -> None:
        return None

    @staticmethod
    def _steps(pieces: list[str | BaseException]) -> Iterator[Step]:
        for index, piece in enumerate(pieces):
            if isinstance(piece, BaseException):
                raise piece
            yield Step(piece, index, "length" if index == len(pieces) - 1 else None)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def talk(
    monkeypatch: pytest.MonkeyPatch, engine: ScriptedEngine, lines: list[str | BaseException], **options: Any
) -> int:
    """Run a chat in which the user types these lines, then Ctrl-D."""
    typed = iter([*lines, EOFError()])

    def read_line() -> str:
        line = next(typed)
        if isinstance(line, BaseException):
            raise line
        return line

    monkeypatch.setattr(interactive, "_read_line", read_line)
    monkeypatch.setattr(interactive, "_typed", lambda: "")
    chat = Chat(engine, RunOptions(model="scripted", **options))  # type: ignore[arg-type]
    status = chat.run()
    assert next(typed, None) is None, "the chat was left before all lines were read"
    return status


def test_every_turn_is_told_with_all_that_came_before(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = ScriptedEngine([["one ", "two"], ["three"]])
    assert talk(monkeypatch, engine, ["first", "", "   ", "second"], system_prompt="be brief") == 0
    system = {"role": "system", "content": "be brief"}
    assert engine.asked == [
        [system, user("first")],
        [system, user("first"), assistant("one two"), user("second")],
    ]
    assert capsys.readouterr().out == "one two\nthree\n"


def test_an_interrupted_answer_stays_in_the_conversation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = ScriptedEngine([["half ", KeyboardInterrupt()], ["more"]])
    talk(monkeypatch, engine, ["first", "second"])
    assert engine.asked[1] == [user("first"), assistant("half "), user("second")]
    captured = capsys.readouterr()
    assert captured.out == "half \nmore\n"
    assert "stopped; what was written is kept" in captured.err


def test_a_question_that_got_no_answer_is_forgotten(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = ScriptedEngine([[KeyboardInterrupt()], [UsageError("no such role")], ["answer"]])
    talk(monkeypatch, engine, ["first", "second", "third"])
    assert engine.asked[2] == [user("third")]
    err = capsys.readouterr().err
    assert "the question is not kept" in err
    assert "error: no such role" in err


def test_the_oldest_turns_make_room(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = ScriptedEngine([["a" * 10], ["b" * 10], ["c" * 10], ["d"]], room=75)
    talk(monkeypatch, engine, ["1" * 10, "2" * 10, "3" * 10, "4" * 10])
    assert engine.asked[2][0] == user("1" * 10)
    assert engine.asked[3] == [
        user("2" * 10),
        assistant("b" * 10),
        user("3" * 10),
        assistant("c" * 10),
        user("4" * 10),
    ]
    assert "the 2 oldest messages were left out: 100 tokens no longer hold" in capsys.readouterr().err
    assert engine.reserves == [1, 25, 25, 25, 25]


@pytest.mark.parametrize(
    ("context", "max_tokens", "reserve"),
    [(8192, None, 256), (8192, 40, 40), (400, None, 100), (400, 8000, 100), (400, 7, 7), (2, None, 1)],
)
def test_an_answer_has_room_before_old_turns_have(
    monkeypatch: pytest.MonkeyPatch, context: int, max_tokens: int | None, reserve: int
) -> None:
    engine = ScriptedEngine([["a"], ["b"]], context_length=context)
    talk(monkeypatch, engine, ["first", "second"], max_tokens=max_tokens)
    assert engine.reserves == [1, reserve]


def test_the_last_message_alone_may_fill_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = ScriptedEngine([["a"], ["b"]], room=50)
    talk(monkeypatch, engine, ["first", "x" * 49])
    assert engine.asked[1] == [user("x" * 49)]
    assert engine.reserves == [1, 25, 1]


def test_the_system_prompt_is_never_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = ScriptedEngine([["a" * 10], ["b"]], room=25)
    talk(monkeypatch, engine, ["1" * 10, "2" * 10], system_prompt="s" * 10)
    assert engine.asked[1] == [{"role": "system", "content": "s" * 10}, user("2" * 10)]


def test_a_message_that_is_too_long_by_itself_costs_no_history(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = ScriptedEngine([["answer"], ["again"]], room=50)
    talk(monkeypatch, engine, ["first", "x" * 51, "second"])
    assert engine.asked[1] == [user("first"), assistant("answer"), user("second")]
    assert "51" in capsys.readouterr().err


def test_commands_never_reach_the_model(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = ScriptedEngine([["a"], ["b"]])
    talk(monkeypatch, engine, ["first", "/help", " /nonsense first", "/", "/clear", "second"])
    assert engine.asked == [[user("first")], [user("second")]]
    captured = capsys.readouterr()
    assert captured.out == "a\nb\n"
    for said in ("/clear  forget", "no command /nonsense; it was not sent", "the conversation is forgotten"):
        assert said in captured.err


def test_bye_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AssertionError, match="left before"):
        talk(monkeypatch, ScriptedEngine([]), ["/bye"])


def test_two_interrupts_in_a_row_leave_and_one_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = ScriptedEngine([["a"]])
    stop = KeyboardInterrupt()
    with pytest.raises(AssertionError, match="left before"):
        talk(monkeypatch, engine, [stop, "first", stop, "/help", stop, stop, "never read"])
    assert engine.asked == [[user("first")]]


def test_a_disk_that_fails_in_the_middle_of_an_answer_leaves_the_chat_usable(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = ScriptedEngine([["half ", MoechatError("experts cannot be read", hint="try again")], ["more"]])
    assert talk(monkeypatch, engine, ["first", "second"]) == 0
    assert engine.asked[1] == [user("first"), assistant("half "), user("second")]
    captured = capsys.readouterr()
    assert captured.out == "half \nmore\n"
    assert "error: experts cannot be read\nhint: try again\n" in captured.err


def test_a_damaged_store_ends_the_chat(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StoreDamagedError):
        talk(monkeypatch, ScriptedEngine([[StoreDamagedError("gone")]]), ["first"])


def test_quiet_leaves_only_answers_and_errors(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    talk(monkeypatch, ScriptedEngine([["answer"]]), ["first"], quiet=True)
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("answer\n", "\n")


def test_an_interrupted_single_answer_is_still_one_json_object(capsys: pytest.CaptureFixture[str]) -> None:
    import json
    import signal

    handler = signal.getsignal(signal.SIGINT)
    engine = ScriptedEngine([["half ", KeyboardInterrupt()]])
    try:
        options = RunOptions(model="scripted", json=True)
        assert _answer_once(engine, "first", options) == 130  # type: ignore[arg-type]
    finally:
        signal.signal(signal.SIGINT, handler)
    told = json.loads(capsys.readouterr().out)
    assert told["text"] == "half "
    assert told["tokens"] == [0]
    assert told["finish_reason"] == "interrupted"


def test_a_session_on_a_terminal(cli: Cli, model: str) -> None:
    session = cli.terminal("run", model, "--temperature", "0", "--stats")
    session.expect("tiny-chat: /help for help, Ctrl-D to leave")
    session.expect(">>> ")

    session.sendline("hello")
    session.expect("hello\r\n")
    session.expect(".{4}")
    session.sendintr()
    session.expect(re.escape("(stopped; what was written is kept)"))
    session.expect(PROMPT_TOKENS)
    first = int(session.match.group(1))
    session.expect(">>> ")

    session.sendline("/nonsense")
    session.expect("there is no command /nonsense; it was not sent")
    session.expect(">>> ")

    session.sendline("and then?")
    session.expect(re.escape("and then?") + "\r\n.{4}")
    session.sendintr()
    session.expect(PROMPT_TOKENS)
    assert int(session.match.group(1)) > first + len("hello")
    session.expect(">>> ")

    session.send("half a li")
    session.expect("half a li")
    session.sendintr()
    session.expect(">>> ")
    session.sendintr()
    session.expect("Ctrl-C again or Ctrl-D leaves")
    session.expect(">>> ")
    session.sendintr()
    session.read()
    session.close()
    assert (session.exitstatus, session.signalstatus) == (0, None)


def test_the_end_of_input_leaves_and_answers_may_go_to_a_file(cli: Cli, model: str) -> None:
    command = f"run '{model}' --temperature 0 --max-tokens 5 -q"
    session = cli.terminal_shell(f"exec $M {command} >answers")
    session.expect(">>> ")  # on stderr: stdout is the file
    session.sendline("hello")
    session.expect(">>> ")
    session.sendeof()
    session.read()
    session.close()
    assert session.exitstatus == 0
    written = (cli.directory / "answers").read_text()
    assert written.endswith("\n")
    assert ">>>" not in written


def test_an_interrupt_while_loading_ends_the_program(cli: Cli, model: str) -> None:
    session = cli.terminal("run", model)
    session.expect("loading")
    session.sendintr()
    session.read()
    session.close()
    assert session.exitstatus == 130
