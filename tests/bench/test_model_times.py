"""``T_att``, ``T_moe`` and ``T_head`` of a loaded model."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import torch

from moechat import _native
from moechat.bench import model_times
from moechat.bench.decode import Bench
from moechat.bench.model_times import decoder_layer, measure_model_times, times_key
from moechat.engine import Engine
from moechat.errors import DoesNotFitError, UnsupportedModelError
from moechat.hardware.times_file import load_times, save_times
from moechat.loading.model import ExpertsPart


def test_times_add_up_to_a_token(engine: Engine) -> None:
    started = time.perf_counter()
    times = measure_model_times(engine, seconds=0.0, tokens=24)
    took = time.perf_counter() - started
    for figure in (times.attention, times.moe, times.head):
        assert figure.value > 0
        assert figure.origin == "measured"
        assert "8 tokens" in figure.source
    layers = len(engine.loaded.store.layers)
    token = layers * (times.attention.value + times.moe.value) + times.head.value
    assert 8 * token <= took


def test_a_slower_part_is_the_one_that_takes_longer(engine: Engine) -> None:
    model = engine.loaded.model
    slow = 0.03

    def lag(module: Any, arguments: Any, *rest: Any) -> None:
        time.sleep(slow)

    plain = measure_model_times(engine, seconds=0.0, tokens=8)
    for where, part in ((model.model.layers[1].self_attn, "attention"), (model.lm_head, "head")):
        handle = where.register_forward_pre_hook(lag)
        try:
            times = measure_model_times(engine, seconds=0.0, tokens=8)
        finally:
            handle.remove()
        share = 3 if part == "attention" else 1  # one of three layers
        assert getattr(times, part).value >= slow / share
        others = {"attention", "moe", "head"} - {part}
        for other in others:
            assert getattr(times, other).value < getattr(plain, other).value + 0.8 * slow / share


def test_measuring_leaves_the_engine_unchanged(engine: Engine) -> None:
    tokens = [1, 2, 3, 4]
    before = engine.logits(tokens)
    layers = [part.module._moechat_layer for part in Bench(engine).parts]
    measure_model_times(engine, seconds=0.0, tokens=8)
    assert torch.equal(engine.logits(tokens), before)
    assert [part.module._moechat_layer for part in Bench(engine).parts] == layers
    assert not any(module._forward_hooks for module in engine.loaded.model.modules())


def test_experts_are_the_models_own_and_taken_in_turn(engine: Engine) -> None:
    bench = Bench(engine)
    store = bench.store
    records = model_times._resident_records(store, bench.top_k)
    count = len(store.layers) * store.geometry.num_experts
    assert len(records) == count
    own = np.concatenate([store.expert_layer(record.layer) for record in store.layers])
    assert np.array_equal(records, own)
    shared = model_times._CyclicExperts(store, records, bench.top_k, 16)
    hidden = torch.zeros((1, store.geometry.hidden_size))
    index, weights = torch.zeros((1, 2), dtype=torch.int64), torch.ones((1, 2))
    chosen_experts = []
    shared._layer = type(  # type: ignore[assignment]
        "Spy",
        (),
        {"forward": lambda self, hidden, chosen, weights: chosen_experts.extend(chosen[0].tolist())},
    )()
    for _ in range(count // 2):
        shared.forward(hidden, index, weights)
    assert sorted(chosen_experts) == list(range(count))


def test_only_what_fits_is_copied(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    store = engine.loaded.store
    size = store.geometry.expert_bytes
    monkeypatch.setattr(model_times, "available_bytes", lambda: 20 * size)
    assert len(model_times._resident_records(store, 2)) == 10
    monkeypatch.setattr(model_times, "available_bytes", lambda: 3 * size)
    with pytest.raises(DoesNotFitError, match="timing the model takes 4 experts"):
        model_times._resident_records(store, 2)


def test_the_key_differs_between_models_and_settings(engine: Engine) -> None:
    key = times_key(engine)
    assert key.bits == engine.loaded.store.geometry.bits
    assert key.threads == _native.num_threads()
    assert key.model == engine.loaded.store.manifest.source.fingerprint
    times = measure_model_times(engine, seconds=0.0, tokens=8)
    save_times(key, times)
    assert load_times(key) == times


def test_a_model_without_a_list_of_layers_is_refused() -> None:
    model = torch.nn.Sequential()
    model.add_module("experts", torch.nn.Identity())
    with pytest.raises(UnsupportedModelError, match="in no list of decoder layers"):
        decoder_layer(model, ExpertsPart("experts", model.experts, 8, 64))
