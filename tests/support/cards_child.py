"""Runs over the model of a GPU (``native/tests/timed_cuda.cc``); writes their figures as JSON.

It needs a process of its own, since a process opens the driver once.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from cards_cases import CardRow, CaseName, run_case, ten_cases
from cards_gpu import Clock

from moechat.config import RUN_AHEAD_VARIABLE

# The strategies that plans choose, given so that the test need not choose them again: by machine and model.
STRATEGIES = {
    ("rtx3060-12g", "mixtral-8x7b"): "dp",
    ("rtx3060-12g", "qwen3-30b-a3b"): "link",
    ("rtx3060-12g", "gpt-oss-120b"): "two-ahead",
    ("rtx4090-24g", "mixtral-8x7b"): "whole",
}
RESIDENT = CaseName("rtx4090-24g", "qwen3-30b-a3b")
SLOW_LINK = CaseName("laptop-rtx4060-8g", "qwen3-30b-a3b")
LINKED = CaseName("rtx3060-12g", "qwen3-30b-a3b")


def figures_of(row: CardRow) -> dict[str, Any]:
    """One case as JSON."""
    stats, counters = row.timed.stats, row.simulated.counters
    compared = ("fetched_demand", "fetched_prefetch", "blocks_far", "hits_full", "hits_miss", "layers_run")
    return {
        "case": f"{row.case.machine}:{row.case.model}",
        "times": [row.planned, row.simulated.tpot, row.timed.tpot],
        "seconds": row.timed.seconds.tolist(),
        "tokens": row.tokens,
        "layers": row.layers,
        "resident": row.resident,
        "counts": row.timed.counts,
        "engine": {name: stats[name] for name in compared},
        "simulated": {name: counters[name] for name in compared},
    }


@contextmanager
def run_ahead(allowed: bool) -> Iterator[None]:
    """As a user has it without options, or has switched it off."""
    before = os.environ.pop(RUN_AHEAD_VARIABLE, None)
    if not allowed:
        os.environ[RUN_AHEAD_VARIABLE] = "0"
    yield
    os.environ.pop(RUN_AHEAD_VARIABLE, None)
    if before is not None:
        os.environ[RUN_AHEAD_VARIABLE] = before


def run(
    clock: Clock, case: CaseName, strategy: str | None = None, *, ahead: bool = True, **changes: Any
) -> dict[str, Any]:
    """A short run, of a strategy or of the one that its plan would choose."""
    strategy = strategy or STRATEGIES.get((case.machine, case.model), "whole-nothing-ahead")
    with run_ahead(ahead):
        return figures_of(run_case(clock, case, fill=150, warm=4, tokens=24, strategy=strategy, **changes))


def by_hand(clock: Clock) -> dict[str, float]:
    """Moments of a small example, in milliseconds: see ``test_the_model_of_a_gpu_by_hand``."""
    clock.set(h2d=1e9, h2d_together=5e8, d2h=1e9, cpu=1e9, cpu_together=5e8)
    clock.set(copy_call=1e-3, copy_latency=2e-3, copy_overhead=1e-3, launch_latency=1e-3, wake_spin=5e-4)
    clock.set(turns=0.0)
    one, other = clock.stream(), clock.stream()
    found = {}
    begun = clock.now()
    clock.copy(one, 1e7, to_host=False)
    clock.copy(other, 1e6, to_host=False)
    clock.finish(other)
    found["two copies"] = clock.now() - begun
    begun = clock.now()
    clock.launch(one, 1e-3, 4e-3)
    clock.launch(one, 1e-3, 4e-3)
    clock.copy(one, 1e6, to_host=True)
    clock.finish(one)
    found["two kernels and a copy to the host"] = clock.now() - begun
    begun = clock.now()
    clock.copy(one, 1e7, to_host=False)
    clock.compute(1e7)
    found["the CPU beside a copy"] = clock.now() - begun
    clock.finish(one)
    found["that copy"] = clock.now() - begun
    for stream in (one, other):
        clock.end_stream(stream)
    return {name: 1e3 * seconds for name, seconds in found.items()}


def main() -> None:
    clock = Clock()
    found = {
        "by hand": by_hand(clock),
        "ten": [run(clock, case) for case in ten_cases()],
        "again": run(clock, LINKED),
        "sleepy": run(clock, LINKED, figures={"wake_link": 1e-3}),
        "ordered": run(clock, LINKED, ordered=True),
        "seldom": run(clock, SLOW_LINK, "seldom"),
        "behind": run(clock, RESIDENT, ahead=False),
        "slow host": run(clock, RESIDENT, ahead=False, layer_host=180e-6),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
