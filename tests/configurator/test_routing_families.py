"""The range for models whose routing was not recorded, against recordings of models that it does not know."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from moechat import _native
from moechat.configurator.routing_families import (
    ACCURACY_SPREAD,
    FAMILIES,
    SKEW_SPREAD,
    family_bounds,
    family_of,
    recorded_model,
    recorded_names,
)
from moechat.configurator.warm_start import default_statistics
from moechat.routing.trace import Trace

DATA = Path(__file__).parents[1] / "data"
SHARES = (1 / 8, 1 / 4, 3 / 8, 1 / 2, 3 / 4)


@pytest.mark.parametrize("name", ["gpt_oss_20b_part", "deepseek_v2_lite_part"])
def test_the_range_of_an_unknown_model_covers_recorded_routing_at_every_share(name: str) -> None:
    trace = Trace.read(DATA / f"{name}.npz")
    capacities = [round(share * trace.num_experts) for share in SHARES]
    policy = _native.EvictionPolicy("blend", trace.layers, trace.num_experts)
    hits = _native.demand_hits(policy, trace.experts, capacities).mean(axis=1)
    recorded = hits / (trace.tokens * trace.top_k)
    # The layers of the data are spread over the model, so few of them are early ones, which route evenly.
    low, high = (
        default_statistics(
            "unheard_of", 24, trace.num_experts, trace.top_k, policy="blend", family=family
        ).hit_rate[:, capacities]
        for family in family_bounds("unheard_of")
    )
    assert (low.mean(axis=0) < recorded).all()
    assert (recorded < high[8:].mean(axis=0) + 0.03).all()


def test_the_width_is_that_of_the_known_models() -> None:
    known = [FAMILIES[name].skew for name in ("gpt_oss", "deepseek_v2", "qwen2_moe")]
    assert (max(known) / min(known)) ** 0.5 == pytest.approx(SKEW_SPREAD, rel=0.02)
    low, high = family_bounds("unheard_of")
    assert low.skew <= min(known) * 1.02
    assert high.skew >= max(known)
    published = [FAMILIES[name].accuracy for name in ("mixtral", "qwen2_moe")]
    assert max(published) - min(published) == pytest.approx(ACCURACY_SPREAD)


@pytest.mark.parametrize("model_type", [*FAMILIES, "unheard_of"])
def test_the_range_lies_around_the_family(model_type: str) -> None:
    low, high = family_bounds(model_type)
    middle = family_of(model_type)
    assert low.skew < middle.skew < high.skew
    assert low.accuracy < middle.accuracy < high.accuracy < 1
    rates = [
        default_statistics(model_type, 12, 32, 4, family=family).hit_rate for family in (low, middle, high)
    ]
    assert (np.diff([rate[:, 8].mean() for rate in rates]) > 0.02).all()


def test_a_larger_model_of_a_recorded_family_was_not_recorded() -> None:
    found = recorded_model("gpt_oss", 24, 32, 4)
    assert found is not None
    assert (found.name, found.tokens) == ("gpt-oss-20b", 12_000)
    assert recorded_model("gpt_oss", 36, 128, 4) is None
    assert recorded_model("qwen3_moe", 48, 128, 8) is None
    assert recorded_names() == ["gpt-oss-20b", "DeepSeek-V2-Lite"]
