"""The first stage: the packaged model on the GPU, against the CPU. Answers whether anything works at all."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import torch

import moechat
from gpu.record import Cell
from gpu.rounds import copied_rate, read_rate
from moechat.offload.accelerator import Accelerator
from moechat.offload.graph_decoder import GraphDecoder
from moechat.offload.settings import OffloadOptions

_PROMPT = [{"role": "user", "content": "Tell me a story about a fox."}]
_TOKENS = 48
_TEXT = "Once upon a time there was a fox who lived in a wood."
# Relative distance of logits: float32 with products in another order, through all layers.
_FLOAT32 = 1e-3


def cells(gpu: Accelerator) -> list[Cell]:
    """The link and the memory; then the demo with all experts on the GPU, and with a quarter of them."""
    return [
        Cell("rates", lambda: _rates(gpu), 10),
        Cell("demo, all experts resident", lambda: demo(gpu, share=1.0), 40),
        Cell("demo, a quarter resident", lambda: demo(gpu, share=0.25), 30),
        Cell("demo, without graphs", lambda: demo(gpu, share=0.25, deterministic=True), 30),
    ]


def _rates(gpu: Accelerator) -> dict[str, Any]:
    return {"link_bytes_a_second": copied_rate(gpu), "vram_bytes_a_second": read_rate(gpu)}


def demo(
    gpu: Accelerator, *, share: float, deterministic: bool = False, model: str | Path = "demo"
) -> dict[str, Any]:
    """A model's answer and logits, compared with those of the CPU.

    Args:
        gpu: The GPU.
        share: Of the experts that pages are there for.
        deterministic: The CPU computes no experts, and graphs are off.
        model: With a tokenizer and a chat template.
    """
    plain: dict[str, Any] = {"dtype": "float32", "dense_bits": 16, "activation_bits": 32, "ctx": 256}
    with moechat.load(model, ram="8G", **plain) as engine:
        expected = _answer(engine)
        ids = engine.prompts.encode(_TEXT)
        wanted = engine.logits(ids)
        store = engine.loaded.store
    blocks = len(store.layers) * store.geometry.num_experts * store.geometry.blocks_per_expert
    options = OffloadOptions(accelerator=gpu, pages=None if share == 1 else max(2, int(share * blocks)))
    begun = time.perf_counter()
    with moechat.load(model, device="cuda", deterministic=deterministic, offload=options, **plain) as engine:
        load_s = time.perf_counter() - begun
        found = [_answer(engine) for _ in range(3)]
        times = _times(engine)
        error = distance(engine.logits(ids), wanted)
        decoder = engine.loaded.decoder
        graphs = isinstance(decoder, GraphDecoder) and not decoder.off
        near = engine.loaded.near
        check = "" if near is None else near.runner.check()
        notices = engine.notices()
    same = [answer == expected for answer in found]
    return {
        # In float32 both choose the same tokens, unless two are as likely as makes no difference.
        "ok": all(same) and error < _FLOAT32 and not check and (graphs or deterministic),
        "same_tokens": same,
        "relative_error": error,
        "graphs": graphs,
        "notices": notices,
        "cache": check or "consistent",
        "load_s": load_s,
        "token_ms": 1e3 * statistics.median(times),
    }


def _answer(engine: Any) -> list[int]:
    steps = engine.generate(_PROMPT, max_new_tokens=_TOKENS, temperature=0.0)
    return [step.token_id for step in steps]


def _times(engine: Any) -> list[float]:
    times = []
    before = time.perf_counter()
    for _ in engine.generate(_PROMPT, max_new_tokens=_TOKENS, temperature=0.0):
        now = time.perf_counter()
        times.append(now - before)
        before = now
    return times[1:]


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference of logits ``[tokens, vocabulary]``, relative to that of the centred ones."""
    centred = expected - expected.mean(1, keepdim=True)
    return float((found - expected).norm() / centred.norm())
