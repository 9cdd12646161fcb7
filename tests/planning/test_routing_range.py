"""The range of a plan's speed where the model's routing was not recorded."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from plan_support import desktop
from tiny import tiny_config

import moechat
from moechat.budget.memory_plan import Budget
from moechat.cli.commands.plan import render
from moechat.configurator.warm_start import default_statistics
from moechat.options import LoadOptions
from moechat.planning import Plan
from moechat.planning.cases import Cases
from moechat.planning.machine import find_machine
from moechat.planning.routing import routing_of
from moechat.planning.routing_range import routing_range
from moechat.planning.source import find_model

SIZES = {"hidden_size": 1024, "moe_intermediate_size": 512, "num_experts": 32, "num_hidden_layers": 4}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("config") / "range.json"
    tiny_config("qwen3_moe", 0, **SIZES).to_json_file(path)
    return path


@pytest.fixture(scope="module")
def assumed(config: Path) -> Plan:
    return moechat.plan(config, profile=desktop(), vram="830M")


def test_a_model_without_recorded_routing_has_a_range_around_its_speed(assumed: Plan) -> None:
    assert assumed.statistics_basis == "assumed"
    assert "gpt-oss-20b and DeepSeek-V2-Lite" in assumed.statistics_source
    assert assumed.speed is not None
    ends = assumed.speed.routing_range
    assert ends is not None
    assert ends.low.tokens_per_s < assumed.speed.tokens_per_s < ends.high.tokens_per_s
    assert ends.low.hit_rate < assumed.speed.decode.hit_rate < ends.high.hit_rate


def test_the_range_is_in_the_text_and_in_the_json(assumed: Plan) -> None:
    assert assumed.speed is not None
    ends = assumed.speed.routing_range
    assert ends is not None
    rates = [ends.low.tokens_per_s, assumed.speed.tokens_per_s, ends.high.tokens_per_s]
    low, middle, high = (f"{rate:.1f}" for rate in rates)
    line = next(line for line in render(assumed).splitlines() if line.startswith("tokens a second"))
    assert line.split(None, 3)[3].startswith(f"{middle} ({low} to {high}, by how the model routes) after")
    plain = json.loads(json.dumps(assumed.to_json(), allow_nan=False))
    assert plain["statistics"]["basis"] == "assumed"
    shown = plain["speed"]["routing_range"]
    assert {end: set(values) for end, values in shown.items()} == {
        "low": {"tokens_per_s", "hit_rate"},
        "high": {"tokens_per_s", "hit_rate"},
    }
    assert shown["low"]["tokens_per_s"] == ends.low.tokens_per_s


def test_where_all_experts_are_near_routing_changes_nothing(config: Path) -> None:
    made = moechat.plan(config, profile=desktop(), vram="8G")
    assert made.speed is not None
    assert (made.far, made.speed.routing_range) == (None, None)
    assert made.to_json()["speed"]["routing_range"] is None
    assert "by how the model routes" not in render(made)


@pytest.mark.parametrize(
    ("sizes", "basis"),
    [({"num_hidden_layers": 24}, "trace"), ({"num_hidden_layers": 6}, "assumed")],
)
def test_the_recorded_model_has_one_figure_and_others_of_its_family_a_range(
    tmp_path: Path, sizes: dict[str, int], basis: str
) -> None:
    shape = {"num_local_experts": 32, "num_experts_per_tok": 4, "intermediate_size": 256, "hidden_size": 256}
    path = tmp_path / "shape.json"
    tiny_config("gpt_oss", 0, **shape, **sizes).to_json_file(path)
    options = LoadOptions.parse({"vram": "4G"})
    cases = Cases(find_model(str(path), None), find_machine(desktop(), gpu=True), options)
    assert cases.routing.basis == basis
    assert (cases.routing.bounds is None) == (basis == "trace")


def test_recorded_tokens_narrow_the_range_until_none_is_left(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from moechat.planning import routing

    options = LoadOptions.parse({"vram": "830M"})
    found = find_model("demo", None)
    demo = Cases(found, find_machine(desktop(), gpu=True), LoadOptions.parse({"vram": "4G"}))
    # Not those of ``demo``, to which other tests of this process may have added recorded tokens.
    sizes = (demo.shape.layers, demo.shape.experts, demo.shape.top_k)
    counted = default_statistics(demo.outline.model_type, *sizes, policy=options.settings.policy)
    widths = []
    for tokens in (0, 400, 3999, 4000):
        seen = None
        if tokens:
            share = tokens / 100_000
            counts = {
                name: (getattr(counted, name) * share).astype("int64")
                for name in ("predicted", "activations", "ranks", "hits_of_prediction", "ranks_of_prediction")
            }
            seen = replace(counted, tokens=tokens, **counts)
        monkeypatch.setattr(routing, "saved_statistics", lambda *_arguments, seen=seen: seen)
        bounds = routing_of(found, "qwen3_moe", demo.shape, options.settings).bounds
        if bounds is None:
            widths.append(0.0)
            continue
        low, high = bounds
        widths.append(float((high.hit_rate - low.hit_rate)[:, demo.shape.experts // 4].mean()))
    assert widths[0] > 1.8 * widths[1] > 1.8 * 4 * widths[2] > 0
    assert widths[3] == 0


def test_the_ends_are_speeds_of_the_same_plan(config: Path) -> None:
    options = LoadOptions.parse({"vram": "830M"})
    cases = Cases(find_model(str(config), None), find_machine(desktop(), gpu=True), options)
    case = cases.case(Budget(830 << 20), ctx=128, ram_share=1.0)
    found = routing_range(cases, case, 1.0)
    assert found is not None
    assert cases.decode_at(case, 1.0).seconds == pytest.approx(case.decode.seconds)
    assert cases.routing.bounds is not None
    low = cases.on(statistics=cases.routing.bounds[0])
    assert found.low.tokens_per_s == low.decode_at(case, 1.0).rate
