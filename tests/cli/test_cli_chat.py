"""The chat as the program runs it, with a real model on a pseudo-terminal; and single answers."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
from chat_support import OneModel, RecordedOutput, ScriptedEngine, ScriptedReader
from cli_support import Cli
from places import SUPPORT

from moechat.chat.chat_options import ChatOptions
from moechat.chat.repl import Chat
from moechat.chat.session_recorder import Recorder
from moechat.cli.commands.chat_backend import ModelSlot
from moechat.cli.commands.run import _answer_once
from moechat.cli.commands.run_arguments import RunOptions
from moechat.cli.main import Terminated
from moechat.errors import DeviceLostError, ModelNotFoundError, MoechatError, UsageError
from moechat.history.conversation import Conversation
from moechat.history.session_database import Sessions

# The editor has given the terminal back, and the model has written something.
ANSWER_BEGUN = re.escape("\x1b[?2004l") + ".{60}"
PROMPT_TOKENS = r"prompt tokens(?:\x1b\[\d+m| )+(\d+)\r\n"


def test_an_interrupted_single_answer_is_still_one_json_object(capsys: pytest.CaptureFixture[str]) -> None:
    handler = signal.getsignal(signal.SIGINT)
    engine = ScriptedEngine([["half ", KeyboardInterrupt()]])
    try:
        options = RunOptions(model="scripted", json=True)
        recorder = Recorder(None, lambda text, hint: None)
        assert _answer_once(OneModel(engine), "first", options, Conversation(), recorder) == 130  # type: ignore[arg-type]
    finally:
        signal.signal(signal.SIGINT, handler)
    report = json.loads(capsys.readouterr().out)
    assert report["text"] == "half "
    assert report["tokens"] == [10]
    assert report["finish_reason"] == "interrupted"


@pytest.mark.parametrize(
    ("failure", "raised", "mark"),
    [
        (MoechatError("the disk is gone"), MoechatError, "failed"),
        (DeviceLostError("the GPU is gone"), DeviceLostError, "failed"),
        (BrokenPipeError(), BrokenPipeError, "stopped"),
        (Terminated(15), Terminated, "stopped"),
        (KeyboardInterrupt(), None, "stopped"),
    ],
)
def test_a_single_answer_in_a_conversation_is_saved_however_it_ends(
    failure: BaseException,
    raised: type[BaseException] | None,
    mark: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    engine = ScriptedEngine([["half ", failure]])
    path = tmp_path / "sessions.db"
    recorder = Recorder(path, lambda text, hint: None)
    options = RunOptions(model="scripted", session=1)
    handler = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(raised) if raised else nullcontext():
            _answer_once(OneModel(engine), "first", options, Conversation(), recorder)  # type: ignore[arg-type]
    finally:
        signal.signal(signal.SIGINT, handler)
        recorder.close()
    with Sessions(path) as sessions:
        assert [(turn.answer, turn.mark) for turn in sessions.get(1).turns] == [("half ", mark)]
    assert capsys.readouterr().out == "half \n"


def test_an_answer_to_a_closed_pipe_is_saved(cli: Cli, model: str, tmp_path: Path) -> None:
    own = Cli(tmp_path, tmp_path / "own", {})
    result = own.shell(f"$M run '{model}' hello -q -c --temperature 0 </dev/null | head -c 20", forked=True)
    assert (result.status, len(result.out)) == (0, 20)
    (row,) = json.loads(own.call("sessions", "--json").out)
    report = json.loads(own.call("sessions", "export", str(row["id"]), "--format", "json").out)
    assert report["messages"][1]["mark"] == "stopped"
    assert len(report["messages"][1]["content"].encode()) >= 20


SINGLE = """
import sys
from chat_support import OneModel, RecordedOutput, ScriptedEngine, ScriptedReader
from moechat.history.conversation import Conversation
from moechat.chat.session_recorder import Recorder
from moechat.cli.commands.run_arguments import RunOptions
from moechat.cli.commands.run import _answer_once
text = "# Title\\n\\nsome *slanted* words"
engine = ScriptedEngine([list(text)], prompt_s={prompt_s}, finish_reason="stop")
options = RunOptions(model="scripted", **{options!r})
prompt = "first"
if options.completion:
    prompt = engine.encode([{{"role": "user", "content": "first"}}])
