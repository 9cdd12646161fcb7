"""``run --prompt-cache``: the computed conversation in a file."""

from __future__ import annotations

import json
from pathlib import Path

from cli_support import Cli


def test_the_command_line_keeps_and_continues(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "state"
    options = ["--prompt-cache", str(path), "--temperature", "0", "--max-tokens", "10", "-v"]
    text = "Once upon a time there was a little fox who wanted to fly over the hill"
    first = cli.run("run", "demo", "--completion", text, *options)
    assert first.status == 0
    assert "were written to" in first.err
    again = cli.run("run", "demo", "--completion", text, *options, "--json")
    assert json.loads(again.out)["text"] == first.out.decode().rstrip("\n")
    assert "were read from" in again.err
    assert json.loads(again.out)["statistics"]["reused_tokens"] > 0
    path.write_bytes(b"something else")
    refused = cli.run("run", "demo", "--completion", text, *options)
    assert refused.status == 2
    assert path.read_bytes() == b"something else"
    assert cli.run("run", "demo", "--jsonl", "x", "--prompt-cache", "y").status == 2
    assert cli.run("run", "demo", "x", "--remote", "http://localhost:1", "--prompt-cache", "y").status == 2
