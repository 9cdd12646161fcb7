"""Computes the figures of a system from its runs."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from moechat.bench.options import System

_HITS = ("full", "prefetch", "top", "miss")


@dataclass(frozen=True)
class Run:
    """Figures of one run.

    Attributes:
        ttft: Seconds for the prompt.
        steps: Seconds for each timed token.
        seconds: Totals of the timed tokens: ``experts`` (in expert layers), of which ``begin``, ``prefetch``
            and ``finish`` in native calls and ``predict`` in the predictor.
        native: Counters of the native runner for the timed tokens.
        filled: Share of the pages in use when timing began.
    """

    ttft: float
    steps: tuple[float, ...]
    seconds: dict[str, float]
    native: dict[str, Any]
    filled: float

    @property
    def tpot(self) -> float:
        """Median seconds per token."""
        return statistics.median(self.steps)


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, minimum and maximum."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def case_figures(
    system: System,
    runs: Sequence[Run],
    *,
    fraction: float,
    pages: int,
    page_bytes: int,
    bandwidth: float | None,
    floor: float | None,
    predicted: float | None = None,
) -> dict[str, Any]:
    """One entry of ``cases``; see :mod:`moechat.bench.report`.

    Args:
        system: The measured system.
        runs: Its runs.
        fraction: Share of the experts that fits.
        pages: Pages of the near tier.
        page_bytes: Bytes per page.
        bandwidth: Bandwidth of the link, bytes per second; ``None``: not measured.
        floor: Seconds per token with all experts in memory, or ``None``.
        predicted: Seconds per token predicted by the simulator, or ``None``.
    """
    tokens = sum(len(run.steps) for run in runs)
    wall = sum(sum(run.steps) for run in runs)

    def total(key: str) -> float:
        return float(sum(run.native[key] for run in runs))

    accesses = sum(total(f"hits_{kind}") for kind in _HITS) or 1.0
    wanted = total("blocks_wanted") or 1.0
    layers_run = total("layers_run") or 1.0
    spent = {name: sum(run.seconds[name] for run in runs) for name in runs[0].seconds}
    outside = spent["experts"] - spent["begin"] - spent["prefetch"] - spent["finish"] - spent["predict"]
    inside = spent["finish"] - total("compute_seconds") - total("stall_seconds")
    costs = {**spent, "python": outside, "finish": inside}
    measured = spread([run.tpot for run in runs])
    missing = (total("blocks_wanted") - total("blocks_resident")) * page_bytes / tokens
    return {
        "system": system.name,
        "settings": asdict(system.settings),
        "fraction": fraction,
        "pages": pages,
        "pages_bytes": pages * page_bytes,
        "filled": max(run.filled for run in runs),
        "ttft_s": spread([run.ttft for run in runs]),
        "tpot_s": {**measured, "runs": [run.tpot for run in runs]},
        "predicted_tpot_ms": None if predicted is None else 1000 * predicted,
        "predicted_ratio": None if predicted is None else predicted / measured["median"],
        "hits": {kind: total(f"hits_{kind}") / accesses for kind in _HITS},
        "blocks_resident": total("blocks_resident") / wanted,
        "blocks_prefetched": total("blocks_prefetched") / wanted,
        "bytes_per_token": {
            "demand": total("link_bytes_demand") / tokens,
            "prefetch": (total("link_bytes_next") + total("link_bytes_later")) / tokens,
            "wasted": total("prefetch_wasted") * page_bytes / tokens,
            "missing": missing,
        },
        "link_busy_share": total("link_busy_seconds") / wall,
        "stall_share": total("stall_seconds") / wall,
        "compute_share": total("compute_seconds") / wall,
        "dense_share": (wall - spent["experts"]) / wall,
        "us_per_layer": {
            name: 1e6 * costs[name] / layers_run
            for name in ("python", "predict", "begin", "prefetch", "finish")
        },
        "floor_s": {"link": None if bandwidth is None else missing / bandwidth, "compute": floor},
    }
