"""``run --jsonl``: an answer to every prompt of a file."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from cli_support import Cli

SHORT = ("--max-tokens", "5", "--temperature", "0")


def write(cli: Cli, name: str, text: str) -> str:
    path = cli.directory / name
    path.write_text(text)
    return str(path)


def lines(out: bytes) -> list[dict]:
    return [json.loads(line) for line in out.decode().splitlines()]


def test_every_prompt_has_an_object_on_a_line_as_if_it_were_alone(cli: Cli) -> None:
    name = write(cli, "prompts.txt", "The first one\n\nTell me a story\n")
    result = cli.call("run", "demo", "--jsonl", name, *SHORT)
    assert result.status == 0, result.err
    found = lines(result.out)
    assert [one["line"] for one in found] == [1, 3]
    alone = json.loads(cli.call("run", "demo", "Tell me a story", "--json", *SHORT).out)
    for key in ("model", "text", "tokens", "finish_reason"):
        assert found[1][key] == alone[key]
    assert found[1]["statistics"]["output_tokens"] == 5


def test_conversations_are_answered_turn_by_turn(cli: Cli) -> None:
    name = write(
        cli,
        "prompts.jsonl",
        '{"turns": ["Hello", "And then?"]}\n'
        '{"messages": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello"}]}\n',
    )
    result = cli.call("run", "demo", "--jsonl", name, *SHORT)
    first, second = lines(result.out)
    assert len(first["answers"]) == 2
    assert first["answers"][1] == first["text"]
    assert "answers" not in second


def test_answers_before_the_turn_that_failed_are_not_lost(cli: Cli) -> None:
    name = write(cli, "prompts.jsonl", json.dumps({"turns": ["Hello", "word " * 200, "Why?"]}) + "\n")
    result = cli.call("run", "demo", "--jsonl", name, "--ctx", "64", *SHORT)
    assert result.status == 2
    (only,) = lines(result.out)
    assert "64" in only["error"]
    alone = json.loads(cli.call("run", "demo", "Hello", "--ctx", "64", "--json", *SHORT).out)
    assert only["answers"] == [alone["text"]]
    assert "text" not in only


def test_a_line_has_an_id_and_settings_of_its_own(cli: Cli) -> None:
    entries = [
        {"id": "a é", "prompt": "Hello", "max_tokens": 2},
        {"id": {"n": 1}, "prompt": "Hello", "max_tokens": None, "category": "greeting"},
        {"id": 0, "prompt": "Hello", "temperature": 1.5, "seed": 7, "top_k": 50},
    ]
    name = write(cli, "prompts.jsonl", "".join(json.dumps(entry) + "\n" for entry in entries))
    result = cli.call("run", "demo", "--jsonl", name, *SHORT)
    assert result.status == 0, result.err
    found = lines(result.out)
    assert [one["id"] for one in found] == ["a é", {"n": 1}, 0]
    assert [len(one["tokens"]) for one in found] == [2, 5, 5]
    assert found[2]["statistics"]["seed"] == 7


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"temperature": "hot"}, "temperature is no number"),
        ({"max_tokens": 0}, "max_tokens is 0; it must be at least 1"),
        ({"max_tokens": 1.5}, "max_tokens is 1.5; it must be a whole number"),
        ({"seed": True}, "seed is no number"),
        ({"seed": 10**400}, "it must be at least 0 and at most"),
        ({"top_p": float("nan")}, "top_p is nan"),
    ],
)
def test_a_setting_out_of_range_is_refused_with_its_line(cli: Cli, entry: dict, said: str) -> None:
    name = write(cli, "prompts.jsonl", '{"prompt": "a"}\n' + json.dumps({"prompt": "b", **entry}))
    result = cli.call("run", "demo", "--jsonl", name)
    assert (result.status, result.out) == (2, b"")
    assert "line 2: " in result.err
    assert said in result.err


def test_texts_come_from_stdin_and_are_continued(cli: Cli) -> None:
    result = cli.call(
        "run", "demo", "--jsonl", "-", "--completion", *SHORT, stdin=b"Once upon a time\nThe cat\n"
    )
    assert result.status == 0, result.err
    alone = cli.call("run", "demo", "The cat", "--completion", "--json", *SHORT)
    assert lines(result.out)[1]["tokens"] == json.loads(alone.out)["tokens"]


def test_a_prompt_that_cannot_be_answered_leaves_the_others_alone(cli: Cli) -> None:
    name = write(cli, "prompts.txt", f"{'word ' * 200}\nHello\n")
    result = cli.call("run", "demo", "--jsonl", name, "--ctx", "64", *SHORT)
    assert result.status == 2
    first, second = lines(result.out)
    assert "64" in first["error"]
    assert "text" not in first
    assert second["text"]
    assert "1 of 2 prompts were not answered; their lines have an error" in result.err


def test_a_blank_prompt_has_an_error_in_its_own_line(cli: Cli) -> None:
    entries = [{"prompt": "   ", "id": 1}, {"prompt": "Hello"}, {"turns": ["Hello", " "]}]
    name = write(cli, "prompts.jsonl", "".join(json.dumps(entry) + "\n" for entry in entries))
    result = cli.call("run", "demo", "--jsonl", name, *SHORT)
    assert result.status == 2
    first, second, third = lines(result.out)
    assert (first["id"], first["error"]) == (1, "the prompt is blank")
    assert second["text"]
    assert third["error"] == "turn 2 of 2 is blank"
    assert third["answers"] == [second["text"]]


@pytest.mark.parametrize(
    ("text", "more", "said"),
    [
        ("", (), "holds no prompt"),
        ('{"prompt": 5}', (), "line 1"),
        ('{"turns": ["a", "b"]}', ("--completion",), "line 1: a conversation cannot be continued"),
        ("Hello", ("a prompt",), "goes without a prompt"),
        ("Hello", ("--json",), "goes without --json"),
        ("Hello", ("--continue",), "goes without --continue or --session"),
    ],
)
def test_what_cannot_be_meant_is_a_usage_error(cli: Cli, text: str, more: tuple[str, ...], said: str) -> None:
    name = write(cli, "prompts.jsonl" if text.startswith("{") else "prompts.txt", text)
    result = cli.call("run", "demo", *more, "--jsonl", name)
    assert (result.status, result.out) == (2, b"")
    assert said in result.err


def test_a_file_that_is_not_there_is_said_with_the_option(cli: Cli) -> None:
    result = cli.call("run", "demo", "--jsonl", "nowhere.txt")
    assert result.status == 2
    assert "--jsonl - reads from stdin" in result.err


def test_ctrl_c_ends_it_after_whole_lines(cli: Cli) -> None:
    name = write(cli, "prompts.txt", "Tell me a long story\n" * 500)
    process = cli.start("run", "demo", "--jsonl", name, "--max-tokens", "60")
    assert process.stdout is not None
    first = process.stdout.readline()
    process.send_signal(signal.SIGINT)
    rest, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    found = lines(first + rest)
    assert len(found) < 500
    assert all(one["text"] or one["finish_reason"] == "interrupted" for one in found)


def test_a_reader_that_leaves_ends_it_quietly(cli: Cli, tmp_path: Path) -> None:
    name = write(cli, "prompts.txt", "Hello\n" * 300)
    process = cli.start("run", "demo", "--jsonl", name, *SHORT)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(60) == 0
    assert b"Traceback" not in process.stderr.read()
    process.stderr.close()
