"""The chat as the program runs it, with a real model on a pseudo-terminal; and single answers."""

from __future__ import annotations

import json
import re
import signal
import sys
from pathlib import Path

import pytest
from cli_support import Cli

sys.path.insert(0, str(Path(__file__).parents[1] / "chat"))

from chat_support import ScriptedEngine

from moechat.chat.conversation import Conversation
from moechat.chat.recorder import Recorder
from moechat.cli.options import RunOptions
from moechat.cli.run import _answer_once
from moechat.cli.voice import LoadedModels
from moechat.errors import ModelNotFoundError, MoechatError

# The editor has given the terminal back, and the model has written something.
ANSWER_BEGUN = re.escape("\x1b[?2004l") + ".{60}"
PROMPT_TOKENS = r"prompt tokens(?:\x1b\[\d+m| )+(\d+)\r\n"


def test_an_interrupted_single_answer_is_still_one_json_object(capsys: pytest.CaptureFixture[str]) -> None:
    handler = signal.getsignal(signal.SIGINT)
    engine = ScriptedEngine([["half ", KeyboardInterrupt()]])
    try:
        options = RunOptions(model="scripted", json=True)
        recorder = Recorder(None, lambda text, hint: None)
        assert _answer_once(engine, "first", options, Conversation(), recorder) == 130  # type: ignore[arg-type]
    finally:
        signal.signal(signal.SIGINT, handler)
    told = json.loads(capsys.readouterr().out)
    assert told["text"] == "half "
    assert told["tokens"] == [10]
    assert told["finish_reason"] == "interrupted"


def test_a_session_on_a_terminal(cli: Cli, model: str) -> None:
    session = cli.terminal("run", model, "--temperature", "0", "--stats")
    session.timeout = 20
    session.expect("loading")
    session.send("typed while it loads")
    session.expect("tiny-chat: /help for help, Ctrl-D to leave")
    session.expect("typed while it loads")

    session.send("\r")
    session.expect(ANSWER_BEGUN)
    session.sendintr()
    session.expect(re.escape("(stopped; what was written is kept)"))
    session.expect(PROMPT_TOKENS)
    first = int(session.match.group(1))
    session.expect("of 8,192 tokens")

    session.send("/nonsense\r")
    session.expect("there is no command /nonsense; it was not sent")
    session.expect("of 8,192 tokens")

    session.send("and then?\r")
    session.expect(ANSWER_BEGUN)
    session.sendintr()
    session.expect(PROMPT_TOKENS)
    assert int(session.match.group(1)) > first + len("hello")
    session.expect("of 8,192 tokens")

    session.send("/model ./nowhere\r")
    session.expect("nowhere")
    session.expect("of 8,192 tokens")
    session.send(f"/model {model}\r")
    session.expect("tiny-chat goes on with this conversation")
    session.expect("of 8,192 tokens")
    session.sendintr()
    session.expect("Ctrl-C again or Ctrl-D leaves")
    session.expect(">>> ")
    session.sendintr()
    session.read()
    session.close()
    assert (session.exitstatus, session.signalstatus) == (0, None)

    listed = json.loads(cli.call("sessions", "--json").out)
    assert [(row["title"], row["turns"]) for row in listed] == [("typed while it loads", 2)]


def test_a_single_answer_may_go_on_with_a_conversation(cli: Cli, model: str) -> None:
    own = Cli(cli.directory, cli.home, {})
    before = json.loads(own.call("sessions", "--json", "--limit", "0").out)
    options = ("--temperature", "0", "--max-tokens", "3")
    assert own.call("run", model, "alone", *options).status == 0
    assert json.loads(own.call("sessions", "--json", "--limit", "0").out) == before
    result = own.call("run", model, "hello", "-c", "--no-save", *options)
    assert result.status == 0, result.err
    result = own.call("run", model, "and more", "-c", *options)
    assert result.status == 0, result.err
    after = json.loads(own.call("sessions", "--json").out)
    assert "goes on" in result.err or "no conversation is kept yet" in result.err
    assert after[0]["turns"] == (before[0]["turns"] if before else 0) + 1
    assert own.call("run", model, "x", "--session", "99999", *options).status == 2


def test_the_end_of_input_leaves_and_answers_may_go_to_a_file(cli: Cli, model: str) -> None:
    command = f"run '{model}' --temperature 0 --max-tokens 5 -q"
    session = cli.terminal_shell(f"exec $M {command} >answers")
    session.expect(">>> ")  # on stderr: stdout is the file
    session.send("hello\r")
    session.expect(r"[1-9]\d* of 8,192 tokens")
    session.send("\x04")
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


@pytest.mark.parametrize("failure", [MoechatError("no room"), KeyboardInterrupt()])
def test_a_model_that_cannot_be_loaded_leaves_the_one_before(failure: BaseException, tmp_path: Path) -> None:
    engines = [ScriptedEngine([], name="first"), failure, ScriptedEngine([], name="first again")]
    loaded: list[str] = []

    def load(name: str) -> ScriptedEngine:
        loaded.append(name)
        found = engines.pop(0)
        if isinstance(found, BaseException):
            raise found
        return found  # type: ignore[return-value]

    with LoadedModels(load, "mine") as models:  # type: ignore[arg-type]
        with pytest.raises(type(failure)):
            models.use("demo")
        assert models.engine.name == "first again"
        with pytest.raises(ModelNotFoundError):
            models.use(str(tmp_path / "nowhere"))
        assert models.engine.name == "first again"
    assert loaded == ["mine", "demo", "mine"]


def test_the_end_of_an_answer_of_the_demo_is_not_shown(cli: Cli) -> None:
    result = cli.call("run", "demo", "Who are you?", "--temperature", "0")
    assert result.status == 0, result.err
    assert b"<|" not in result.out
