"""The table of eviction policies on recorded routing."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from places import ROOT, SCRIPTS

TRACE = ROOT / "tests/data/gpt_oss_20b_part.npz"


def table(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPTS / "policy_table"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_rows_hold_every_policy_between_nothing_and_the_bound() -> None:
    done = table(str(TRACE), "--fraction", "0.25", "--fraction", "0.5", "--tokens", "600", "--json")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    names = ["lru", "lfu", "lcp", "discount 0.98", "blend", "forecast", "belady"]
    assert [row["policy"] for row in rows] == names * 2
    assert [row["experts_cached"] for row in rows] == [8] * 7 + [16] * 7
    for row in rows:
        bound = rows[6 if row["fraction"] == 0.25 else 13]
        assert 0 < row["hit_rate"] <= bound["hit_rate"]
        assert 0 < row["hit_rate_always"] <= bound["hit_rate_always"]
    assert rows[0]["closed"] == rows[0]["closed_always"] == 0.0
    assert rows[6]["closed"] == pytest.approx(1.0)
    # A larger cache has more hits.
    assert all(more["hit_rate"] > less["hit_rate"] for less, more in zip(rows[:7], rows[7:], strict=True))


def test_the_text_lists_every_policy_and_parts_of_the_trace_differ() -> None:
    done = table(str(TRACE), "--sequences", "1:2", "--layers", "five")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.strip().splitlines()
    assert lines[0] == "gpt_oss_20b_part, 8 experts of a layer cached (0.25)"
    assert [line.split()[0] for line in lines[2:]] == [
        "lru",
        "lfu",
        "lcp",
        "discount",
        "blend",
        "forecast",
        "belady",
    ]
    assert lines[-1].split()[2] == "100.0%"
    other = table(str(TRACE), "--sequences", "2:3", "--layers", "0,3")
    assert other.stdout != done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.npz"], "there is no trace"),
        ([str(TRACE), "--layers", "9"], "the trace has layers 0 to 5"),
        ([str(TRACE), "--layers", "many"], "give all, five, or numbers"),
        ([str(TRACE), "--sequences", "3:2"], "the trace has 4 sequences"),
        ([str(TRACE), "--fraction", "1.5"], "--fraction must be above 0"),
    ],
)
def test_impossible_requests_are_refused_with_a_message(arguments: list[str], message: str) -> None:
    done = table(*arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
