"""A model whose experts have no gate projection: bits, budgets, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from families import tiny_family
from tiny import write_tiny_checkpoint

import moechat
from moechat.offload.settings import OffloadOptions

PROMPT = list(range(3, 17))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny") / "nemotron"
    config = tiny_family("nemotron_h")
    config.eos_token_id = None
    write_tiny_checkpoint(directory, config)
    return directory


def answer(model: Path, bits: int, **options: object) -> list[int]:
    with moechat.load(model, bits=bits, tune=False, **options) as engine:
        assert not engine.loaded.store.geometry.gate.gated
        return [step.token_id for step in engine.generate(PROMPT, max_new_tokens=8, temperature=0.0)]


@pytest.mark.parametrize("bits", [4, 6, 8])
def test_every_budget_gives_the_same_tokens(model: Path, bits: int) -> None:
    near = answer(model, bits)
    for pages in (3, 6):
        assert answer(model, bits, ram="4G", offload=OffloadOptions(pages=pages)) == near


def test_the_weights_are_counted(model: Path) -> None:
    with moechat.load(model, bits=4) as engine:
        geometry = engine.loaded.store.geometry
        assert geometry.expert_weights == 2 * geometry.hidden_size * geometry.intermediate_size
