"""The tuner on a GPU: plain ways to treat missing experts are timed too, on one set of recorded graphs."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("triton")

import torch

import moechat
from moechat.engine import Engine
from moechat.offload.settings import OffloadOptions
from moechat.tuner import racing

PROMPT = [5, 17, 9, 33, 21]


@pytest.fixture(autouse=True)
def _short_rounds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(racing, "MOST_ROUNDS", 1)
    monkeypatch.setattr(racing, "_FIRST_TOKENS", 4)
    monkeypatch.setattr(racing, "TURN_TOKENS", 3)
    monkeypatch.setenv("MOECHAT_HOME", str(tmp_path / "home"))


def load(model: Path, gpu, **arguments) -> Engine:
    offload = OffloadOptions(accelerator=gpu, pages=12)
    return moechat.load(model, device="cuda", ctx=200, offload=offload, replan_tokens=0, **arguments)


def answer(engine: Engine, tokens: int = 3) -> list[int]:
    return [step.token_id for step in engine.generate(PROMPT, max_new_tokens=tokens, temperature=0.0)]


def recorded(gpu) -> int:
    return sum(len(graphs.made) for graphs in gpu.graphs_made)


def test_plans_are_timed_on_one_set_of_graphs_and_the_choice_is_remembered(
    model: Path, gpu, tmp_path: Path
) -> None:
    with load(model, gpu) as engine:
        tuning = engine.tune(limit_s=200.0)
        assert tuning.state == "measured"
        timed = {timing.name for timing in tuning.timings if timing.tokens}
        # The CPU computes all that is missing, the link brings it, or both.
        assert {"cpu", "link", "both"} <= timed | set(tuning.same_as)
        assert len(timed) >= 3
        assert "mapped" not in {timing.name for timing in tuning.timings}
        near = engine.loaded.near
        assert near is not None
        # One graph more than there are expert layers.
        assert recorded(gpu) == near.layers + 1, "a way to load was recorded apart"
        answer(engine)
        assert near.runner.check() == ""
        winner = tuning.winner
        skipped = engine.tune(limit_s=200.0, again=True)
        assert (skipped.state, skipped.why) == (
            "skipped",
            "the conversation takes the memory of the attention cache",
        )
    # With the routing that has been seen since, other plans would be the candidates.
    for file in (tmp_path / "home").rglob("*.npz"):
        file.unlink()
    with load(model, gpu) as engine:
        again = engine.tune(limit_s=0.0)
        if tuning.decided:
            assert (again.state, again.winner) == ("remembered", winner)
        else:
            assert again.state == "skipped"


def test_logits_are_the_same_with_every_candidate(model: Path, gpu) -> None:
    # With fewer bits the CPU rounds the inputs of its part.
    with load(model, gpu, activation_bits=32) as engine:
        found = []
        near = engine.loaded.near
        assert near is not None
        for miss in ("compute", "fetch", "both", "seldom"):
            near.load_by(near.settings.fetching_nothing_ahead())
            settings = near.settings
            near.switch(type(settings)(**{**vars(settings), "miss": miss}), near.plan)
            found.append(engine.logits(PROMPT))
        for other in found:
            assert torch.allclose(other, found[1], rtol=0, atol=2e-5 * float(found[1].abs().max()))
