#!/usr/bin/env python3
"""How busy the link into a GPU's memory keeps the copy engine, and what a layer's transfers cost the host.

Runs over the stand-in for the driver (``native/tests/fake_cuda.cc``), whose copies take as long as they do at
a bandwidth and move nothing. The engine's idle time between two copies is computed from the moments of calls,
so it shows how late the link issues, and not how late the stand-in's threads are.

    scripts/bench/link/copy_engine.py [--bandwidth GB/S ...] [--blocks N] [--rounds N] [--json]

Prefetches: all are queued at once. Busy: share of the time from the first copy to the last in which the
engine copies, in the best round: whatever else runs on the machine delays threads. Ran empty: how often a
batch ended with no other behind it while transfers were queued, a round. Submit: median seconds of the call
that queues the demands of a layer (8 experts; those of 221 KB and 442 KB have 12 blocks), none of them
neighbours, on an idle link.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import sys
import time
from pathlib import Path

import numpy as np

SUPPORT = Path(__file__).resolve().parent.parent.parent.parent / "tests" / "support"
if importlib.util.find_spec("fake_cuda") is None and (SUPPORT / "fake_cuda.py").is_file():
    os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | {"PYTHONPATH": str(SUPPORT)})

from fake_cuda import VARIABLE, FakeCuda  # noqa: E402

DEMAND, NEXT = 0, 1
# Bytes of a block, and blocks of a layer's demand.
BLOCKS = {"221 KB": (221_184, 96), "442 KB": (442_368, 96), "3 MB": (3 << 20, 8)}


def main() -> int:
    """Prints a row for each block size and bandwidth."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--bandwidth", type=float, nargs="+", default=[6, 12, 25, 50], metavar="GB/S")
    parser.add_argument("--blocks", type=int, default=400, help="prefetches of a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    cuda = FakeCuda()
    os.environ[VARIABLE] = str(cuda.path)
    rows = [
        measure(cuda, name, *BLOCKS[name], bandwidth, arguments.blocks, arguments.rounds)
        for bandwidth in arguments.bandwidth
        for name in BLOCKS
    ]
    if arguments.json:
        print(json.dumps(rows, indent=1))
        return 0
    print(
        f"{'GB/s':>5} {'block':>7} {'busy':>7} {'batches':>8} {'ran empty':>9} {'largest':>9} {'submit':>9}"
    )
    for row in rows:
        print(
            f"{row['bandwidth']:>5.0f} {row['block']:>7}{row['busy']:>10.1%}{row['batches']:>10.0f}"
            f"{row['ran_empty']:>10.1f}{row['largest'] / 1e6:>7.2f} MB{row['submit'] * 1e6:>7.0f} us"
        )
    return 0


def measure(
    cuda: FakeCuda, name: str, record: int, layer: int, bandwidth: float, blocks: int, rounds: int
) -> dict[str, object]:
    """The row of a block size and a bandwidth."""
    from moechat import _native

    cuda.reset()
    cuda.set(bandwidth=bandwidth * 1e9, no_bytes=1, latency=1e-6)
    far = np.zeros(2 * record, np.uint8)
    near = np.empty((blocks, record), np.uint8)
    cuda.adopt(near.ctypes.data, near.nbytes)
    _native.cuda_pin(far)
    link = _native.cuda_link([(far, far.nbytes, True, "", 0)])
    link.open(blocks)

    def run(count: int, priority: int) -> float:
        # One record again and again: none is the neighbour of another.
        transfers = [(slot, 0, 0, record, priority) for slot in range(count)]
        begun = time.perf_counter()
        link.submit(transfers, near)
        taken = time.perf_counter() - begun
        done = 0
        while done < count:
            time.sleep(0.002)
            done += len(link.poll())
        return taken

    busy, submits = [], []
    try:
        for _ in range(rounds):
            cuda.set(busy=0)
            run(blocks, NEXT)
            busy.append(cuda.get("busy") / (cuda.get("busy") + cuda.get("idle")))
        emptied = cuda.get("emptied") / rounds - 1
        batches, largest, most = (cuda.get(key) for key in ("groups", "largest_group", "most_groups"))
        cuda.set(bandwidth=0, latency=0)
        for _ in range(10 * rounds):
            submits.append(run(layer, DEMAND))
        return {
            "bandwidth": bandwidth,
            "block": name,
            "busy": max(busy),
            "batches": batches / rounds,
            "ran_empty": emptied,
            "largest": largest,
            "under_way": most,
            "submit": statistics.median(submits),
        }
    finally:
        link.stop(5)
        _native.cuda_unpin(far)
        cuda.disown(near.ctypes.data)


if __name__ == "__main__":
    sys.exit(main())
