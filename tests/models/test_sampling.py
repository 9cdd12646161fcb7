"""Sampling follows the settings, and the settings are checked."""

from __future__ import annotations

import math
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import (
    GenerationConfig,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from moechat import _native
from moechat.errors import MoechatError, UsageError
from moechat.models.sampling import Sampler, SamplingSettings

LOGITS = torch.tensor([0.0, 1.0, 2.0, 3.0])
HISTORY = torch.tensor([[0]])


def draws(settings: SamplingSettings, count: int = 400, seed: int = 1) -> Counter[int]:
    sampler = Sampler(settings, seed)
    return Counter(sampler.draw(HISTORY, LOGITS) for _ in range(count))


def test_temperature_zero_takes_the_most_likely_token() -> None:
    assert draws(SamplingSettings()) == {3: 400}


def test_frequencies_follow_the_softmax() -> None:
    found = draws(SamplingSettings(temperature=1.0), count=20000)
    for token, probability in enumerate(torch.softmax(LOGITS, 0).tolist()):
        assert found[token] / 20000 == pytest.approx(probability, abs=0.015)


def test_top_k_top_p_and_min_p_cut_the_tail() -> None:
    assert set(draws(SamplingSettings(temperature=1.0, top_k=2))) == {2, 3}
    assert set(draws(SamplingSettings(temperature=1.0, top_p=0.6))) == {3}
    assert set(draws(SamplingSettings(temperature=1.0, min_p=0.3))) == {2, 3}


def test_repetition_penalty_turns_the_choice() -> None:
    sampler = Sampler(SamplingSettings(repetition_penalty=2.0), 0)
    assert sampler.draw(torch.tensor([[3]]), LOGITS) == 2


def test_same_seed_same_draw_and_another_seed_another() -> None:
    settings = SamplingSettings(temperature=1.0)

    def sequence(seed: int) -> list[int]:
        sampler = Sampler(settings, seed)
        return [sampler.draw(HISTORY, LOGITS) for _ in range(50)]

    assert sequence(3) == sequence(3)
    assert sequence(3) != sequence(4)


def test_defaults_come_from_the_model_and_flags_win() -> None:
    own = GenerationConfig(do_sample=True, temperature=0.6, top_p=0.9, top_k=20)
    settings = SamplingSettings.from_generation_config(own)
    assert (settings.temperature, settings.top_p, settings.top_k) == (0.6, 0.9, 20)
    assert settings.override(temperature=0.0, top_p=None).temperature == 0.0
    assert SamplingSettings.from_generation_config(GenerationConfig()).temperature == 0.0
    assert SamplingSettings.from_generation_config(None) == SamplingSettings()


def test_a_truncation_option_alone_enables_sampling() -> None:
    assert SamplingSettings().override(top_p=0.5).temperature == 1.0


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -1.0},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"top_k": -1},
        {"min_p": 2.0},
        {"repetition_penalty": 0.0},
    ],
)
def test_values_out_of_range_are_refused_with_the_value(bad: dict[str, float]) -> None:
    with pytest.raises(UsageError, match=str(next(iter(bad.values())))):
        SamplingSettings(**bad)  # type: ignore[arg-type]


def test_numbers_of_other_types_are_accepted_and_other_values_refused() -> None:
    settings = SamplingSettings(temperature=2, top_k=np.int64(3), repetition_penalty=np.float32(1.5))  # type: ignore[arg-type]
    assert Sampler(settings, 0).draw(HISTORY, LOGITS) in (1, 2, 3)
    for bad in ({"temperature": "a"}, {"top_k": 1.5}, {"top_k": True}, {"top_p": None}, {"min_p": 10**400}):
        with pytest.raises(UsageError, match="must be a number"):
            SamplingSettings(**bad)  # type: ignore[arg-type]


def test_invalid_values_in_a_generation_config_are_ignored() -> None:
    shipped = SimpleNamespace(
        do_sample=True, top_k=float("nan"), top_p=float("inf"), repetition_penalty=10**400
    )
    assert SamplingSettings.from_generation_config(shipped) == SamplingSettings(temperature=1.0)


