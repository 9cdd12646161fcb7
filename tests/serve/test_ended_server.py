"""``moechat run`` where the server that has the model in memory ends before or while it answers."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from chat_support import RecordedOutput, ScriptedReader
from serve_support import PATIENCE_S, run, serving

import moechat
from moechat.chat.chat_options import ChatOptions, Generation
from moechat.chat.repl import Chat
from moechat.cli.commands.chat_backend import ModelSlot
from moechat.errors import DoesNotFitError, ServerEndedError
from moechat.remote.server_engine import ServerEngine, ask_server
from moechat.serve.registry import running_servers

STORY = "Tell me a story about a fox."
NOTICE = "the server ended; loading demo here"
MIDDLE = "the server ended in the middle of the answer"
# `moechat run` with a server that gets a signal just after it was found.
SIGNALLED = """
import os, signal, sys
from moechat.cli.commands import run
from moechat.serve.registry import running_servers
find = run.loaded_by_a_server
def found(options):
    engine = find(options)
    assert engine is not None
    for server in running_servers():
        os.kill(server.pid, signal.{signal})
    return engine
run.loaded_by_a_server = found
from moechat.cli.main import main
sys.exit(main())
"""
FACTS: dict[str, Any] = {
    "name": "demo",
    "model": "demo",
    "context_length": 1024,
    "has_chat_template": True,
    "template_variables": [],
}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MOECHAT_HOME", str(tmp_path))
    monkeypatch.delenv("MOECHAT_NO_DAEMON")
    return tmp_path


@pytest.fixture
def killable(home: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A server that has the demo loaded; a test ends it."""
    log = home / "killed.log"
    with open(log, "wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "moechat", "serve", "demo", "--port", "0"],
            stdin=subprocess.DEVNULL,
            stderr=file,
        )
    try:
        for _ in range(PATIENCE_S * 20):
            if any(ask_server(server.socket) for server in running_servers()):
                break
            assert process.poll() is None, log.read_text()
            time.sleep(0.05)
        yield process
    finally:
        process.kill()
        process.wait()


def signalled(name: str, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", SIGNALLED.format(signal=name), "run", *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


@pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM"])
def test_a_server_that_ends_before_it_answers_is_replaced(
    killable: subprocess.Popen[bytes], name: str
) -> None:
    asked = ["demo", STORY, "--temperature", "0", "--max-tokens", "12"]
    done = signalled(name, *asked)
    wanted = run(*asked, "--no-daemon")
    assert (done.returncode, done.stdout) == (0, wanted.stdout)
    # A server that shuts down may still have answered.
    answered = name == "SIGTERM" and done.stderr == wanted.stderr
    assert answered or done.stderr.splitlines()[0] == NOTICE
    assert "Errno" not in done.stderr


def test_every_prompt_of_a_file_is_answered(killable: subprocess.Popen[bytes], home: Path) -> None:
    prompts = home / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in (STORY, "Who are you?")))
    done = signalled("SIGKILL", "demo", "--jsonl", str(prompts), "--max-tokens", "4", "--temperature", "0")
    assert done.returncode == 0
    assert [len(json.loads(line)["tokens"]) for line in done.stdout.splitlines()] == [4, 4]
    assert done.stderr.count(NOTICE) == 1


def test_a_part_of_an_answer_is_shown_and_the_error_says_what_to_do(
    killable: subprocess.Popen[bytes],
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "moechat", "run", "demo", STORY, "--max-tokens", "900", "--seed", "1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
    )
    assert process.stdout is not None
    first = process.stdout.read(1)
    killable.kill()
    rest, told = process.communicate(timeout=PATIENCE_S)
    assert first + rest
    assert process.returncode == 1
    assert told.decode().splitlines() == [
        f"error: {MIDDLE}",
        "hint: the next message or command loads the model here",
    ]


class _KillingReader(ScriptedReader):
    """Kills a server before the line that has a number is read."""

    def __init__(self, lines: list[str], server: subprocess.Popen[bytes], before: int) -> None:
        super().__init__(lines)
        self._server, self._left = server, before

    def read(self) -> str:
        if self._left == 0:
            self._server.kill()
            self._server.wait()
        self._left -= 1
        return super().read()


def _server_engine() -> ServerEngine:
    (server,) = running_servers()
    facts = ask_server(server.socket)
    assert facts is not None
    return ServerEngine(server.socket, facts)


@pytest.mark.parametrize("before", [0, 1])
def test_a_chat_goes_on_with_the_model_loaded_here(
    killable: subprocess.Popen[bytes], before: int, capsys: pytest.CaptureFixture[str]
) -> None:
    loaded = []

    def load_here(name: str) -> Any:
        loaded.append(name)
        return moechat.load(name)

    generation = Generation({"temperature": 0.0, "max_tokens": 8})
    output = RecordedOutput()
    with ModelSlot(lambda _: _server_engine(), "demo", load_here=load_here) as models:
        reader = _KillingReader([STORY, "And a dog?", "Goodbye."], killable, before)
        chat = Chat(models, ChatOptions(generation=generation), output, reader=reader)
        assert chat.run() == 0
        conversation = chat.session.conversation
    assert loaded == ["demo"]
    assert not output.errors
    assert [turn.question for turn in conversation.turns] == [STORY, "And a dog?", "Goodbye."]
    with moechat.load("demo") as engine:
        messages: list[dict[str, str]] = []
        for number, turn in enumerate(conversation.turns):
            if (
                number == before
            ):  # the server's cache is lost, and tokens computed as a prompt differ by rounding
                engine.drop_prompt_cache()
            messages.append({"role": "user", "content": turn.question})
            steps = engine.generate(messages, temperature=0.0, max_new_tokens=8)
            messages.append({"role": "assistant", "content": "".join(step.text for step in steps)})
            assert turn.answer == messages[-1]["content"]
    capsys.readouterr()


