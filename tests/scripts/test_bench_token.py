"""The profile of one decoded token."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from places import SCRIPTS

SCRIPT = SCRIPTS / "bench" / "token"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_the_parts_of_a_token_add_up_to_the_whole() -> None:
    done = run("demo", "--contexts", "16,300", "--tokens", "4", "--rounds", "1", "--json")
    assert done.returncode == 0, done.stderr
    contexts = json.loads(done.stdout)["seconds"]
    assert list(contexts) == ["16", "300"]
    for parts in contexts.values():
        seconds = {part: median for part, (median, _, _) in parts.items()}
        whole = seconds.pop("whole")
        assert sum(seconds.values()) == pytest.approx(whole)
        # A part that no clock reaches would be counted as "between". The demo has no shared experts, and
        # no layers without experts.
        assert {part for part, value in seconds.items() if value <= 0} == {"mlp", "shared"}


def test_an_unknown_model_is_an_error() -> None:
    done = run("no-such-model", "--tokens", "1")
    assert done.returncode == 1
    assert "no-such-model" in done.stderr
