"""The range of a plan's speed where the CPU's rate is an estimate with a range."""

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
from moechat.hardware.profile import Figure, HardwareProfile
from moechat.options import LoadOptions
from moechat.outline import find_outline
from moechat.planning import Plan
from moechat.planning.cases import Cases
from moechat.planning.cpu_range import CpuRange
from moechat.planning.expect import expect
from moechat.planning.machine import find_machine
from moechat.planning.make import brief_plan
from moechat.planning.source import find_model

RULE = "a rule with a 1"


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"hidden_size": 1024, "moe_intermediate_size": 512, "num_experts": 32, "num_hidden_layers": 4}
    path = tmp_path_factory.mktemp("config") / "range.json"
    tiny_config("qwen3_moe", 0, **sizes).to_json_file(path)
    return path


def machine(low: float, value: float, high: float, *, gpu: bool = True) -> HardwareProfile:
    """A desktop whose CPU computes experts at ``value`` GB/s, a third of that while the link is busy."""

    def of(share: float) -> Figure:
        low_, value_, high_ = (1e9 * share * end for end in (low, value, high))
        return Figure(value_, "estimate", RULE, low_, high_)

    return replace(
        desktop(gpu=gpu),
        expert_rate={4: {1: of(0.3), 6: of(1.0)}},
        expert_rate_together={4: of(0.4)},
        expert_flops={4: of(7.0)},
    )


def exact(rate: float, *, gpu: bool = True) -> HardwareProfile:
    """The same desktop with a known rate."""
    return machine(rate, rate, rate, gpu=gpu).with_experts_at("low")


def found(plan: Plan) -> CpuRange:
    assert plan.speed is not None
    assert plan.speed.cpu_range is not None
    return plan.speed.cpu_range


@pytest.mark.parametrize(
    ("gpu", "memory"),
    [(True, {"vram": "830M"}), (True, {"vram": "8G"}), (False, {"ram": "700M"}), (False, {})],
)
def test_a_brief_plan_has_the_figures_of_the_whole_one(
    config: Path, gpu: bool, memory: dict[str, str]
) -> None:
    profile = machine(8, 20, 60, gpu=gpu)
    whole, brief = (plan(config, profile=profile, **memory) for plan in (moechat.plan, brief_plan))
    assert whole.speed is not None
    assert brief.speed is not None
    assert brief.speed.cpu_rates == whole.speed.cpu_rates
    if whole.speed.cpu_range is not None:
        assert whole.speed.cpu_rates == whole.speed.cpu_range.same_plan_rates
    expected = replace(whole, other_budgets=(), speed=replace(whole.speed, cpu_range=None))
    assert brief == expected


