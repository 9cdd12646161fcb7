"""Measurements: complete figures for every system and fraction, and an unchanged model afterwards."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moechat import _native
from moechat.bench import call_timers, measure, report, runs
from moechat.bench.decode import Bench
from moechat.bench.measure import run_bench
from moechat.bench.options import BenchOptions, LinkChoice, parse_systems
from moechat.bench.report import assumptions
from moechat.engine import Engine
from moechat.errors import DoesNotFitError, MoechatError, UsageError
from moechat.offload.tier import ExpertTier
from moechat.routing import Trace


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moechat.bench.speeds._COMPUTE_SECONDS", 0.01)
    monkeypatch.setattr("moechat.bench.speeds._LINK_SECONDS", 0.01)


def options(systems: str = "mixtral-offloading,auto:split=0.5", **changes: Any) -> BenchOptions:
    sizes = {"prompt_tokens": 6, "warmup_tokens": 4, "tokens": 5, "runs": 2, "fractions": (0.25, 0.5)}
    return BenchOptions(systems=parse_systems(systems), **{**sizes, **changes})


def check_case(case: dict[str, Any]) -> None:
    assert sum(case["hits"].values()) == pytest.approx(1.0)
    assert all(0 <= case[f"{part}_share"] <= 1 for part in ("stall", "compute", "dense"))
    # The link has one busy clock, the tokens another: at their edges they may differ a little.
    assert 0 <= case["link_busy_share"] <= 1.05
    assert 0 < case["tpot_s"]["min"] <= case["tpot_s"]["median"] <= case["tpot_s"]["max"]
    assert case["ttft_s"]["min"] > 0
    assert all(value >= 0 for value in case["bytes_per_token"].values())
    assert set(case["us_per_layer"]) == {"python", "predict", "begin", "prefetch", "finish"}
    assert all(0 <= value < 1e5 for value in case["us_per_layer"].values())
    assert 0 < case["filled"] <= 1
    assert case["floor_s"]["compute"] > 0
    assert 0 <= case["floor_s"]["link"] < case["tpot_s"]["max"] * 2


def test_every_system_is_measured_at_every_fraction(engine: Engine) -> None:
    messages: list[str] = []
    result = run_bench(engine, options(), report=messages.append)
    json.dumps(result)
    assert [(case["fraction"], case["system"]) for case in result["cases"]] == [
        (0.25, "mixtral-offloading"),
        (0.25, "auto:split=0.5"),
        (0.5, "mixtral-offloading"),
        (0.5, "auto:split=0.5"),
    ]
    for case in result["cases"]:
        check_case(case)
        assert len(case["tpot_s"]["runs"]) == 2
    # 3 layers x 8 experts x 2 blocks
    assert [case["pages"] for case in result["cases"]] == [12, 12, 24, 24]
    assert result["model"]["top_k"] == 2
    assert result["routing"]["source"] == "model"
    assert result["prediction"]["source"] == "next-router"
    assert len(result["prediction"]["right_of_top_k"]) == 3
    assert result["link"]["kind"] == "file"
    assert result["link"]["bandwidth"] > 0
    # In turns: A B A B, not A A B B.
    order = [
        line.split(", ")[2].split(":")[0]
        for line in messages
        if line.startswith("0.25") and "memory" not in line
    ]
    assert order == ["mixtral-offloading", "auto", "mixtral-offloading", "auto"]


def test_a_replayed_trace_chooses_the_experts(
    engine: Engine, trace_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen: list[tuple[int, np.ndarray[Any, Any]]] = []
    real = call_timers.TimedCalls.begin

    def begin(self: Any, layer: int, index: np.ndarray[Any, Any], weight: Any) -> None:
        chosen.append((layer, index.copy()))
        real(self, layer, index, weight)

    monkeypatch.setattr(call_timers.TimedCalls, "begin", begin)
    wanted = options("auto", routing=trace_file, runs=1, fractions=(0.5,), accuracy=0.9)
    result = run_bench(engine, wanted)
    assert result["routing"]["source"] == "trace"
    assert result["prediction"]["source"] == "drawn"
    assert result["prediction"]["accuracy"] == 0.9
    check_case(result["cases"][0])
    # Every pass of a run begins at the same place of the same sequence: the second, which is long enough.
    one_run = 3 * (1 + 4 + 5)
    assert len(chosen) % one_run == 0
    runs = [chosen[at : at + one_run] for at in range(0, len(chosen), one_run)]
    for run in runs[1:]:
        for (layer, index), (same_layer, same_index) in zip(runs[0], run, strict=True):
            assert layer == same_layer
            assert np.array_equal(index, same_index)
    # A permutation: how many tokens name the same expert in a layer is as recorded.
    recorded = Trace.read(trace_file).head(6, first_sequence=1).experts[:, 0]
    assert chosen[0][1].shape == (6, 2)
    assert recorded.shape == (6, 3)


def test_simulated_links_take_time_and_move_no_bytes_when_a_trace_chooses(
    engine: Engine, trace_file: Path
) -> None:
    common = {"runs": 1, "fractions": (0.25,), "routing": trace_file}
    slow = run_bench(engine, options("on-demand", link=LinkChoice("sim", bandwidth=1e6), **common))
    assert slow["link"]["bandwidth"] == 1e6
    assert not slow["link"]["copy"]
    case = slow["cases"][0]
    missing = case["bytes_per_token"]["missing"]
    assert missing > 0
    assert case["floor_s"]["link"] == pytest.approx(missing / 1e6)
    assert case["tpot_s"]["max"] >= case["floor_s"]["link"]
    assert case["stall_share"] > 0.3
    ratio = run_bench(engine, options("on-demand", link=LinkChoice("sim", ratio=16.0), **common))
    assert ratio["link"]["compute_to_link"] == pytest.approx(16.0)


def test_simulated_links_move_bytes_when_routing_depends_on_them(engine: Engine) -> None:
    result = run_bench(engine, options("auto", link=LinkChoice("sim", ratio=1.0), runs=1, fractions=(0.5,)))
    assert result["link"]["copy"]


def test_the_model_is_left_as_it_was(engine: Engine) -> None:
    before = [part.module._moechat_layer for part in Bench(engine).parts]
    logits = engine.logits([1, 2, 3])
    run_bench(engine, options("auto", runs=1, fractions=(0.5,)))
    assert [part.module._moechat_layer for part in Bench(engine).parts] == before
    assert (engine.logits([1, 2, 3]) == logits).all()


def test_near_tiers_are_closed_when_a_measurement_fails(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[ExpertTier] = []
    closed: list[ExpertTier] = []

    class Watched(ExpertTier):
        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            made.append(self)

        def close(self) -> None:
            closed.append(self)
            super().close()

    def fail(*_: Any) -> float:
        raise KeyboardInterrupt

    monkeypatch.setattr(runs, "ExpertTier", Watched)
    counted = 0

    def reports(_: str) -> None:
        nonlocal counted
        counted += 1
        if counted == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_bench(engine, options(), report=reports)
    assert made
    assert closed == made[1:] + made[:1]


def test_without_memory_for_everything_there_is_no_floor(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "_RESIDENT_SHARE", 1e-9)
    result = run_bench(engine, options("auto", runs=1, fractions=(0.5,)))
    assert result["resident"] is None
    assert result["cases"][0]["floor_s"]["compute"] is None


def test_a_size_in_bytes_is_converted_into_pages(engine: Engine) -> None:
    page = engine.loaded.store.geometry.record_bytes
    result = run_bench(engine, options("auto", runs=1, ram=10 * page + 5))
    (case,) = result["cases"]
    assert case["pages"] == 10
    assert case["fraction"] == pytest.approx(10 / 48)
    with pytest.raises(UsageError, match="at least 2 are needed"):
        run_bench(engine, options("auto", runs=1, ram=page))


def test_memory_beyond_the_need_is_not_taken(engine: Engine) -> None:
    (case,) = run_bench(engine, options("auto", runs=1, ram=1 << 40))["cases"]
    # All blocks, and those of a token's two experts of two blocks in flight.
    assert case["pages"] == 48 + 4
    assert case["fraction"] == 1.0


@pytest.mark.parametrize("wanted", [{"ram": 1 << 40}, {"fractions": (0.25, 1.0)}])
def test_more_memory_than_is_free_is_refused_before_anything_is_measured(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, wanted: dict[str, Any]
) -> None:
    free = 47 * engine.loaded.store.geometry.record_bytes
    monkeypatch.setattr(measure, "available_bytes", lambda: free)
    monkeypatch.delattr(measure, "compute_rate")
    with pytest.raises(DoesNotFitError, match="of memory are free"):
        run_bench(engine, options("auto", **wanted))


@pytest.mark.parametrize(
    ("link", "name"),
    [
        (LinkChoice(), "the file link to .*tiny.*"),
        (LinkChoice("sim", bandwidth=2e6), r"the simulated link at 2e\+06 bytes a second"),
    ],
)
@pytest.mark.parametrize("fill", [0, 2])
def test_a_link_that_fails_outside_of_a_pass_is_named(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, trace_file: Path, link: LinkChoice, name: str, fill: int
) -> None:
    def fail(_: ExpertTier) -> None:
        raise _native.LinkError("nothing has arrived")

    monkeypatch.setattr(measure, "_RESIDENT_SHARE", 1e-9)  # else its link is the first one
    monkeypatch.setattr(ExpertTier, "drain", fail)
    wanted = options("auto", routing=trace_file, fill_tokens=fill, link=link)
    with pytest.raises(MoechatError, match=f"{name} failed: nothing has arrived"):
        run_bench(engine, wanted)


def test_sequences_of_one_token_have_no_locality(engine: Engine, tmp_path: Path) -> None:
    path = tmp_path / "ones.npz"
    experts = np.random.default_rng(0).random((40, 5, 6)).argsort(axis=-1)[..., :3].astype(np.int32)
    Trace(experts, np.arange(41), 6).write(path)
    result = run_bench(engine, options("auto", routing=path, runs=1, fractions=(0.5,)))
    json.dumps(result, allow_nan=False)
    assert result["routing"]["locality_before"] is None
    assert result["routing"]["locality_after"] is None
    assert "no locality" in " ".join(assumptions(result))


def paths_of(value: Any, path: str = "") -> set[str]:
    """Keys with those above them, without the spreads' and the settings' own."""
    if isinstance(value, list):
        return set().union(*(paths_of(item, path) for item in value))
    if not isinstance(value, dict) or path == "cases.settings":
        return set()
    found = set()
    for key, inner in value.items():
        if key not in ("median", "min", "max"):
            here = f"{path}.{key}" if path else key
            found |= {here} | paths_of(inner, here)
    return found


def test_every_key_is_described_and_every_described_key_is_there(engine: Engine, trace_file: Path) -> None:
    common: dict[str, Any] = {"runs": 1, "fractions": (0.5,)}
    results = [
        run_bench(engine, options("auto", **common)),
        run_bench(engine, options("auto", routing=trace_file, **common)),
    ]
    assert report.__doc__ is not None
    described = set()
    for section in re.split(r"^- ", report.__doc__, flags=re.MULTILINE)[1:]:
        name, *keys = re.findall(r"``([^`]+)``", section)
        described |= {name} | {f"{name}.{key}" for key in keys}
    assert described - {"assumptions"} == set().union(*map(paths_of, results))


def test_more_tokens_than_the_context_holds_are_refused(engine: Engine) -> None:
    with pytest.raises(UsageError, match="the context holds 256"):
        run_bench(engine, options(tokens=300))


def test_a_prompt_is_repeated_and_answered_greedily(engine: Engine) -> None:
    work = measure.Measurement(Bench(engine), options(), [5, 6, 7, 8], lambda _: None)
    assert work.runs.tokens[:6] == [5, 6, 7, 8, 5, 6]
    steps = engine.generate([5, 6, 7, 8, 5, 6], max_new_tokens=9, temperature=0.0)
    assert work.runs.tokens[6:] == [step.token_id for step in steps]


def test_every_assumption_is_reported(engine: Engine, trace_file: Path) -> None:
    wanted = options("auto", routing=trace_file, runs=1, fractions=(0.5,), link=LinkChoice("sim", ratio=2.0))
    result = run_bench(engine, wanted)
    text = " ".join(assumptions(result, ["3 of 48 decoder layers"], random_weights=True))
    for assumption in (
        "4 that fill the cache",
        "Weights are random",
        "3 of 48 decoder layers",
        "trace.npz",
        "5 layers of 6 experts, 3 a token",
        "by chance",
        "predicted with probability 0.7",
        "simulated",
        "do not move",
    ):
        assert assumption in text
