"""The router's predictions measured on the demo, beside drawn ones."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
from places import SCRIPTS

_NUMBER = re.compile(r"\d\.\d+")


def test_drawn_predictions_are_right_as_often_at_each_rank_as_the_demos_router(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    texts = ("Why is the sky blue?", "Tell me a story about a bear and a drum.", "How do I make pancakes?")
    prompts.write_text("\n".join(json.dumps({"prompt": text}) for text in texts), "utf-8")
    done = subprocess.run(
        [sys.executable, SCRIPTS / "bench" / "predictions", "demo", "--prompts", prompts, "--tokens", "100"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    ranks = {}
    for ahead, part in enumerate(done.stdout.split(" ahead: ")[1:], start=1):
        for line in part.splitlines():
            if "right by rank" in line:
                ranks[ahead, line.split()[0]] = np.array([float(each) for each in _NUMBER.findall(line)])
    assert len(ranks) == 4
    for ahead in (1, 2):
        measured, drawn = ranks[ahead, "measured"], ranks[ahead, "drawn"]
        assert measured[0] > 0.75
        assert (np.diff(measured) < 0.02).all()
        assert np.abs(measured - drawn).max() < 0.12
        assert abs(measured[:2].sum() - drawn[:2].sum()) < 0.06
    # The nearer layer is predicted better.
    assert ranks[1, "measured"][0] > ranks[2, "measured"][0]
