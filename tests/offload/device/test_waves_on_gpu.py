"""Prompts in waves on a GPU, as far as that can be without one (see ``interpreted_gpu.py``)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

import moechat
from moechat import Engine
from moechat.configurator.systems import CacheSettings
from moechat.offload.settings import OffloadOptions

CHUNK = 4
PROMPT = [5, 17, 9, 33, 21, 40, 41, 42, 8, 9, 77, 3]
# float32 both, products in another order.
TOLERANCE = 2e-5
LAYERS = 2


def load(
    model: Path, gpu, *, wave: int, chunk: int = CHUNK, prefetch: str = "none", pages: int = 3
) -> Engine:
    offload = OffloadOptions(accelerator=gpu, pages=pages, cache=CacheSettings(prefetch=prefetch))
    engine = moechat.load(
        model, device="cuda", offload=offload, ctx=64, vram="1G", activation_bits=32, dtype="float32"
    )
    loaded = engine.loaded
    engine.passes.loaded = replace(loaded, chunk=chunk, plan=replace(loaded.plan, wave=wave))
    return engine


def answer(engine: Engine, count: int = 2) -> list[int]:
    return [step.token_id for step in engine.generate(PROMPT, max_new_tokens=count, temperature=0.0)]


def moved(engine: Engine, gpu) -> int:
    """Blocks that a prompt copies onto the GPU."""
    near = engine.loaded.near
    assert near is not None
    near.drain()
    near.reset_stats()
    before = gpu.cuda.get("bytes")
    answer(engine, 1)
    near.drain()
    stats = near.stats()
    blocks = int(stats["fetched_demand"] + stats["fetched_prefetch"])
    # Each block is copied once. The lists of blocks are copied too; all of them are smaller than one block.
    record = engine.loaded.store.geometry.record_bytes
    assert 0 <= gpu.cuda.get("bytes") - before - blocks * record < record
    return blocks


def test_the_answer_is_that_of_passes_and_each_missing_expert_is_copied_once(model: Path, gpu) -> None:
    with load(model, gpu, wave=len(PROMPT)) as engine:
        in_waves = moved(engine, gpu)
        engine.drop_prompt_cache()
        tokens, logits = answer(engine), engine.logits(PROMPT)
        assert engine.notices() == []
        assert engine.loaded.near is not None
        assert engine.loaded.near.runner.check() == ""
        assert engine.stats.pages_peak <= 3
        geometry = engine.loaded.store.geometry
    with load(model, gpu, wave=0, chunk=len(PROMPT)) as engine:
        assert moved(engine, gpu) == in_waves
    with load(model, gpu, wave=0) as engine:
        in_passes = moved(engine, gpu)
        engine.drop_prompt_cache()
        assert answer(engine) == tokens
        wanted = engine.logits(PROMPT)
    assert float((logits - wanted).abs().max() / wanted.abs().max()) < TOLERANCE
    assert in_waves <= LAYERS * geometry.num_experts * geometry.blocks_per_expert
    assert in_passes > 1.2 * in_waves


def test_running_out_of_memory_in_a_wave_evicts_experts_and_the_answer_continues(
    model: Path, gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    from moechat.offload.kernels.launch import BlockKernels

    with load(model, gpu, wave=len(PROMPT), pages=20) as engine:
        expected = answer(engine, 3)
    whole, calls = BlockKernels.partials, 0

    def partials(kernels, items, dtype):
        nonlocal calls
        calls += 1
        if calls == 2:  # the second layer, when all chunks have appended to both
            assert items.tokens == len(PROMPT)
            raise torch.OutOfMemoryError("CUDA out of memory")
        return whole(kernels, items, dtype)

    monkeypatch.setattr(BlockKernels, "partials", partials)
    with load(model, gpu, wave=len(PROMPT), pages=20) as engine:
        assert answer(engine, 3) == expected
        assert engine.loaded.near is not None
        assert engine.loaded.near.pages == 18
        assert [note for note in engine.notices() if "graphics memory ran out" in note]
        assert engine.loaded.near.runner.check() == ""


def test_decoding_after_a_wave_replays_graphs(model: Path, gpu) -> None:
    with load(model, gpu, wave=len(PROMPT)) as engine:
        answer(engine, 6)
        assert gpu.graphs_made
        assert engine.notices() == []
        decoder = engine.loaded.decoder
        assert decoder is not None
        # The cache that the wave has filled lies in the memory of the graphs.
        assert decoder._recording is not None