@pytest.mark.parametrize(
    "cuts",
    [
        {},
        {"temperature": 0.6},
        {"top_k": 20},
        {"top_k": 3000},
        {"top_p": 0.9},
        {"top_p": 0.3, "temperature": 1.7},
        {"min_p": 0.05},
        {"top_k": 50, "top_p": 0.8, "min_p": 0.02, "temperature": 0.7},
        {"top_p": 0.7, "min_p": 0.2},
    ],
)
@pytest.mark.parametrize("spread", [0.5, 3.0])
def test_draws_have_the_probabilities_of_transformers_warpers(cuts: dict[str, float], spread: float) -> None:
    logits = torch.randn(5003, generator=torch.Generator().manual_seed(2)) * spread
    scores = logits[None]
    if "temperature" in cuts:
        scores = TemperatureLogitsWarper(cuts["temperature"])(HISTORY, scores)
    if "top_k" in cuts:
        scores = TopKLogitsWarper(int(cuts["top_k"]))(HISTORY, scores)
    if "top_p" in cuts:
        scores = TopPLogitsWarper(cuts["top_p"])(HISTORY, scores)
    if "min_p" in cuts:
        scores = MinPLogitsWarper(cuts["min_p"])(HISTORY, scores)
    wanted = torch.softmax(scores[0].double(), dim=-1)
    settings = SamplingSettings(**{"temperature": 1.0, **cuts})  # type: ignore[arg-type]
    count = 20000
    found = torch.zeros_like(wanted)
    for i in range(count):
        token = _native.sample(
            logits.numpy(),
            settings.temperature,
            settings.top_k,
            settings.top_p,
            settings.min_p,
            (i + 0.5) / count,
        )
        found[token] += 1
    # Evenly spaced numbers: the share of a token is exact up to one of them at either end, and one token at
    # the edge of a cut may fall on either side of it.
    wrong = (found / count - wanted).abs() > 2 / count
    assert int(wrong.sum()) <= (1 if "top_p" in cuts else 0)


def test_logits_that_are_not_finite_are_refused_and_minus_infinity_is_never_drawn() -> None:
    for bad in (float("nan"), float("inf")):
        logits = LOGITS.clone()
        logits[1] = bad
        for temperature in (1.0, 0.0) if bad != bad else (1.0,):
            with pytest.raises(MoechatError, match="not finite"):
                Sampler(SamplingSettings(temperature=temperature), 0).draw(HISTORY, logits)
    for size in (300, 3000):
        barred = torch.full((size,), -float("inf"))
        barred[[7, size - 10]] = 0.0
        for settings in (
            SamplingSettings(temperature=1.0),
            SamplingSettings(temperature=1.0, top_k=5, top_p=0.9),
            SamplingSettings(temperature=1.0, top_k=5),
        ):
            sampler = Sampler(settings, 0)
            assert {sampler.draw(HISTORY, barred) for _ in range(60)} == {7, size - 10}


@pytest.mark.parametrize("size", [40, 1024, 5000])
def test_of_equal_logits_top_k_keeps_all_that_equal_its_last(size: int) -> None:
    logits = torch.randn(size, generator=torch.Generator().manual_seed(3)).clamp(max=0.0)
    equal = [0, 15, 16, size // 2, size - 1]
    logits[equal] = 2.0
    logits[3] = 3.0
    for top_k, kept in ((1, {3}), (2, {3, *equal}), (6, {3, *equal})):
        sampler = Sampler(SamplingSettings(temperature=1.0, top_k=top_k), 0)
        assert {sampler.draw(HISTORY, logits) for _ in range(200)} == kept


def test_a_flat_distribution_has_a_nucleus_too() -> None:
    """Of tokens of which the likeliest hardly matter."""
    logits = torch.zeros(200_000)
    logits[5] = 9.0
    drawn = [_native.sample(logits.numpy(), 1.0, 0, 0.9, 0.0, (place + 0.5) / 500) for place in range(500)]
    kept = 0.9 * (200_000 - 1 + math.exp(9.0))
    assert drawn == sorted(drawn)
    assert max(drawn) == pytest.approx(kept - math.exp(9.0), rel=0.005)
    assert drawn.count(5) == pytest.approx(500 * math.exp(9.0) / kept, abs=1)


def test_of_equal_logits_greedy_takes_the_first() -> None:
    logits = torch.zeros(1000)
    logits[[300, 301, 999]] = 2.0
    assert Sampler(SamplingSettings(), 0).draw(HISTORY, logits) == 300
