"""scripts/bench/formats on a small model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
from places import SCRIPTS


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    tiny.write_tiny_chat_model(tmp_path / "model", "mixtral")
    return tmp_path / "model"


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, SCRIPTS / "bench" / "formats", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_more_bits_lose_less_and_every_row_is_of_the_same_tokens(checkpoint: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(Path(__file__).read_text() * 2)
    done = run(checkpoint, "--text", text, "--tokens", 512, "--window", 128, "--bits", "4,2", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["tokens"] == 512
    rows = {row["format"]: row for row in result["rows"]}
    solvers = ("calibrated", "least-squares", "native")
    assert list(rows) == [f"{bits} bits, {solver}" for bits in (4, 2) for solver in solvers]
    for solver in solvers:
        four, two = rows[f"4 bits, {solver}"], rows[f"2 bits, {solver}"]
        assert (four["bits_a_weight"], two["bits_a_weight"]) == (4.5, 2.5)
        assert 0 < four["divergence_millinats"] < two["divergence_millinats"]


def test_a_directory_without_the_library_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("word " * 100)
    done = run(checkpoint, "--text", text, "--tokens", 128, "--window", 64, "--peer", tmp_path, "--bits", "4")
    assert done.returncode == 1
    assert f"error: {tmp_path / 'libggml-base.so'} does not exist" in done.stderr