def test_only_a_plan_keeps_the_outline_and_speeds_read_it(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOECHAT_HOME", str(tmp_path / "home"))
    before = expect(config, profile=machine(8, 20, 60), vram="830M")
    brief_plan(config, profile=machine(8, 20, 60), vram="830M", keep=False)
    assert not (tmp_path / "home").exists()
    moechat.plan(config, profile=machine(8, 20, 60), vram="830M")
    assert len(list((tmp_path / "home" / "cache" / "outlines").iterdir())) == 1
    monkeypatch.setattr(find_outline, "count_outline", lambda *_: pytest.fail("the model was counted"))
    assert expect(config, profile=machine(8, 20, 60), vram="830M") == before


@pytest.mark.parametrize("gpu", [True, False])
def test_the_ends_are_the_plans_of_machines_with_these_rates(config: Path, gpu: bool) -> None:
    budget = {"vram": "830M"} if gpu else {"ram": "1700M"}
    # Beside a GPU a slow CPU would compute nothing.
    low, value, high = (30, 60, 120) if gpu else (8, 20, 60)
    made = moechat.plan(config, profile=machine(low, value, high, gpu=gpu), **budget)  # type: ignore[arg-type]
    ends = found(made)
    assert ends.bytes_per_s == value * 1e9
    for end, rate in ((ends.low, low), (ends.high, high)):
        there = moechat.plan(config, profile=exact(rate, gpu=gpu), **budget)  # type: ignore[arg-type]
        assert there.speed is not None
        assert end.bytes_per_s == pytest.approx(rate * 1e9)
        assert end.tokens_per_s == pytest.approx(there.speed.tokens_per_s)
        assert end.bottleneck == there.speed.bottleneck
        rows = zip(made.layers, there.layers, strict=True)
        targets = [(one.experts, one.blocks) != (other.experts, other.blocks) for one, other in rows]
        assert end.changed_layers == sum(targets)
        if not end.changed_layers:
            assert end.same_plan_tokens_per_s == pytest.approx(end.tokens_per_s)
    assert made.speed is not None
    assert ends.low.tokens_per_s < made.speed.tokens_per_s < ends.high.tokens_per_s


def test_the_plan_itself_is_that_of_the_value(config: Path) -> None:
    made = moechat.plan(config, profile=machine(8, 20, 60), vram="830M")
    without = moechat.plan(config, profile=exact(20), vram="830M")
    assert made.layers == without.layers
    assert made.speed is not None
    assert without.speed is not None
    assert made.speed.decode == without.speed.decode
    assert without.speed.cpu_range is None


def test_an_allocation_at_its_own_costs_has_the_time_of_its_plan(config: Path) -> None:
    options = LoadOptions.parse({"vram": "830M"})
    cases = Cases(find_model(str(config), options.bits), find_machine(exact(100), gpu=True), options)
    case = cases.case(Budget(830 << 20), ctx=128, ram_share=1.0)
    assert case.allocation is not None
    assert cases.decode_with(case, case.costs).seconds == pytest.approx(case.decode.seconds)
    # A faster CPU helps the same targets too.
    faster = cases.on(find_machine(exact(300), gpu=True))
    costs = faster.case(Budget(830 << 20), ctx=128, ram_share=1.0).costs
    assert faster.decode_with(case, costs).seconds < case.decode.seconds


def test_where_the_cpu_computes_nothing_there_is_no_range(config: Path) -> None:
    for options in ({"vram": "8G"}, {"vram": "830M", "system": "auto:miss=fetch"}):
        made = moechat.plan(config, profile=machine(8, 20, 60), **options)  # type: ignore[arg-type]
        assert made.speed is not None
        assert made.speed.cpu_range is None
        assert made.to_json()["speed"]["cpu_range"] is None
        assert "CPU rate" not in render(made)


def test_the_range_is_in_the_text_and_in_the_json(config: Path) -> None:
    made = moechat.plan(config, profile=machine(8, 20, 60), vram="830M")
    ends = found(made)
    line = next(line for line in render(made).splitlines() if line.startswith("CPU rate"))
    slow, fast = f"{ends.low.tokens_per_s:.1f}", f"{ends.high.tokens_per_s:.1f}"
    assert f"20 GB/s (8 to 60): {slow} to {fast} tokens a second; " in line
    plain = json.loads(json.dumps(made.to_json(), allow_nan=False))["speed"]
    assert plain["cpu_range"]["bytes_per_s"] == 20e9
    keys = {
        "bytes_per_s",
        "tokens_per_s",
        "same_plan_tokens_per_s",
        "changed_layers",
        "bottleneck",
        "strategy",
    }
    assert set(plain["cpu_range"]["low"]) == set(plain["cpu_range"]["high"]) == keys
    figures = {figure["name"]: figure for figure in plain["figures"]}
    experts = figures["experts on the CPU, bytes/s"]
    assert (experts["low"], experts["high"]) == (8e9, 60e9)
    assert "low" not in figures["graphics memory, bytes/s"]


def test_what_changes_is_named_and_else_that_nothing_does(config: Path) -> None:
    made = moechat.plan(config, profile=machine(8, 20, 60), vram="830M")
    assert made.speed is not None
    ends = found(made)
    same = replace(
        ends.low,
        changed_layers=0,
        bottleneck=made.speed.bottleneck,
        strategy=made.strategy,
        tokens_per_s=ends.low.same_plan_tokens_per_s,
    )
    nothing = replace(ends, low=same, high=same)
    other = replace(same, changed_layers=3, tokens_per_s=1.03 * same.same_plan_tokens_per_s)
    switched = replace(other, strategy="nothing fetched ahead")
    near = replace(same, bottleneck="experts that are near: 60 % of a token's time")
    if near.bottleneck.partition(":")[0] == made.speed.bottleneck.partition(":")[0]:
        near = replace(same, bottleneck="the head: 60 % of a token's time")

    def text(cpu_range: CpuRange) -> str:
        assert made.speed is not None
        changed = replace(made, speed=replace(made.speed, cpu_range=cpu_range))
        return next(line for line in render(changed).splitlines() if line.startswith("CPU rate"))

    assert text(nothing).endswith("; the plan stays the same")
    words = "; at 8 GB/s another C or θ in 3 of 4 layers would be 3.0 % faster"
    assert text(replace(nothing, low=other)).endswith(words)
    assert "at 8 GB/s another strategy (nothing fetched ahead) would be 3.0 % faster" in text(
        replace(nothing, low=switched)
    )
    hardly = replace(other, tokens_per_s=1.004 * same.same_plan_tokens_per_s)
    assert text(replace(nothing, low=hardly)).endswith("; this plan stays within 1 % of the best")
    assert f"at 8 GB/s the bottleneck is {near.bottleneck}" in text(replace(nothing, high=near))


def test_the_shipped_machines_have_a_range() -> None:
    made = moechat.plan("olmoe", profile="rtx3060-12g", vram="3500M")
    ends = found(made)
    assert ends.low.bytes_per_s < ends.bytes_per_s < ends.high.bytes_per_s
    assert ends.low.tokens_per_s < ends.high.tokens_per_s
