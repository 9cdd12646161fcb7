"""Figures computed from counters: every share and every sum, checked by hand."""

from __future__ import annotations

import pytest

from moechat.bench.figures import Run, case_figures, spread
from moechat.bench.options import parse_systems

NATIVE = {
    "hits_full": 6,
    "hits_prefetch": 2,
    "hits_top": 1,
    "hits_miss": 1,
    "blocks_wanted": 40,
    "blocks_resident": 28,
    "blocks_prefetched": 4,
    "layers_run": 10,
    "compute_seconds": 0.2,
    "stall_seconds": 0.1,
    "link_bytes_demand": 8000,
    "link_bytes_next": 3000,
    "link_bytes_later": 1000,
    "prefetch_wasted": 2,
    "link_busy_seconds": 0.5,
}
SECONDS = {"experts": 0.6, "begin": 0.01, "prefetch": 0.02, "finish": 0.4, "predict": 0.03}


def test_figures_add_up() -> None:
    (system,) = parse_systems("auto:split=0.5")
    runs = [
        Run(2.0, (0.1, 0.2, 0.7), SECONDS, NATIVE, 0.9),
        Run(4.0, (0.3, 0.3, 0.4), SECONDS, NATIVE, 1.0),
    ]
    case = case_figures(system, runs, fraction=0.25, pages=7, page_bytes=1000, bandwidth=4000.0, floor=0.15)
    assert case["system"] == "auto:split=0.5"
    assert case["settings"]["split"] == 0.5
    assert (case["fraction"], case["pages"], case["pages_bytes"], case["filled"]) == (0.25, 7, 7000, 1.0)
    assert case["ttft_s"] == {"median": 3.0, "min": 2.0, "max": 4.0}
    assert case["tpot_s"] == {"median": 0.25, "min": 0.2, "max": 0.3, "runs": [0.2, 0.3]}
    assert case["hits"] == pytest.approx({"full": 0.6, "prefetch": 0.2, "top": 0.1, "miss": 0.1})
    assert case["blocks_resident"] == pytest.approx(0.7)
    assert case["blocks_prefetched"] == pytest.approx(0.1)
    # Two runs of three tokens each.
    assert case["bytes_per_token"] == pytest.approx(
        {"demand": 16000 / 6, "prefetch": 8000 / 6, "wasted": 4000 / 6, "missing": 24000 / 6}
    )
    assert case["floor_s"] == pytest.approx({"link": 1.0, "compute": 0.15})
    assert case["link_busy_share"] == pytest.approx(0.5)
    assert case["stall_share"] == pytest.approx(0.1)
    assert case["compute_share"] == pytest.approx(0.2)
    assert case["dense_share"] == pytest.approx(0.4)
    assert case["us_per_layer"] == pytest.approx(
        {"python": 14000.0, "predict": 3000.0, "begin": 1000.0, "prefetch": 2000.0, "finish": 10000.0}
    )


def test_figures_without_accesses_do_not_divide_by_zero() -> None:
    (system,) = parse_systems("auto")
    native = dict.fromkeys(NATIVE, 0)
    run = Run(1.0, (0.5,), dict.fromkeys(SECONDS, 0.0), native, 0.0)
    case = case_figures(system, [run], fraction=1.0, pages=2, page_bytes=10, bandwidth=1.0, floor=None)
    assert sum(case["hits"].values()) == 0
    assert case["floor_s"] == {"link": 0.0, "compute": None}
    assert spread([3.0, 1.0, 2.0]) == {"median": 2.0, "min": 1.0, "max": 3.0}
