"""``run --prompt-cache``: the computed conversation in a file."""

from __future__ import annotations

import json
from pathlib import Path

from cli_support import Cli

import moechat


def test_a_later_start_goes_on_and_computes_only_new_tokens(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "state"
    options = ["--prompt-cache", str(path), "--temperature", "0", "--max-tokens", "10", "--completion"]
    text = "Once upon a time there was a little fox who wanted to fly over the hill"
    first = cli.run("run", "demo", text, *options, "-v")
    assert first.status == 0
    assert "were written to" in first.err
    longer = text + first.out.decode().rstrip("\n") + " And then"
    again = cli.run("run", "demo", longer, *options, "-v", "--json")
    assert "were read from" in again.err
    found = json.loads(again.out)
    assert found["statistics"]["reused_tokens"] > 15
    # The bits are those of a cache that stays in memory; a prompt computed afresh agrees within rounding.
    with moechat.load("demo") as engine:
        answers = [
            "".join(step.text for step in engine.generate(prompt, temperature=0.0, max_new_tokens=10))
            for prompt in (text, longer)
        ]
    assert answers == [first.out.decode().rstrip("\n"), found["text"]]


def test_other_files_and_options_that_do_not_fit_are_refused(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "state"
    path.write_bytes(b"something else")
    assert cli.run("run", "demo", "hello", "--prompt-cache", str(path)).status == 2
    assert path.read_bytes() == b"something else"
    assert cli.run("run", "demo", "--jsonl", "x", "--prompt-cache", "y").status == 2
    assert cli.run("run", "demo", "x", "--remote", "http://localhost:1", "--prompt-cache", "y").status == 2