# ---- a socket that stands for a server


@contextmanager
def answering(path: Path, *answers: bytes) -> Iterator[str]:
    """A socket that gives one answer to each connection, and closes it; the last one is repeated."""
    left = list(answers)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()

        def serve() -> None:
            while True:
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return
                with connection:
                    if not connection.recv(1 << 16):
                        return
                    connection.sendall(left.pop(0) if len(left) > 1 else left[0])

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield str(path)
        finally:
            with socket.socket(socket.AF_UNIX) as last:  # wakes the thread up
                last.connect(str(path))
            thread.join()


def http(body: bytes, status: bytes = b"200 OK", length: int | None = None) -> bytes:
    size = len(body) if length is None else length
    return b"HTTP/1.1 %s\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s" % (status, size, body)


CLOSING = http(
    json.dumps({"error": {"class": "ServerClosingError", "message": "x", "hint": None}}).encode(),
    b"400 Bad Request",
)
STEP = b'{"begun": true}\n{"step": {"text": "Once", "token_id": 7}}\n'
NO_ANSWERS = [
    b"",
    CLOSING,
    http(b'{"begun": true}\n{"prefilled": [1, 3]}\n', length=500),
    http(b'{"error": {"class": "ServerClosingError", "message": "x", "hint": null}}\n'),
    http(b'{"begun": true}\n'),
]


@pytest.mark.parametrize("answer", NO_ANSWERS)
def test_a_server_that_ends_before_the_first_step_is_told_apart(tmp_path: Path, answer: bytes) -> None:
    with answering(tmp_path / "socket", answer) as path:
        engine = ServerEngine(path, FACTS)
        with pytest.raises(ServerEndedError, match="that had the model in memory has ended"):
            list(engine.generate([1, 2, 3]))
        engine.close()


def test_a_server_that_ends_behind_a_step_says_how_much_came(tmp_path: Path) -> None:
    closing = b'{"error": {"class": "ServerClosingError", "message": "x", "hint": null}}\n'
    for answer in (http(STEP, length=500), http(STEP), http(STEP + closing)):
        with answering(tmp_path / "socket", answer) as path:
            engine = ServerEngine(path, FACTS)
            steps = engine.generate([1, 2, 3])
            assert next(steps).text == "Once"
            with pytest.raises(ServerEndedError, match=MIDDLE):
                next(steps)
            assert (engine.stats.prompt_tokens, engine.stats.output_tokens) == (3, 1)
            engine.close()
        (tmp_path / "socket").unlink()


ENCODED = http(b'{"tokens": [5, 6], "texts": ["a", "b"], "bytes": ["61", "62"]}')


def test_what_came_of_a_message_is_kept_and_the_chat_stays_open(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = RecordedOutput()
    generation = Generation({"temperature": 0.0, "max_tokens": 8})
    with (
        answering(tmp_path / "socket", ENCODED, http(STEP, length=500), b"") as path,
        ModelSlot(lambda _: ServerEngine(path, FACTS), "demo", load_here=moechat.load) as models,
    ):
        chat = Chat(
            models,
            ChatOptions(generation=generation),
            output,
            reader=ScriptedReader([STORY, "And a dog?"]),
        )
        assert chat.run() == 0
        turns = chat.session.conversation.turns
    assert [message for message, _ in output.errors] == [MIDDLE]
    assert [(turn.question, turn.mark) for turn in turns] == [(STORY, "failed"), ("And a dog?", "cut")]
    assert turns[0].answer == "Once"
    assert capsys.readouterr().out.startswith("Once\n")


def test_a_model_that_does_not_fit_here_is_tried_again_with_the_next_message(tmp_path: Path) -> None:
    tried = []

    def load_here(name: str) -> Any:
        tried.append(name)
        raise DoesNotFitError("no room")

    output = RecordedOutput()
    with (
        answering(tmp_path / "socket", b"") as path,
        ModelSlot(lambda _: ServerEngine(path, FACTS), "demo", load_here=load_here) as models,
    ):
        chat = Chat(models, ChatOptions(), output, reader=ScriptedReader([STORY, STORY]))
        assert chat.run() == 0
        assert chat.session.conversation.turns == []
    assert [message for message, _ in output.errors] == ["no room", "no room"]
    assert tried == ["demo", "demo"]


def test_the_status_of_a_chat_loads_nothing(tmp_path: Path) -> None:
    def load_here(_: str) -> Any:
        raise AssertionError

    with (
        answering(tmp_path / "socket", b"") as path,
        ModelSlot(lambda _: ServerEngine(path, FACTS), "demo", load_here=load_here) as models,
    ):
        session = Chat(models, ChatOptions(), RecordedOutput(), reader=ScriptedReader([])).session
        assert session.context_line().startswith("demo")


def test_an_answer_that_is_stopped_counts_its_tokens(home: Path) -> None:
    with serving(home, "demo"):
        engine = _server_engine()
        steps = engine.generate([5, 6, 7], max_new_tokens=9)
        next(steps)
        next(steps)
        steps.close()  # type: ignore[attr-defined]
        assert (engine.stats.prompt_tokens, engine.stats.output_tokens) == (3, 2)
        engine.close()
