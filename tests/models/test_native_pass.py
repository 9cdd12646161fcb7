"""All layers of a model in one native call, against one call for each."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from families import tiny_family
from tiny import tiny_config, write_tiny_checkpoint

import moechat
from moechat import _native
from moechat.engine import Engine
from moechat.models.decode.native_pass import NativePass
from moechat.models.skeleton import EXPERTS_RUNNER
from moechat.offload.settings import OffloadOptions

PROMPT = [4, 87, 12, 55, 3, 29, 64, 91, 8, 70, 33, 21]
# Plain layers; a shared expert with a gate, or without, and layers without experts; windows and sinks;
# states, and layers whose feed-forward part is not native; latents.
OWN = ["glm4_moe_lite", "nemotron_h", "granitemoehybrid"]
FAMILIES = ["qwen3_moe", "qwen2_moe", "glm4_moe", "gpt_oss", "lfm2_moe", *OWN]


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of the native passes that are made."""
    made: list[int] = []
    real = NativePass.__call__

    def call(self: NativePass, hidden: torch.Tensor, *rest: Any) -> torch.Tensor | None:
        out = real(self, hidden, *rest)
        if out is not None:
            made.append(hidden.shape[1])
        return out

    monkeypatch.setattr(NativePass, "__call__", call)
    return made


@pytest.fixture(params=["qwen3_moe", "glm4_moe"])
def engine(request: pytest.FixtureRequest, tmp_path: Path, moechat_home: Path) -> Iterator[Engine]:
    write_tiny_checkpoint(tmp_path / "model", tiny_config(request.param))
    with moechat.load(tmp_path / "model", bits=4) as made:
        yield made


def answer(engine: Engine) -> tuple[list[int], torch.Tensor]:
    """Tokens that are decoded, and the logits behind each."""
    tokens, rows, cache = [], [], engine.decoder.new_cache()
    ids = torch.tensor([PROMPT])
    for _ in range(6):
        out = engine.passes.run(ids, cache)
        rows.append(out.logits[0, -1].clone())
        tokens.append(int(rows[-1].argmax()))
        ids = torch.tensor([tokens[-1:]])
    return tokens, torch.stack(rows)


@pytest.mark.parametrize("family", FAMILIES)
def test_one_call_gives_the_bits_of_a_call_for_each_layer(
    family: str, tmp_path: Path, moechat_home: Path, passes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_family(family) if family in OWN else tiny_config(family)
    write_tiny_checkpoint(tmp_path / "model", config)
    with moechat.load(tmp_path / "model", bits=4) as engine:
        assert engine.loaded.native_modules.whole
        passes.clear()  # those of the trial
        found = answer(engine)
        assert passes == [1] * 5
        monkeypatch.setattr(NativePass, "__call__", lambda *_: None)
        wanted = answer(engine)
        assert found[0] == wanted[0]
        assert torch.equal(found[1], wanted[1])


def test_counters_are_the_same(engine: Engine, passes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    def counted() -> tuple[int, int]:
        before = engine.loaded.counters.activations, engine.loaded.counters.bytes_read
        answer(engine)
        counters = engine.loaded.counters
        return counters.activations - before[0], counters.bytes_read - before[1]

    found = counted()
    assert passes
    assert min(found) > 0
    monkeypatch.setattr(NativePass, "__call__", lambda *_: None)
    assert counted() == found


def test_experts_in_pages_are_computed_layer_by_layer(
    tmp_path: Path, moechat_home: Path, passes: list[int]
) -> None:
    write_tiny_checkpoint(tmp_path / "model", tiny_config("qwen3_moe"))
    with moechat.load(tmp_path / "model", bits=4) as engine:
        wanted = answer(engine)
    made = len(passes)
    with moechat.load(tmp_path / "model", bits=4, offload=OffloadOptions(pages=9)) as engine:
        found = answer(engine)
    assert len(passes) == made == 5
    assert found[0] == wanted[0]
    assert torch.equal(found[1], wanted[1])


def test_a_hook_on_a_bypassed_part_is_called(engine: Engine, passes: list[int]) -> None:
    model, called = engine.loaded.model, []
    mlp = model.model.layers[0].mlp
    part = next(module for module in mlp.modules() if module is not mlp)
    handle = part.register_forward_hook(lambda *_: called.append(1))
    answer(engine)
    assert not passes
    handle.remove()
    answer(engine)
    assert len(passes) == 5


def test_tokens_of_several_conversations_are_computed_in_one_call(engine: Engine, passes: list[int]) -> None:
    def caches() -> list[Any]:
        made = [engine.decoder.new_cache() for _ in range(3)]
        for row, cache in enumerate(made):
            engine.passes.run(torch.tensor([PROMPT[row:]]), cache)
        return made

    tokens = [5, 9, 77]
    together, alone = caches(), caches()
    rows = engine.passes.run_together(tokens, together)
    assert rows is not None
    assert passes[-1] == 3
    for token, row, cache in zip(tokens, rows, alone, strict=True):
        out = engine.passes.run(torch.tensor([[token]]), cache)
        assert torch.equal(out.logits[0, -1], row.view(-1))


def test_arguments_that_do_not_fit_are_refused(engine: Engine) -> None:
    (run,) = vars(engine.loaded.model)["forward"].native_pass.runs()
    layers = engine.loaded.model.config.num_hidden_layers
    with pytest.raises(ValueError, match=f"there are {layers} layers, angles for 1 and places of 1"):
        run.run(0, [(0, 0)], [[]], 1, 0)
    with pytest.raises(ValueError, match="takes 1 to"):
        run.run(0, [(0, 0)] * layers, [[]] * layers, 0, 0)
    with pytest.raises(ValueError, match="another number of places"):
        run.run(0, [(0, 0)] * layers, [[]] * layers, 1, 0)
    with pytest.raises(ValueError, match="places of layer 0 are not those of its step"):
        run.run(0, [(0, 0)] * layers, [[(0, 0)]] * layers, 1, 0)
    with pytest.raises(ValueError, match="there are no layers"):
        _native.TokenPass([])


def test_ctrl_c_ends_a_call_between_layers(engine: Engine) -> None:
    """A layer again and again stands for a model whose experts come slowly from the disk."""
    cache = engine.decoder.new_cache()
    engine.passes.run(torch.tensor([PROMPT]), cache)
    step = vars(engine.loaded.model.model.layers[-1])["forward"].kept
    expert_part = vars(step.feed.experts)[EXPERTS_RUNNER].resident
    hidden = torch.zeros(1, 1, step.hidden_size, dtype=step.dtype)
    turns = torch.zeros(step.angles, dtype=step.dtype)
    place = step.places.take(step.places.find(cache.layers[-1]))
    out = torch.empty_like(hidden)

    def repeated(count: int) -> Callable[[], int]:
        run = _native.TokenPass([(step.run, expert_part)] * count)
        angles, places = [(turns.data_ptr(),) * 2] * count, [[place]] * count
        return lambda: run.run(hidden.data_ptr(), angles, places, 1, out.data_ptr())

    some, started = repeated(2_000), time.perf_counter()
    some()
    long = repeated(int(2_000 * 8 / (time.perf_counter() - started)))  # takes about eight seconds
    began: list[float] = []

    def interrupt() -> None:
        began.append(time.perf_counter())
        os.kill(os.getpid(), signal.SIGINT)

    timer = threading.Timer(1.0, interrupt)
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        long()
    assert time.perf_counter() - began[0] < 1
