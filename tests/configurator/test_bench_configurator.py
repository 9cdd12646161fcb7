from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
from places import SCRIPTS

from moechat.routing.trace import Trace

SCRIPT = SCRIPTS / "bench" / "configurator"


def run(*arguments):
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, timeout=120
    )


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    """Some tokens in the shape of gpt-oss-20b, low numbers chosen more often."""
    rng = np.random.default_rng(0)
    drawn = rng.exponential(size=(60, 24, 32)) * (1 + np.arange(32))
    path = tmp_path_factory.mktemp("trace") / "trace.npz"
    Trace(np.argsort(drawn)[..., :4].astype(np.int32), np.array([0, 60]), 32).write(path)
    return path


def test_our_method_is_never_worse_and_equals_brute_force_on_small_cases(trace):
    ran = run("--json", "--repeats", "1", "--fractions", "0.25", "--trace", f"gpt-oss-20b={trace}")
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert set(found) == {"exposed_ms", "small_exposed_ms", "processor_ms"}
    assert any(title.startswith("gpt-oss-20b trace") for title in found["exposed_ms"])
    tables = [row for shares in found["exposed_ms"].values() for row in shares["0.25"].items()]
    assert len(tables) == 15  # three sources; two machines with 3 and 2 yardsticks
    for _, row in tables:
        assert all(row["ours"] <= value * (1 + 1e-9) for value in row.values())
    for table in found["small_exposed_ms"].values():
        for row in table.values():
            assert row["ours"] == pytest.approx(row["brute force"], rel=0.01, abs=1e-9)
    for row in found["processor_ms"].values():
        assert set(row) == {"uniform", "dp", "moepic", "auto"}


def test_trace_of_no_known_model_is_refused(trace):
    ran = run("--trace", f"unheard-of={trace}")
    assert ran.returncode == 2
    assert "write MODEL=FILE" in ran.stderr
