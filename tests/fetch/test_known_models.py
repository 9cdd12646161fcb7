"""The known models on a machine: which fit, in which order, and how near brief estimates are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from moechat.fetch import known_models as module
from moechat.fetch.known_models import KnownModel, known_models, known_names
from moechat.fetch.sources import speeds_by_bits
from moechat.hardware.profile_file import reference_names, reference_profile
from moechat.hub.known_shapes import find_shape
from moechat.planning.expect import Expected, expect

CARD = "rtx3060-12g"


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models whose estimates take little time."""
    chosen = {name: module.ALIASES[name] for name in ("glm-air", "olmoe", "gpt-oss", "qwen-moe")}
    monkeypatch.setattr(module, "ALIASES", chosen)


def test_each_known_model_has_one_name_and_a_shape() -> None:
    names = known_names()
    assert len(set(names.values())) == len(names)
    assert set(names.values()) == set(module.ALIASES.values())
    assert all(find_shape(name) for name in names)


@pytest.mark.parametrize("model", ["gpt-oss", "qwen-moe", "olmoe"])
@pytest.mark.parametrize("machine", [CARD, "ssd-only-16g"])
def test_a_brief_estimate_is_near_the_other(model: str, machine: str) -> None:
    profile = reference_profile(machine)
    whole, brief = (expect(model, profile=profile, brief=short, bits=4) for short in (False, True))
    assert brief.tokens_per_s == pytest.approx(whole.tokens_per_s, rel=0.04)
    assert brief == replace(whole, tokens_per_s=brief.tokens_per_s, low=None, high=None)
    assert whole.near == ("vram" if machine == CARD else "ram")


@pytest.mark.usefixtures("few")
def test_the_largest_that_is_fast_comes_first_and_what_does_not_fit_last() -> None:
    found = known_models(profile=reference_profile(CARD))
    assert [model.name for model in found] == ["gpt-oss", "qwen-moe", "olmoe", "glm-air"]
    assert found[-1].expected is None
    assert found[-1].least_bytes is not None
    assert "the least that works" in found[-1].refused
    speeds = speeds_by_bits("gpt-oss", None, profile=reference_profile(CARD), brief=True)
    assert found[0].expected == speeds[4]


@pytest.mark.usefixtures("few")
def test_options_of_loading_hold() -> None:
    profile = reference_profile(CARD)
    by_name = {
        model.name: model for model in known_models(profile=profile, load={"vram": 6 << 30, "bits": 8})
    }
    found = by_name["olmoe"].expected
    assert found is not None
    assert found.bits == 8
    assert found.near_bytes <= 6 << 30
    long = known_models(profile=profile, load={"ctx": 20_000})
    refused = {model.name: model.refused for model in long}
    assert "20000" in refused["olmoe"]
    assert not refused["gpt-oss"]


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("machine", [None, *reference_names()])
def test_every_machine_has_a_list(machine: str | None) -> None:
    profile = None if machine is None else reference_profile(machine)
    found = known_models(profile=profile)
    assert len(found) == 4
    assert all((model.expected is None) == bool(model.refused) for model in found)


def test_the_order_is_by_size_above_the_two_speeds_and_by_speed_below() -> None:
    def model(name: str, rate: float | None, parameters: int = 1) -> KnownModel:
        if rate is None:
            return KnownModel(name, name, None, "no", 5)
        values: Any = (rate, None, None, "measured", parameters, 1, 4, 1, 1, 1.0, None, 1, "ram")
        return KnownModel(name, name, Expected(*values))

    models = [
        model("none", None),
        model("slow", 1.0, 900),
        model("less-slow", 4.9, 5),
        model("readable", 5.0, 800),
        model("small", 90.0, 10),
        model("large", 10.0, 100),
    ]
    order = [each.name for each in sorted(models, key=module._order)]
    assert order == ["large", "small", "readable", "less-slow", "slow", "none"]
