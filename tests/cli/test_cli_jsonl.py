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


def test_every_prompt_gets_one_json_line_with_the_answer_it_gets_alone(cli: Cli) -> None:
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


def test_answers_before_a_failed_turn_are_kept(cli: Cli) -> None:
    name = write(cli, "prompts.jsonl", json.dumps({"turns": ["Hello", "word " * 200, "Why?"]}) + "\n")
    result = cli.call("run", "demo", "--jsonl", name, "--ctx", "64", *SHORT)
    assert result.status == 2
    (only,) = lines(result.out)
    assert "64" in only["error"]
    alone = json.loads(cli.call("run", "demo", "Hello", "--ctx", "64", "--json", *SHORT).out)
    assert only["answers"] == [alone["text"]]
    assert "text" not in only


def test_each_line_can_have_its_own_id_and_settings(cli: Cli) -> None:
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
        ({"temperature": "hot"}, "temperature is not a number"),
        ({"max_tokens": 0}, "max_tokens is 0; it must be at least 1"),
        ({"max_tokens": 1.5}, "max_tokens is 1.5; it must be a whole number"),
        ({"seed": True}, "seed is not a number"),
        ({"seed": 10**400}, "it must be at least 0 and at most"),
        ({"top_p": float("nan")}, "top_p is nan"),
    ],
)
def test_the_error_for_a_setting_out_of_range_names_the_line(cli: Cli, entry: dict, said: str) -> None:
    name = write(cli, "prompts.jsonl", json.dumps({"prompt": "b", **entry}))
    result = cli.call("run", "demo", "--jsonl", name)
    assert (result.status, result.out) == (2, b"")
    assert "line 1: " in result.err
    assert said in result.err
    assert "one JSON object per line" not in result.err


def test_a_malformed_line_gets_an_error_in_its_place(cli: Cli) -> None:
    entries = ['{"prompt": "Hello", "n": 2}', "nothing", '{"prompt": "Hello", "id": 3, "seed": -1, "tmp": 1}']
    name = write(cli, "prompts.jsonl", "\n".join([*entries, entries[0]]))
    result = cli.call("run", "demo", "--jsonl", name, *SHORT)
    assert result.status == 2
    found = lines(result.out)
    assert [one["line"] for one in found] == [1, 2, 3, 4]
    assert [bool(one.get("text")) for one in found] == [True, False, False, True]
    assert found[1]["error"].startswith("not JSON")
    assert (found[2]["id"], found[2]["error"][:10]) == (3, "seed is -1")
    assert f"2 of 4 lines of {name} are no prompts: line 2: not JSON" in result.err
    assert "keys without a meaning here are ignored: n (2 lines)" in result.err
    assert "2 of 4 prompts were not answered; their lines have an error" in result.err
    quiet = cli.call("run", "demo", "--jsonl", name, "--quiet", *SHORT)
    assert (quiet.status, quiet.err) == (2, "")


def test_a_key_close_to_a_setting_is_recognised(cli: Cli) -> None:
    entry = {"prompt": "Hello", "temprature": 0, "max_new_tokens": 1, "category": "x"}
    result = cli.call("run", "demo", "--jsonl", write(cli, "prompts.jsonl", json.dumps(entry)), *SHORT)
    assert result.status == 0
    assert "temprature (1 line; did you mean temperature?)" in result.err
    assert "max_new_tokens (1 line; did you mean max_tokens?)" in result.err
    assert "category (1 line)" in result.err


def test_a_conversation_among_texts_to_complete_gets_an_error(cli: Cli) -> None:
    name = write(cli, "prompts.jsonl", '{"turns": ["a", "b"], "id": 5}\n{"text": "The cat"}\n')
    result = cli.call("run", "demo", "--jsonl", name, "--completion", *SHORT)
    assert result.status == 2
    first, second = lines(result.out)
    assert (first["id"], first["error"]) == (5, "a conversation cannot be continued as a text")
    assert second["text"]


def test_texts_from_stdin_are_completed(cli: Cli) -> None:
    result = cli.call(
        "run", "demo", "--jsonl", "-", "--completion", *SHORT, stdin=b"Once upon a time\nThe cat\n"
    )
    assert result.status == 0, result.err
    alone = cli.call("run", "demo", "The cat", "--completion", "--json", *SHORT)
    assert lines(result.out)[1]["tokens"] == json.loads(alone.out)["tokens"]


def test_a_prompt_that_cannot_be_answered_does_not_affect_the_others(cli: Cli) -> None:
    name = write(cli, "prompts.txt", f"{'word ' * 200}\nHello\n")
    result = cli.call("run", "demo", "--jsonl", name, "--ctx", "64", *SHORT)
    assert result.status == 2
    first, second = lines(result.out)
    assert "64" in first["error"]
    assert "text" not in first
    assert second["text"]
    assert "1 of 2 prompts were not answered; their lines have an error" in result.err


def test_a_blank_prompt_gets_an_error_in_its_own_line(cli: Cli) -> None:
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
        ("", (), "has no prompts"),
        ('{"prompt": 5}', (), "line 1"),
        ('{"turns": ["a", "b"]}', ("--completion",), "line 1: a conversation cannot be continued"),
        ("Hello", ("a prompt",), "it excludes a prompt"),
        ("Hello", ("--json",), "it excludes --json"),
        ("Hello", ("--continue",), "it excludes --continue or --session"),
    ],
)
def test_invalid_lines_and_options_are_usage_errors(
    cli: Cli, text: str, more: tuple[str, ...], said: str
) -> None:
    name = write(cli, "prompts.jsonl" if text.startswith("{") else "prompts.txt", text)
    result = cli.call("run", "demo", *more, "--jsonl", name)
    assert (result.status, result.out) == (2, b"")
    assert said in result.err


def test_the_error_for_a_missing_file_names_the_option(cli: Cli) -> None:
    result = cli.call("run", "demo", "--jsonl", "nowhere.txt")
    assert result.status == 2
    assert "--jsonl - reads from stdin" in result.err


def test_ctrl_c_leaves_only_complete_lines(cli: Cli) -> None:
    name = write(cli, "prompts.txt", "Tell me a long story\n" * 500)
    process = cli.start("run", "demo", "--jsonl", name, "--max-tokens", "60", forked=True)
    assert process.stdout is not None
    first = process.stdout.readline()
    process.send_signal(signal.SIGINT)
    rest, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    found = lines(first + rest)
    assert len(found) < 500
    assert all(one["text"] or one["finish_reason"] == "interrupted" for one in found)


def test_a_closed_pipe_ends_the_command_quietly(cli: Cli, tmp_path: Path) -> None:
    name = write(cli, "prompts.txt", "Hello\n" * 300)
    process = cli.start("run", "demo", "--jsonl", name, *SHORT, forked=True)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(60) == 0
    assert b"Traceback" not in process.stderr.read()
    process.stderr.close()
