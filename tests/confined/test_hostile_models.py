"""A hostile template and tokenizer in the program: messages are refused, chat and server go on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import httpx
import pexpect
import pytest
from cli_support import Cli
from serve_support import serving

BACKTRACKING = "a" * 40 + "!"
OPTIONS = ("--bits", "16", "--max-tokens", "2", "--temperature", "0")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("memory", "chat template of hostile takes more than 25"),
        (BACKTRACKING, "tokenizer of hostile fails on this text"),
    ],
)
def test_a_pipe_ends_with_status_3_and_the_limit(text: str, said: str, cli: Cli, hostile: str) -> None:
    result = cli.call("run", hostile, *OPTIONS, stdin=text.encode())
    assert (result.status, result.out) == (3, b"")
    assert f"error: the {said}" in " ".join(result.err.split())
    assert "hint: " in result.err
    assert "Traceback" not in result.err
    assert "panicked" not in result.err


def test_counting_is_limited_too(cli: Cli, hostile: str) -> None:
    assert cli.call("count", hostile, BACKTRACKING).status == 3
    result = cli.call("count", hostile, "--chat", "memory")
    assert result.status == 3
    assert "MiB of memory" in result.err
    assert cli.call("count", hostile, "--chat", "hello").status == 0


def test_a_chat_goes_on_after_messages_that_are_refused(cli: Cli, hostile: str) -> None:
    session = cli.terminal("run", hostile, *OPTIONS, forked=True)
    session.expect(">>> ")
    for text, said in (
        (BACKTRACKING, "fails on this"),
        ("memory", "MiB of memory"),
        (BACKTRACKING, "fails on"),
        ("hello", "hello"),
    ):
        session.send(f"{text}\r")
        session.expect(said, timeout=30)
        session.expect(">>> ", timeout=30)
    session.send("/bye\r")
    session.expect(pexpect.EOF, timeout=30)
    session.close()
    assert session.exitstatus == 0


def test_a_server_answers_400_and_lives(
    hostile: str, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOECHAT_HOME", str(cli.home))
    with serving(tmp_path, hostile, "--bits", "16") as server, server.client() as client:
        for _ in range(2):
            for text, said in (("memory", "MiB of memory"), (BACKTRACKING, "fails on this text")):
                answer = _asked(client, text)
                assert answer.status_code == 400
                assert said in answer.json()["error"]["message"]
                assert answer.json()["error"]["code"] == "model_rules"
            assert _asked(client, "hello").status_code == 200


def test_a_tokenizer_that_multiplies_text_is_refused_at_loading(
    cli: Cli, hostile: str, tmp_path: Path
) -> None:
    copy = tmp_path / "doubling"
    shutil.copytree(hostile, copy)
    path = copy / "tokenizer.json"
    step = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
    content = json.loads(path.read_text()) | {"normalizer": {"type": "Sequence", "normalizers": [step] * 30}}
    path.write_text(json.dumps(content))
    result = cli.call("run", str(copy), "hello", *OPTIONS)
    assert (result.status, result.out) == (3, b"")
    assert "1,073,741,824 times as long" in " ".join(result.err.split())


def test_a_traceback_shows_no_escapes_of_a_template(cli: Cli, hostile: str) -> None:
    """``MOECHAT_DEBUG=1`` prints the whole error, whose text is the template's."""
    debug = Cli(cli.directory, cli.home, {"MOECHAT_DEBUG": "1"})
    result = debug.call("run", hostile, "escapes", *OPTIONS)
    assert result.status == 2
    assert "Traceback" in result.err
    assert "␛]0;title␇␛[2J" in result.err
    assert not {"\x1b", "\x07"} & set(result.err)


def _asked(client: httpx.Client, text: str) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 2}
    return client.post("/v1/chat/completions", json=body)
