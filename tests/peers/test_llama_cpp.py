"""llama.cpp's server as ``--remote``: the chat, pipes, prompts files, schemas and errors."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pexpect
import pytest
from cli_support import Cli

STORY = "Tell me a story about a fox."
GREEDY = ("--temperature", "0", "--max-tokens", "24")
SCHEMA = {
    "type": "object",
    "properties": {"animal": {"enum": ["fox", "owl"]}, "age": {"enum": [1, 2]}},
    "required": ["animal", "age"],
    "additionalProperties": False,
}


# Bytes of an answer, about a sentence.
_SAME = 50


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    return Cli(tmp_path, tmp_path / "home", {"TERM": "dumb"})


def test_an_answer_is_that_of_our_own_engine(cli: Cli, llama: str) -> None:
    there = cli.run("run", "default", STORY, "--remote", llama, "-q", *GREEDY, forked=True)
    assert (there.status, there.err) == (0, "")
    # The file has the values of the demo's weights; the two round sums in another order, so that a near tie
    # may end otherwise after a sentence.
    here = cli.run("run", "demo", STORY, "-q", *GREEDY, "--activation-bits", "32", forked=True)
    assert there.out[:_SAME] == here.out[:_SAME]
    assert there.out.startswith(b"Once upon a time")


def test_a_pipe_gets_the_answer_and_json_the_measurements(cli: Cli, llama: str) -> None:
    options = ("--remote", llama, "-q", *GREEDY)
    piped = cli.shell(f"echo 'Tell me a story about a fox.' | $M run default {' '.join(options)} | head -c 9")
    assert piped.out == b"Once upon"
    found = json.loads(cli.run("run", "default", STORY, "--json", *options, forked=True).out)
    assert found["finish_reason"] == "length"
    assert found["statistics"]["output_tokens"] == 24
    assert found["statistics"]["prompt_tokens"] > 5
    stopped = cli.run("run", "default", STORY, "--json", "--stop", "time", *options, forked=True)
    answer = json.loads(stopped.out)
    assert (answer["text"], answer["finish_reason"]) == ("Once upon a ", "stop")


def test_a_prompts_file_is_answered_side_by_side(cli: Cli, llama: str, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    lines: list[dict[str, Any]] = [
        {"id": number, "prompt": STORY, "max_tokens": 3 + number} for number in range(6)
    ]
    lines.append({"id": "turns", "turns": ["Hello", STORY], "max_tokens": 5})
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = cli.run(
        *(
            "run",
            "default",
            "--remote",
            llama,
            "--jsonl",
            str(prompts),
            "--concurrency",
            "3",
            "--temperature",
            "0",
        ),
        forked=True,
    )
    assert done.status == 0, done.err
    results = {found["id"]: found for found in map(json.loads, done.out.splitlines())}
    assert [results[number]["statistics"]["output_tokens"] for number in range(6)] == [3, 4, 5, 6, 7, 8]
    texts = [results[number]["text"] for number in range(6)]
    assert all(longer.startswith(text) for text, longer in pairwise(texts))
    assert len(results["turns"]["answers"]) == 2


def test_a_schema_holds_there_too(cli: Cli, llama: str, tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text(json.dumps(SCHEMA))
    done = cli.run(
        *(
            "run",
            "default",
            "Which animal?",
            "--remote",
            llama,
            "--schema",
            str(schema),
            "--max-tokens",
            "60",
        ),
        *("--temperature", "0", "-q"),
        forked=True,
    )
    assert done.status == 0, done.err
    found = json.loads(done.out)
    assert found["animal"] in ("fox", "owl")
    assert found["age"] in (1, 2)


def test_a_chat_goes_over_it_under_a_name(cli: Cli, llama: str) -> None:
    assert cli.call("config", "set", "remotes.llama", f"url={llama}").status == 0
    chat = cli.terminal("run", "@llama", "--no-save", *GREEDY, forked=True)
    shown = ""
    for line in (STORY, "/show", "/set", "/model @nowhere", "/regen", "/bye"):
        chat.expect(">>> ")
        shown += chat.before or ""
        chat.sendline(line)
    chat.expect(pexpect.EOF)
    assert shown.count("Once upon a time") == 2  # and the answer again
    assert "(cut off after 24 tokens)" in shown
    assert re.search(rf"server +{re.escape(llama)}", shown)
    assert "there is no remote nowhere" in shown


def test_its_errors_are_ours(cli: Cli, llama: str) -> None:
    long = "a fox and " * 2000
    done = cli.run("run", "default", "-", "--remote", llama, "-q", stdin=long.encode(), forked=True)
    assert (done.status, done.out) == (2, b"")
    assert "exceeds the available context size" in done.err
    unknown = cli.run("run", "nothing", STORY, "--remote", llama, forked=True)
    assert (unknown.status, "has no model nothing" in unknown.err) == (3, True)
    refused = replace(cli, extra={"MOECHAT_API_KEY": "a b"}).run("run", "x", STORY, "--remote", llama)
    assert (refused.status, "holds no key" in refused.err) == (2, True)
