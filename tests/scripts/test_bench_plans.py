"""What `plan` expects beside what `simulate` finds: near each other on recorded routing, and the script."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from made_routing import MadeRouting
from places import SCRIPTS

MOST = 15.0  # percent


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace of the shape, popularity and locality of a recorded gpt-oss-20b."""
    file = tmp_path_factory.mktemp("traces") / "gpt-oss.npz"
    MadeRouting(24, 32, 4, 0.9, 0.43).trace(900).write(file)
    return file


def plans(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPTS / "bench" / "plans"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_plans_expect_about_the_time_that_a_simulation_finds(gpt_oss: Path) -> None:
    machines = ["rtx4090-24g", "ssd-only-16g"]
    done = plans(gpt_oss, "--profiles", ",".join(machines), "--budgets", "100M,6500M", "--json")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert [(row["profile"], row["budget"]) for row in rows] == [(machine, "6500M") for machine in machines]
    for row in rows:
        assert 0 < row["share"] < 1
        assert row["planned_ms"] == pytest.approx(row["simulated_ms"], rel=MOST / 100), row


def test_a_bound_decides_the_exit_status(gpt_oss: Path) -> None:
    done = plans(gpt_oss, "--profiles", "ssd-only-16g", "--budgets", "8G", "--require", "0", "--tokens", "20")
    assert done.returncode == 1, done.stderr
    assert done.stdout.splitlines()[-1].startswith("1 plans: ")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--profiles", "none"], "there is no machine"),
        (["--profiles", "ssd-only-16g", "--budgets", "100M"], "no budget holds a part"),
    ],
)
def test_impossible_requests_are_refused_with_a_message(
    gpt_oss: Path, arguments: list[str], says: str
) -> None:
    done = plans(gpt_oss, *arguments)
    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr
