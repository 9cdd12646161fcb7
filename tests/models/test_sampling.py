"""Sampling follows the settings, and the settings are checked."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import GenerationConfig

from moechat.errors import UsageError
from moechat.models.sampling import Sampler, SamplingSettings

LOGITS = torch.tensor([0.0, 1.0, 2.0, 3.0])
HISTORY = torch.tensor([[0]])


def draws(settings: SamplingSettings, count: int = 400, seed: int = 1) -> Counter[int]:
    sampler = Sampler(settings, seed)
    return Counter(sampler.draw(HISTORY, LOGITS) for _ in range(count))


def test_temperature_zero_takes_the_likeliest() -> None:
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


def test_a_cut_alone_asks_for_sampling() -> None:
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


def test_numbers_of_other_types_are_taken_and_others_refused() -> None:
    settings = SamplingSettings(temperature=2, top_k=np.int64(3), repetition_penalty=np.float32(1.5))  # type: ignore[arg-type]
    assert Sampler(settings, 0).draw(HISTORY, LOGITS) in (1, 2, 3)
    for bad in ({"temperature": "a"}, {"top_k": 1.5}, {"top_k": True}, {"top_p": None}, {"min_p": 10**400}):
        with pytest.raises(UsageError, match="must be a number"):
            SamplingSettings(**bad)  # type: ignore[arg-type]


def test_shipped_values_that_are_no_numbers_are_as_if_not_there() -> None:
    shipped = SimpleNamespace(
        do_sample=True, top_k=float("nan"), top_p=float("inf"), repetition_penalty=10**400
    )
    assert SamplingSettings.from_generation_config(shipped) == SamplingSettings(temperature=1.0)
