"""Errors of logits, and the table of errors by number of bits."""

from __future__ import annotations

import json
import math
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from places import ROOT, SCRIPTS

STORY = (
    "Once upon a time there was a little fox who lived near the river. Every day she went to the water to "
    "play with her friend, a small brown duck. One morning the duck was not there. The fox looked under the "
    "tree and behind the big stone, and then she sat down and cried. "
)


def errors() -> Any:
    from logit_errors import LogitErrors

    return LogitErrors()


def accuracy(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPTS / "bench" / "accuracy"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)


def test_a_constant_for_all_tokens_of_the_vocabulary_is_no_error() -> None:
    reference = torch.randn(5, 9)
    found = errors()
    found.add(reference + 3.0, reference, torch.arange(5))
    result = found.to_json()
    assert result["relative"] < 1e-6
    assert result["divergence"] == pytest.approx(0.0, abs=1e-6)
    assert result["same_choice"] == 1.0
    nll = -reference.log_softmax(1)[torch.arange(5), torch.arange(5)].mean()
    assert result["perplexity"] == pytest.approx(math.exp(nll), rel=1e-5)


def test_errors_are_those_worked_out_by_hand() -> None:
    found = errors()
    # Means are 0; the second token's order is the other way round.
    reference = torch.tensor([[1.0, -1.0], [2.0, -2.0]])
    found.add(torch.tensor([[1.0, -1.0], [-2.0, 2.0]]), reference, None)
    result = found.to_json()
    assert result["relative"] == pytest.approx(math.sqrt(32 / 10))
    assert result["largest"] == pytest.approx(4.0)
    assert result["same_choice"] == 0.5
    p = 1 / (1 + math.exp(-4))
    assert result["divergence"] == pytest.approx((2 * p - 1) * 4 / 2)
    q = 1 / (1 + math.exp(-2))
    first = -q * math.log(q) - (1 - q) * math.log(1 - q)
    second = -p * math.log(1 - p) - (1 - p) * math.log(p)
    assert result["perplexity"] == pytest.approx(math.exp((first + second) / 2))


def test_fewer_bits_cost_more_and_float32_nothing(tmp_path: Path) -> None:
    text = tmp_path / "story.txt"
    text.write_text(STORY)
    arguments = ["demo", "--text", str(text), "--tokens", "48", "--window", "32", "--json"]
    done = accuracy(*arguments, "--dense-bits", "16,4", "--activation-bits", "32,16,8")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    found = {(row.get("dense_bits"), row.get("activation_bits")): row["sources"]["story.txt"] for row in rows}
    assert list(found) == [(16, 32), (16, 16), (16, 8), (4, 32), (4, 16), (4, 8), (None, None)]
    assert all(row["tokens"] == 48 for row in found.values())
    assert found[16, 32]["relative"] == found[16, 32]["divergence"] == 0.0
    # A token with another choice of experts has a larger error than the rounding of all others.
    assert 0 < found[16, 16]["relative"] < 0.02
    assert found[16, 16]["divergence"] < found[16, 8]["divergence"] < 0.01
    assert found[16, 16]["relative"] < found[16, 8]["relative"] < 0.1
    assert found[16, 8]["relative"] < found[4, 32]["relative"] < 0.5
    # Better than chance: the vocabulary has 3,584 tokens.
    assert 2 < found[16, 32]["perplexity"] < 200
    assert found[16, 16]["perplexity"] == pytest.approx(found[16, 32]["perplexity"], rel=2e-3)


def test_a_cache_in_8_bits_is_measured_as_one(tmp_path: Path) -> None:
    text = tmp_path / "story.txt"
    text.write_text(STORY)
    # One window: a cut would add first tokens, whose experts may be near a tie, and one token with another
    # choice of experts outweighs the rounding of 47 others.
    arguments = ["demo", "--text", str(text), "--tokens", "48", "--window", "48", "--json"]
    done = accuracy(*arguments, "--dense-bits", "16", "--activation-bits", "32", "--kv-bits", "16,8")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert [(row["dtype"], row["kv_bits"]) for row in rows] == [
        ("float32", 16),
        ("float32", 8),
        ("auto", 16),
        ("auto", 8),
    ]
    exact, packed = (row["sources"]["story.txt"] for row in rows[:2])
    assert exact["relative"] == 0.0
    assert 1e-4 < packed["relative"] < 0.05
    assert packed["perplexity"] == pytest.approx(exact["perplexity"], rel=1e-2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["demo"], "give --data or --text"),
        (["demo", "--text", "nowhere.txt"], "nowhere.txt"),
        (["olmoe-1b-7b:2"], "--work is needed"),
        (["demo", "--dense-bits", "5"], "--dense-bits is '5'; choose from auto, 4, 6, 8, 16"),
        (["demo", "--activation-bits", "16,"], "choose from 8, 16, 32"),
        (["demo", "--kv-bits", "4"], "--kv-bits is '4'; choose from 16, 8"),
    ],
)
def test_models_that_cannot_be_compared_are_refused(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # In this process, which has imported torch long ago.
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    monkeypatch.setattr(sys, "argv", ["bench_accuracy", *arguments])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(SCRIPTS / "bench" / "accuracy"), run_name="__main__")
    status = ended.value.code
    error = status if isinstance(status, str) else capsys.readouterr().err
    assert status == 1 or isinstance(status, str)  # a message, which exits with status 1
    assert error.startswith("error: ")
    assert message in error
