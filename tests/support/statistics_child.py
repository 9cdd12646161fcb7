"""Adds statistics in its own process: DIRECTORY NUMBER TIMES."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

from moechat.routing import RoutingStatistics
from moechat.routing.statistics_file import add_statistics


def one_token(number: int) -> RoutingStatistics:
    zero = RoutingStatistics.zero("blend", 4, 64, 4)
    activations = zero.activations.copy()
    activations[:, number] = 1
    # So much that writing takes a while.
    noise = np.random.default_rng(number).integers(0, 1000, zero.ranks_of_prediction.shape)
    return replace(zero, tokens=1, activations=activations, ranks_of_prediction=noise)


def main() -> None:
    directory, number, times = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    print("ready", flush=True)
    sys.stdin.readline()
    for _ in range(times):
        if not add_statistics("model", one_token(number), directory=directory, warn=print):
            sys.exit(1)
        print("added", flush=True)


if __name__ == "__main__":
    main()
