"""Predictors that learn from requests, in an engine whose experts do not all fit."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import moechat
from moechat import Engine
from moechat.config import user_paths
from moechat.configurator.systems import settings_of
from moechat.offload.settings import OffloadOptions
from moechat.predict.preload import PreloadPredictor
from moechat.predict.token_lookup import TokenLookup

SYSTEMS = ("moe-infinity", "finemoe")
PROMPT = [5, 60, 7, 81, 9, 100, 11, 12]


@pytest.fixture(autouse=True)
def _nothing_learned(home: Path) -> None:
    directory = user_paths().state / "predictors"
    if directory.is_dir():
        shutil.rmtree(directory)
    else:
        directory.unlink(missing_ok=True)


@contextmanager
def loaded(system: str, **options: Any) -> Iterator[Engine]:
    with moechat.load("demo", system=system, offload=OffloadOptions(pages=120), **options) as engine:
        yield engine


def answer(engine: Engine, prompt: list[int] = PROMPT, count: int = 12) -> list[int]:
    # Predictors see each token in a pass of its own.
    steps = engine.generate(prompt, max_new_tokens=count, temperature=0.0, draft_tokens=0)
    return [step.token_id for step in steps]


def predictor_of(engine: Engine) -> Any:
    near = engine.loaded.near
    assert near is not None
    return near.requests.predictor


def counts_of(engine: Engine) -> list[float]:
    """Of each request that was learned: its decoded tokens times the experts that each uses."""
    scale: list[float] = predictor_of(engine).arrays()["scale"].tolist()
    return scale


def learned_files() -> list[Path]:
    return sorted((user_paths().state / "predictors").glob("*.npz"))


def test_a_request_is_its_decoded_tokens() -> None:
    with loaded("moe-infinity") as engine:
        top_k = engine.loaded.near.top_k
        answer(engine, count=12)
        assert counts_of(engine) == [11 * top_k]  # the first token comes from the prompt's pass
        answer(engine, PROMPT[:1], count=5)  # a prompt of one token is a prompt
        assert counts_of(engine) == [11 * top_k, 4 * top_k]
        engine.drop_prompt_cache()
        answer(engine, PROMPT, count=1)
        assert len(counts_of(engine)) == 2  # nothing was decoded


def test_an_answer_that_is_given_up_is_learned_as_far_as_it_went() -> None:
    with loaded("moe-infinity") as engine:
        steps = engine.generate(PROMPT, max_new_tokens=30, temperature=0.0)
        for _ in range(6):
            next(steps)
        steps.close()
        assert counts_of(engine) == [5 * engine.loaded.near.top_k]


def test_answers_in_turns_are_requests_of_their_own() -> None:
    with loaded("moe-infinity", conversations=2) as engine:
        first = engine.generate_in_turns(PROMPT, max_new_tokens=9, temperature=0.0)
        second = engine.generate_in_turns(PROMPT[::-1], max_new_tokens=5, temperature=0.0)
        running = [first, second]
        while running:
            for each in list(running):
                if next(each, "end") == "end":
                    running.remove(each)
        top_k = engine.loaded.near.top_k
        assert sorted(counts_of(engine)) == [4 * top_k, 8 * top_k]


def test_tokens_that_share_a_pass_are_not_observed() -> None:
    with loaded("moe-infinity", conversations=2) as engine:
        running = [engine.generate_in_turns(PROMPT, max_new_tokens=8, temperature=0.0) for _ in range(2)]
        shared = 0
        while running:
            ready = [each for each in running if each.next_token is not None]
            engine.compute_together(running)
            shared += sum(each.next_token is None for each in ready)
            for each in list(running):
                if next(each, "end") == "end":
                    running.remove(each)
        alone = sum(counts_of(engine)) / engine.loaded.near.top_k
        assert shared == 14  # all but the two first tokens
        assert alone == 0


@pytest.mark.parametrize("system", SYSTEMS)
def test_later_requests_are_predicted_from_earlier_ones(system: str) -> None:
    with loaded(system) as engine:
        first = answer(engine)
        before = engine.loaded.near.stats()
        assert answer(engine, count=20)[:12] == first
        after = engine.loaded.near.stats()
        assert after["link_bytes_later"] > before["link_bytes_later"]
        assert after["hits_prefetch"] > before["hits_prefetch"]
        assert engine.loaded.near.runner.check() == ""


@pytest.mark.parametrize("system", SYSTEMS)
def test_what_was_learned_is_kept_for_the_next_start(system: str) -> None:
    with loaded(system) as engine:
        expected = answer(engine)
        entries = predictor_of(engine).entries
        assert not learned_files()
    assert len(learned_files()) == 1
    with loaded(system) as engine:
        assert predictor_of(engine).entries == entries
        assert answer(engine) == expected
        assert engine.loaded.near.stats()["hits_prefetch"] > 0
        assert predictor_of(engine).entries > entries


def test_what_another_system_learns_is_kept_apart() -> None:
    for system in SYSTEMS:
        with loaded(system) as engine:
            answer(engine)
    assert [path.name.rpartition("-")[0] for path in learned_files()] == ["eamc", "expert-map"]
    with loaded("auto") as engine:
        assert predictor_of(engine) is None


def test_a_damaged_file_is_named_and_replaced() -> None:
    with loaded("moe-infinity") as engine:
        answer(engine)
    path = learned_files()[0]
    path.write_bytes(path.read_bytes()[:100])
    with loaded("moe-infinity") as engine:
        assert predictor_of(engine).entries == 0
        assert any(str(path) in note for note in engine.notices())
        answer(engine)
    with np.load(path, allow_pickle=False) as kept:
        assert kept["matrices"].shape[2] == 1


def test_a_directory_that_cannot_be_written_is_only_a_note() -> None:
    with loaded("finemoe") as engine:
        answer(engine)
        (user_paths().state / "predictors").write_text("in the way")
        upkeep = engine.loaded.upkeep
        assert upkeep is not None
        assert upkeep.save()
        assert any("cannot be kept" in note for note in engine.notices())


def test_their_memory_is_in_the_plan() -> None:
    parts = {}
    for system in ("on-demand", *SYSTEMS):
        with loaded(system) as engine:
            parts[system] = engine.loaded.plan.scratch
            geometry = engine.loaded.store.geometry
            sizes = engine.loaded.near.layers, geometry.num_experts, geometry.hidden_size
    for system in ("moe-infinity", "finemoe"):
        learned = settings_of(system).learned_bytes(*sizes)
        assert parts[system] == parts["on-demand"] + learned > parts["on-demand"]


def test_the_adaptive_step_is_measured_and_follows() -> None:
    with loaded("expertflow") as engine:
        answer(engine, count=40)
        near = engine.loaded.near
        step, estimate = near.runner.adaptive_step()
        assert 1 <= step <= near.layers - 1
        assert estimate > 0
        assert near.stats()["fetched_prefetch"] > 0


def test_the_first_layer_is_fetched_by_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    found, answers = [], []
    for looked_up in (True, False):
        if not looked_up:
            monkeypatch.setattr(TokenLookup, "better", property(lambda _: False))
        with loaded("auto:prefetch=next-router") as engine:
            for at in range(4):
                answer(engine, PROMPT[at:], count=40)
            near = engine.loaded.near
            assert near.lookup.lookup_share > near.lookup.router_share > 0
            near.reset_stats()
            answers.append([answer(engine, PROMPT[at:], count=40) for at in range(4)])
            found.append(near.stats()["hits_prefetch"])
    assert answers[0] == answers[1]
    assert found[0] > found[1]


def test_a_tuned_checkpoints_predictor_loads_experts_beside_the_prompt(
    chat_model: Path, tmp_path: Path
) -> None:
    tuned = tmp_path / "tuned"
    shutil.copytree(chat_model, tuned)
    with moechat.load(chat_model, offload=OffloadOptions(pages=6)) as engine:
        expected = answer(engine)
        near = engine.loaded.near
        layers, experts = near.layers, near.geometry.num_experts
        embedding = engine.loaded.model.get_input_embeddings()
        width = embedding(torch.tensor([0])).shape[1]
    favourite = torch.zeros(layers * experts)
    favourite[experts - 1 :: experts] = 1  # of each layer the last expert, whatever the prompt is
    PreloadPredictor(
        (torch.zeros(3, width), torch.zeros(3)),
        (torch.zeros(layers * experts, 3), favourite),
        layers,
        torch.nn.Embedding(200, width),
    ).save(tuned / "preload.safetensors")
    for directory in (tuned, chat_model):
        with moechat.load(directory, system="melinoe", offload=OffloadOptions(pages=12)) as engine:
            assert answer(engine) == expected
            near = engine.loaded.near
            kept = near.targets[:, 0]
            assert kept.min() >= 1
            moved = near.stats()["fetched_prefetch"]
            # A prompt of this length streams no layer, and nothing is fetched ahead of a decoded token.
            assert (moved > 0) == (directory == tuned)
