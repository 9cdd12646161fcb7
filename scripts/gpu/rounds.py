"""Measures one model on one GPU: systems in turns, against the floor of what must be read and moved."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from moechat.budget.gpu_sizes import MIN_PAGES
from moechat.configurator.systems import CacheSettings, settings_of
from moechat.engine import Engine
from moechat.loading.load import gather_knowledge
from moechat.loading.model import LoadedModel
from moechat.offload.experts import attach
from moechat.offload.gpu import GpuPlacement
from moechat.offload.tier import ExpertTier, TierConfig
from moechat.routing import Replay, Trace, map_trace

Say = Callable[[str], None]


@dataclass(frozen=True)
class Rounds:
    """How much is measured.

    Attributes:
        prompts: Lengths of prompts whose time to the first token is taken.
        contexts: Of these, those after which tokens are decoded; the first is the usual one.
        warm: Decoded tokens before those that are timed.
        tokens: Decoded tokens that are timed, one by one.
        rounds: Turns of every system.
    """

    prompts: tuple[int, ...] = (128, 1024, 4096, 16384)
    contexts: tuple[int, ...] = (128, 4096, 16384)
    warm: int = 64
    tokens: int = 64
    rounds: int = 2


def copied_rate(accelerator: Any, nbytes: int = 256 << 20) -> float:
    """Bytes a second from pinned memory to the GPU: the best of five copies."""
    host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=accelerator.device.type == "cuda")
    there = torch.empty_like(host, device=accelerator.device)
    return nbytes / min(
        accelerator.seconds(lambda: there.copy_(host, non_blocking=True), 1) for _ in range(5)
    )


def read_rate(accelerator: Any, nbytes: int = 1 << 30) -> float:
    """Bytes a second that the GPU reads of its own memory: the best of five sums."""
    there = torch.ones(nbytes // 4, dtype=torch.float32, device=accelerator.device)
    return nbytes / min(accelerator.seconds(there.sum, 1) for _ in range(5))


def measure(
    engine: Engine,
    systems: Sequence[str],
    rounds: Rounds,
    *,
    rates: Mapping[str, float],
    trace: Trace | None,
    say: Say,
    around: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> dict[str, Any]:
    """All systems on one loaded model, in turns, each with pages of its own.

    Args:
        engine: On a GPU; its own pages are given up, and afterwards it can only be closed.
        systems: Names.
        rounds: How much.
        rates: ``link`` and ``vram``: bytes a second.
        trace: Routing to play back; ``None``: what the model's routers choose.
        say: Told what is done.
        around: Around each turn. What has to wait for the whole GPU, such as recording, comes before it.

    Returns:
        Plain values: the budget, and of every system its figures.
    """
    loaded = engine.loaded
    mapped = None
    if trace is not None:
        geometry = loaded.store.geometry
        mapped = map_trace(
            trace, layers=len(loaded.store.layers), experts=geometry.num_experts, top_k=loaded.top_k
        ).trace
    first = loaded.near
    assert first is not None
    if loaded.upkeep is not None:
        loaded.upkeep.close()
        loaded = engine.passes.loaded = replace(loaded, upkeep=None)
    engine._meter.close()
    pages, placement = max(first.pages, MIN_PAGES), first.detach()
    assert isinstance(placement, GpuPlacement)
    turns: dict[str, list[dict[str, Any]]] = {system: [] for system in systems}
    for number in range(rounds.rounds):
        for system in systems if number % 2 == 0 else reversed(systems):
            say(f"round {number + 1}, {system}")
            replay = None if mapped is None else Replay(mapped)
            with _tier(loaded, placement, pages, settings_of(system), replay) as near:
                if around is not nullcontext:
                    turn(engine, near, Rounds(rounds.contexts[:1], rounds.contexts[:1], warm=4, tokens=4))
                with around():
                    turns[system].append(turn(engine, near, rounds))
    placement.close()
    accelerator = loaded.accelerator
    assert accelerator is not None
    plan = loaded.plan
    return {
        "budget_bytes": plan.budget,
        "peak_bytes": accelerator.context_bytes + accelerator.peak_bytes(),
        "pages": pages,
        "page_bytes": plan.page_bytes,
        "dense_bytes": plan.dense,
        "context": plan.context,
        "systems": {system: _figures(loaded, found, rates) for system, found in turns.items()},
    }


@contextmanager
def _tier(
    loaded: LoadedModel, placement: GpuPlacement, pages: int, settings: CacheSettings, replay: Replay | None
) -> Iterator[ExpertTier]:
    """The model over a tier of another system."""
    config = TierConfig(
        loaded.store, loaded.top_k, replay=replay, activation_bits=loaded.form.activation_bits
    )
    near = ExpertTier(
        config,
        placement,
        pages=pages,
        settings=settings,
        counters=loaded.counters,
        knowledge=gather_knowledge(loaded.store, loaded.outline, settings, placement),
    )
    try:
        for ordinal, part in enumerate(loaded.parts):
            attach(part, near.layer(ordinal))
        yield near
    finally:
        near.detach()


def turn(engine: Engine, near: ExpertTier, rounds: Rounds) -> dict[str, Any]:
    """Prompts of every length, and tokens after some of them.

    Returns:
        ``first``: seconds by length; ``decoded``: by context, ``times`` of tokens in seconds and ``stats``.
    """
    generator = torch.Generator().manual_seed(1)
    vocabulary = engine.decoder.vocabulary
    most = engine.context_length - rounds.warm - rounds.tokens

    def tokens(count: int) -> list[int]:
        return torch.randint(0, vocabulary, (count,), generator=generator).tolist()

    first: dict[int, float] = {}
    decoded: dict[int, dict[str, Any]] = {}
    for length in (length for length in rounds.prompts if length <= most):
        begun = time.perf_counter()
        cache = _feed(engine, engine.decoder.new_cache(), tokens(length))
        first[length] = time.perf_counter() - begun
        if length in rounds.contexts:
            decoded[length] = _decode(engine, near, cache, tokens, rounds)
        del cache  # the plan has memory for one
    return {"first": first, "decoded": decoded}


def _decode(
    engine: Engine, near: ExpertTier, cache: Any, tokens: Callable[[int], list[int]], rounds: Rounds
) -> dict[str, Any]:
    for token in tokens(rounds.warm):
        cache = _feed(engine, cache, [token])
    near.reset_stats()
    times = []
    for token in tokens(rounds.tokens):
        begun = time.perf_counter()
        cache = _feed(engine, cache, [token])
        times.append(time.perf_counter() - begun)
    return {"times": times, "stats": near.stats()}


def _feed(engine: Engine, cache: Any, tokens: Sequence[int]) -> Any:
    logits, cache = engine.decoder.feed(tokens, cache)
    logits.cpu()  # waits, as drawing a token does
    return cache


def _figures(loaded: LoadedModel, turns: list[dict[str, Any]], rates: Mapping[str, float]) -> dict[str, Any]:
    return {
        "first_token_s": {
            length: statistics.median(turn["first"][length] for turn in turns) for length in turns[0]["first"]
        },
        "decode": {
            context: _decoding(loaded, [turn["decoded"][context] for turn in turns], context, rates)
            for context in turns[0]["decoded"]
        },
    }


def _decoding(
    loaded: LoadedModel, turns: list[dict[str, Any]], context: int, rates: Mapping[str, float]
) -> dict[str, Any]:
    """Figures of decoded tokens, and the floor of the hit rate that they had: what must be read and moved."""
    times = [time for turn in turns for time in turn["times"]]
    count = len(times)
    total = {key: sum(turn["stats"][key] for turn in turns) for key in turns[0]["stats"]}
    geometry = loaded.store.geometry
    active = loaded.top_k * len(loaded.store.layers) * geometry.expert_bytes
    wanted = sum(total[f"hits_{kind}"] for kind in ("full", "prefetch", "top", "miss"))
    # What must be moved, or computed by the CPU, and cannot be hidden by anything: demanded bytes over the
    # link and shared ones at the CPU's rate beside it, both at once; and what must be read.
    shared = total["blocks_far"] * geometry.record_bytes
    cpu = shared / total["far_seconds"] if shared else 0.0
    moved = (total["link_bytes_demand"] + shared) / count / (rates["link"] + cpu)
    keys_and_values = loaded.cache.read_bytes(context)
    read = (loaded.form.in_layers + loaded.form.head_bytes + active + keys_and_values) / rates["vram"]
    token = statistics.median(times)
    return {
        "token_ms": 1e3 * token,
        "token_ms_range": [1e3 * min(times), 1e3 * max(times)],
        "tokens_a_second": count / sum(times),
        "hit_rates": {
            kind: total[f"hits_{kind}"] / wanted if wanted else 0.0
            for kind in ("full", "prefetch", "top", "miss")
        },
        "link_bytes_a_token": total["link_bytes"] / count,
        "cpu_bytes_a_token": shared / count,
        "cpu_bytes_a_second": cpu,
        "link_busy_share": total["link_busy_seconds"] / sum(times),
        "floor_ms": 1e3 * max(moved, read),
        "floor_share": max(moved, read) / token,
    }
