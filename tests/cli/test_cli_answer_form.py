"""Where answers of the command end, and what form they have."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from cli_support import Cli

GREEDY = ["--temperature", "0", "-q"]
STORY = "Tell me a story about a fox named Mia and a red kite."
SCHEMA = {
    "type": "object",
    "properties": {"animal": {"enum": ["fox", "owl"]}, "old": {"type": "boolean"}},
    "required": ["animal", "old"],
    "additionalProperties": False,
}


def test_an_answer_ends_before_a_stop_text(cli: Cli) -> None:
    question = ["run", "demo", STORY, "--max-tokens", "40", *GREEDY]
    free = cli.call(*question).out.decode().rstrip("\n")
    assert " fox" in free
    stopped = cli.call(*question, "--stop", "\U0001f98a", "--stop", " fox")
    assert stopped.out.decode().rstrip("\n") == free.partition(" fox")[0]
    found = json.loads(cli.call(*question, "--stop", " fox", "--json").out)
    assert (found["finish_reason"], found["stop"]) == ("stop", " fox")


def test_an_answer_follows_the_schema_of_a_file(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA))
    for seed in "12":
        result = cli.call(
            "run", "demo", "An animal?", "--schema", str(tmp_path / "schema.json"), "--seed", seed, "-q"
        )
        assert (result.status, result.err) == (0, "")
        found = json.loads(result.out)
        assert found["animal"] in ("fox", "owl")
        assert found["old"] in (True, False)


@pytest.mark.parametrize("rules", ['start: /[0-9]{3}/ "!"\n', "root ::= [0-9] [0-9] [0-9] [!]\n"])
def test_an_answer_follows_the_grammar_of_a_file(cli: Cli, tmp_path: Path, rules: str) -> None:
    (tmp_path / "rules").write_text(rules)
    result = cli.call("run", "demo", "A number?", "--grammar", str(tmp_path / "rules"), "-q")
    assert re.fullmatch(r"\d{3}!\n", result.out.decode())


def test_probabilities_are_part_of_the_json(cli: Cli) -> None:
    question = ["run", "demo", "hello", "--max-tokens", "3", "--json", *GREEDY]
    found = json.loads(cli.call(*question, "--logprobs", "2").out)
    assert [entry["token"] for entry in found["logprobs"]] == found["tokens"]
    for entry in found["logprobs"]:
        assert entry["logprob"] <= 0
        assert next(one["token"] for one in entry["top"]) == entry["token"]
        assert len(entry["top"]) == 2
    assert "logprobs" not in json.loads(cli.call(*question).out)


def test_a_line_of_a_prompts_file_has_its_own_stop(cli: Cli) -> None:
    lines = [
        {"prompt": STORY, "stop": [" fox", "\0"]},
        {"prompt": STORY, "stop": " time"},
        {"prompt": STORY, "stop": 5},
    ]
    given = "".join(json.dumps(line) + "\n" for line in lines).encode()
    result = cli.call("run", "demo", "--jsonl", "-", "--max-tokens", "30", *GREEDY, stdin=given)
    first, second, third = map(json.loads, result.out.splitlines())
    assert (first["finish_reason"], first["stop"]) == ("stop", " fox")
    assert (second["text"], second["stop"]) == ("Once upon a", " time")
    assert "stop" in third["error"]
    assert result.status == 2


@pytest.mark.parametrize(
    ("arguments", "fact"),
    [
        (["--schema", "nowhere.json"], "nowhere.json"),
        (["--schema", "."], "cannot be read"),
        (["--grammar", "nowhere.lark"], "nowhere.lark"),
        (["--schema", "a", "--grammar", "b"], "exclude"),
        (["--stop", ""], "--stop"),
        (["--logprobs", "21", "--json"], "--logprobs"),
        (["--logprobs", "2"], "--json"),
        (["--draft-tokens", "16"], "--draft-tokens"),
        (["--draft-tokens", "2", "--remote", "http://127.0.0.1:9/v1"], "--draft-tokens"),
    ],
)
def test_wrong_options_are_refused_before_loading(cli: Cli, arguments: list[str], fact: str) -> None:
    result = cli.call("run", "demo", "hello", *arguments)
    assert result.status == 2
    assert fact in result.err
    assert result.out == b""


@pytest.mark.parametrize(
    ("option", "content", "fact"),
    [
        ("--schema", b"{", "JSON"),
        ("--schema", b"[]", "object"),
        ("--schema", b"\xff", "UTF-8"),
        ("--schema", b'{"type": "objet"}', "objet"),
        ("--grammar", b"start: nothing", "nothing"),
        ("--grammar", b"", "empty"),
    ],
)
def test_wrong_files_are_refused(cli: Cli, tmp_path: Path, option: str, content: bytes, fact: str) -> None:
    (tmp_path / "file").write_bytes(content)
    result = cli.call("run", "demo", "hello", option, str(tmp_path / "file"))
    assert result.status == 2
    assert fact in result.err
    assert "Traceback" not in result.err
