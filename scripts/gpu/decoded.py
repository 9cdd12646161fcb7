"""A stage of its own for a decoded token: what its layers cost, before and after what makes them cheaper.

One shape with a third of its layers, so that loading takes seconds: with half of the experts' pages, with
half and the GPU running ahead of the host, and with all. Each way is loaded in turns:

    now        as everybody gets it
    steps      layers computed step by step: norms, rotary embedding and routers in a launch each
    python     layers launched from Python, by the driver
    plain      kernels of experts launched by Triton; norms, rotary embedding and routers by torch
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

import moechat
from gpu.record import Cell, Say
from moechat.bench.synthetic_models import load_shape, synthetic_store
from moechat.config import RUN_AHEAD_VARIABLE
from moechat.offload import fused_steps, gpu_clocks
from moechat.offload.accelerator import Accelerator
from moechat.offload.graph_decoder import GraphDecoder
from moechat.offload.kernels.quick_launch import QuickKernel
from moechat.offload.launched_layers import LaunchedLayers
from moechat.offload.settings import OffloadOptions

_SHAPE, _LAYERS = "qwen3-30b-a3b", 16
_PROMPT, _WARM, _TOKENS, _TIMED, _PROFILED = 128, 48, 64, 32, 4
_CONTEXT = 512
_ROUNDS = 2
# Share of the pages, and MOECHAT_RUN_AHEAD.
_CASES = {"half": (0.5, None), "half, ahead": (0.5, "1"), "all": (1.0, None)}
_WAYS = ("now", "steps", "python", "plain")
# What has to be at work.
_WANTED = {"half": ("graphs",), "half, ahead": ("graphs", "ahead"), "all": ("graphs", "ahead", "two_graphs")}


def cells(gpu: Accelerator, work: Path, say: Say) -> list[Cell]:
    """A cell for each share of the experts."""
    return [Cell(case, lambda case=case: compared(gpu, work, case, say), 60) for case in _CASES]


def compared(gpu: Accelerator, work: Path, case: str, say: Say) -> dict[str, Any]:
    """All ways in turns: medians of a token's time, and where it goes."""
    share, ahead = _CASES[case]
    store = synthetic_store(load_shape(_SHAPE, layers=_LAYERS), work, bits=4)
    blocks = len(store.layers) * store.geometry.num_experts * store.geometry.blocks_per_expert
    pages = None if share == 1 else int(share * blocks)
    times: dict[str, list[float]] = {way: [] for way in _WAYS}
    found: dict[str, dict[str, Any]] = {}
    for number in range(_ROUNDS):
        for way in _WAYS if number % 2 == 0 else reversed(_WAYS):
            say(f"{case}: round {number + 1}, {way}")
            with _way(way, ahead):
                taken, found[way] = _turn(gpu, store.path, pages)
            times[way] += taken
    for way, taken in times.items():
        found[way]["token_ms"] = 1e3 * statistics.median(taken)
        found[way]["token_ms_range"] = [1e3 * min(taken), 1e3 * max(taken)]
    now, steps, python, plain = (found[way]["token_ms"] for way in _WAYS)
    return {
        "ok": all(found["now"][name] for name in _WANTED[case]),
        "faster": plain / now,
        "faster_than_steps": steps / now,
        "faster_than_python": python / now,
        "layers": len(store.layers),
        "ways": found,
    }


@contextmanager
def _way(way: str, ahead: str | None) -> Iterator[None]:
    plain = way == "plain"
    with (
        patch.dict(os.environ, {} if ahead is None else {RUN_AHEAD_VARIABLE: ahead}),
        patch.object(LaunchedLayers, "of", lambda *_: None) if way in ("python", "plain") else nullcontext(),
        patch.object(fused_steps, "recognise_layers", lambda *_: {}) if way == "steps" else nullcontext(),
        patch.object(QuickKernel, "of", lambda _: None) if plain else nullcontext(),
        patch.object(fused_steps.FusedSteps, "over", lambda _: nullcontext()) if plain else nullcontext(),
    ):
        yield