sys.exit(_answer_once(OneModel(engine), prompt, options, Conversation(), Recorder(None, print)))
"""


def single(cli: Cli, prompt_s: float = 0, term: str = "xterm", tail: str = "", **options: object) -> str:
    (cli.directory / "single.py").write_text(SINGLE.format(prompt_s=prompt_s, options=options))
    python = f"PYTHONPATH={shlex.quote(str(SUPPORT))} {sys.executable}"
    session = cli.terminal_shell(f"TERM={term} {python} single.py {tail}")
    shown = session.read()
    session.close()
    assert session.exitstatus == 0, shown
    return shown


@pytest.mark.parametrize(
    ("more", "rendered"),
    [
        ({}, True),
        ({"raw": True}, False),
        ({"term": "dumb"}, False),
        ({"completion": True}, False),
        ({"tail": "| cat"}, False),
    ],
    ids=["plain", "raw", "dumb", "completion", "piped"],
)
def test_a_single_answer_on_a_terminal_is_rendered_as_in_the_chat(
    cli: Cli, more: dict[str, object], rendered: bool
) -> None:
    shown = single(cli, **more)  # type: ignore[arg-type]
    assert ("\x1b[3mslanted\x1b[0m" in shown) == rendered
    assert shown.endswith("words\r\n")
    if not rendered:
        assert "# Title\r\n\r\nsome *slanted* words\r\n" in shown


@pytest.mark.parametrize(
    ("more", "said"),
    [({}, True), ({"json": True}, True), ({"quiet": True}, False), ({"tail": "2>&1 | cat"}, False)],
    ids=["plain", "json", "quiet", "piped"],
)
def test_a_single_answer_shows_the_progress_of_a_long_prompt(
    cli: Cli, more: dict[str, object], said: bool
) -> None:
    shown = single(cli, prompt_s=1.6, **more)  # type: ignore[arg-type]
    assert ("reading 0 of 5 tokens" in shown) == said
    before, _, after = shown.rpartition("\r\x1b[K")
    assert bool(before) == said
    assert "reading" not in after


def test_a_chat_on_a_terminal_answers_and_exits(cli: Cli, model: str) -> None:
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


def test_lines_pasted_while_the_model_loads_are_one_message(cli: Cli, model: str) -> None:
    own = Cli(cli.directory, cli.home, {})
    session = own.terminal("run", model, "--temperature", "0", "--max-tokens", "3")
    session.timeout = 20
    session.expect("loading")
    # What the terminal does with a paste depends on what it was told last.
    assert "\x1b[?2004h" in session.before
    session.send("\x1b[200~pasted\rwhile it loads\x1b[201~")
    session.expect(re.escape("... ") + ".*while it loads")
    session.send("\r")
    session.expect(r"[1-9]\d* of 8,192 tokens")
    session.send("\x04")
    session.read()
    session.close()
    assert session.exitstatus == 0
    assert (
        json.loads(own.call("sessions", "--json", "--limit", "1").out)[0]["title"] == "pasted while it loads"
    )


def test_a_single_answer_can_continue_a_conversation(cli: Cli, model: str) -> None:
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


def test_end_of_input_exits_the_chat_and_answers_can_go_to_a_file(cli: Cli, model: str) -> None:
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
def test_after_a_failed_load_the_previous_model_stays(failure: BaseException, tmp_path: Path) -> None:
    engines = [ScriptedEngine([], name="first"), failure, ScriptedEngine([], name="first again")]
    loaded: list[str] = []

    def load(name: str) -> ScriptedEngine:
        loaded.append(name)
        found = engines.pop(0)
        if isinstance(found, BaseException):
            raise found
        return found  # type: ignore[return-value]

    with ModelSlot(load, "mine") as models:  # type: ignore[arg-type]
        with pytest.raises(type(failure)):
            models.use("demo")
        assert models.engine.name == "first again"
        with pytest.raises(ModelNotFoundError):
            models.use(str(tmp_path / "nowhere"))
        assert models.engine.name == "first again"
    assert loaded == ["mine", "demo", "mine"]


def test_switching_models_in_the_chat_respects_the_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOECHAT_HOME", str(tmp_path / "home"))
    for bits in (3, 8):
        store = tmp_path / "home" / "data" / "models" / f"tiny-11111111-{bits}bit"
        store.mkdir(parents=True)
        (store / "manifest.json").write_text(
            '{"source": {"name": "tiny", "revision": null}, "model_type": "olmoe", '
            f'"geometry": {{"bits": {bits}}}, "files": {{}}}}'
        )

    def load(name: str) -> ScriptedEngine:
        return ScriptedEngine([], name=name)

    with ModelSlot(load, "mine", 8) as models:  # type: ignore[arg-type]
        models.use("tiny")
        assert models.engine.name == "tiny"
    with ModelSlot(load, "mine") as models, pytest.raises(UsageError):  # type: ignore[arg-type]
        models.use("tiny")


def test_interrupts_do_not_stop_reloading_the_previous_model() -> None:
    def load(name: str) -> ScriptedEngine:
        loaded.append(name)
        if len(loaded) > 1:
            signal.raise_signal(signal.SIGINT)
        return ScriptedEngine([], name=f"{name} {len(loaded)}")

    loaded: list[str] = []
    handler = signal.getsignal(signal.SIGINT)
    with ModelSlot(load, "mine") as models:  # type: ignore[arg-type]
        with pytest.raises(KeyboardInterrupt):
            models.use("demo")
        assert models.engine.name == "mine 3"
    assert signal.getsignal(signal.SIGINT) is handler


def test_a_chat_whose_model_cannot_be_reloaded_waits_for_another(
    capsys: pytest.CaptureFixture[str],
) -> None:
    first, last = ScriptedEngine([["one"]], name="first"), ScriptedEngine([["two"]], name="last")
    found = [first, MemoryError(), RuntimeError("the driver is gone"), last]

    def load(name: str) -> ScriptedEngine:
        engine = found.pop(0)
        if isinstance(engine, BaseException):
            raise engine
        return engine

    output, lines = (
        RecordedOutput(),
        ["hello", "/model demo", "lost?", "/show", "/read x", "/model demo", "again"],
    )
    with ModelSlot(load, "mine") as models:  # type: ignore[arg-type]
        chat = Chat(models, ChatOptions(), output, reader=ScriptedReader(lines))
        assert chat.run() == 0
    assert capsys.readouterr().out == "one\ntwo\n"
    assert len(output.errors) == 4
    message = output.errors[0][0]
    assert "MemoryError" in message
    assert "mine could not be loaded again either: the driver is gone" in message
    assert all("/model NAME loads one" in (hint or "") for _, hint in output.errors[:3])
    assert [message["content"] for message in last.prompts[0]] == ["hello", "one", "again"]


def test_repeated_ctrl_c_exits_like_two(cli: Cli, model: str) -> None:
    session = cli.terminal("run", model, "--no-save", forked=True)
    session.expect("of 8,192 tokens")
    while session.isalive():
        session.sendintr()
        time.sleep(0.005)
    session.close()
    assert (session.exitstatus, session.signalstatus) == (0, None)


def test_the_end_token_of_the_demo_is_not_shown(cli: Cli) -> None:
    result = cli.call("run", "demo", "Who are you?", "--temperature", "0")
    assert result.status == 0, result.err
    assert b"<|" not in result.out


def test_a_chat_whose_mapped_model_is_cut_short_by_others_says_so_and_keeps_the_conversation(
    cli: Cli, model: str, tmp_path: Path
) -> None:
    own = Cli(directory=cli.directory, home=tmp_path / "home")
    shutil.copytree(cli.home / "data" / "models", own.home / "data" / "models")
    session = own.terminal("run", model, "--temperature", "0", "--max-tokens", "80")
    session.expect("for help, Ctrl-D to leave")
    session.expect("of 8,192 tokens")
    session.send("one\r")
    session.expect(ANSWER_BEGUN)
    session.expect("of 8,192 tokens")
    [store] = (own.home / "data" / "models").glob("tiny-chat*")
    for path in store.glob("experts-*"):
        os.truncate(path, 4096)
    session.send("two\r")
    session.expect("has 4096 bytes, the manifest says")
    session.expect("--repair")
    session.read()
    session.close()
    assert (session.exitstatus, session.signalstatus) == (6, None)
    [row] = json.loads(own.call("sessions", "--json").out)
    assert (row["title"], row["turns"]) == ("one", 1)