def _turn(gpu: Accelerator, path: Path, pages: int | None) -> tuple[list[float], dict[str, Any]]:
    generator = torch.Generator().manual_seed(1)
    gpu.release()
    options = OffloadOptions(accelerator=gpu, pages=pages)
    with moechat.load(path, device="cuda", ctx=_CONTEXT, offload=options) as engine:
        decoder, vocabulary = engine.decoder, engine.decoder.vocabulary

        def tokens(count: int) -> list[int]:
            return torch.randint(0, vocabulary, (count,), generator=generator).tolist()

        logits, cache = decoder.feed(tokens(_PROMPT), decoder.new_cache())

        def decode(count: int) -> list[float]:
            nonlocal logits, cache
            taken = []
            for token in tokens(count):
                begun = time.perf_counter()
                logits, cache = decoder.feed([token], cache)
                logits.cpu()
                taken.append(time.perf_counter() - begun)
            return taken

        decode(_WARM)
        near = engine.loaded.near
        assert near is not None
        near.reset_stats()
        times = decode(_TOKENS)
        stats = near.stats()
        recording = getattr(engine.loaded.decoder, "_recording", None)
        figures = {
            "graphs": isinstance(engine.loaded.decoder, GraphDecoder) and not engine.loaded.decoder.off,
            "ahead": getattr(recording, "ahead", None) is not None,
            "two_graphs": getattr(recording, "complete", None) is not None,
            "notices": engine.notices(),
            "hits": stats["blocks_resident"] / max(1, stats["blocks_wanted"]),
            "clocks_us": _clocks(near.layer(0).pages.clocks, decode),
            "gpu": _kernels(decode),
        }
    return times, figures


def _clocks(clocks: gpu_clocks.GpuClocks, decode: Any) -> dict[str, float]:
    """Microseconds of a layer, and of a token's head; empty where the layers do not wait for the host."""
    clocks.take()
    with patch.object(gpu_clocks, "EVERY", 1):
        clocks.expect_next()
        decode(_TIMED)
    found = clocks.take()
    if not found.layers:
        return {}
    return {
        "dense": 1e6 * found.dense_seconds / max(1, found.dense_layers),
        "experts": 1e6 * found.expert_seconds / found.layers,
        "waiting": 1e6 * found.waiting_seconds / found.layers,
        "deciding": 1e6 * found.deciding_seconds / found.layers,
        "head": 1e6 * found.head_seconds / max(1, found.tokens),
    }


def _kernels(decode: Any) -> dict[str, float]:
    """Kernels and copies of a token, and the milliseconds in which the GPU runs one."""
    from torch.profiler import ProfilerActivity, profile

    if not torch.cuda.is_available():  # over a stand-in
        decode(_PROFILED)
        return {"kernels": 0.0, "busy_ms": 0.0}
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        decode(_PROFILED)
        torch.cuda.synchronize()
    events = [event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    busy = sum(event.time_range.elapsed_us() for event in events) / 1e3
    return {"kernels": len(events) / _PROFILED, "busy_ms": busy / _PROFILED}


def table(cells: dict[str, Any]) -> str:
    """The cells of the stage, for people."""
    lines = []
    for case, found in cells.items():
        for way, one in found.get("ways", {}).items():
            clocks = ", ".join(f"{name} {value:.0f}" for name, value in one["clocks_us"].items())
            lines.append(
                f"{case}, {way}: {one['token_ms']:.2f} ms a token of {found['layers']} layers, "
                f"{one['gpu']['kernels']:.0f} kernels that run for {one['gpu']['busy_ms']:.2f} ms"
                + (f"; us: {clocks}" if clocks else "")
            )
        if "faster" in found:
            lines.append(
                f"{case}: {found['faster']:.2f} times as fast as plain, {found['faster_than_python']:.2f} as "
                f"from Python, {found['faster_than_steps']:.2f} as step by step"
            )
    return "\n".join(lines)
