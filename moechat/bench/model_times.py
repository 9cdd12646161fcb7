"""``T_att``, ``T_moe`` and ``T_head`` of a loaded model (MoEpic, section 3.4.1), measured by decoding.

Each expert layer computes the experts of one token from a resident copy of the model's records: of all of
them, or as many as fit in half of the free memory and 1 GiB, so that the processor's caches help no more than
with all experts resident. The time does not depend on the chosen experts, so they are taken in turn.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from moechat import _native
from moechat.bench.decode import Bench, Decoding
from moechat.engine import Engine
from moechat.errors import DoesNotFitError, UnsupportedModelError
from moechat.hardware.identity import this_machine
from moechat.hardware.memory import available_bytes
from moechat.hardware.profile import Figure, ModelTimes
from moechat.hardware.resident_pages import touched_pages
from moechat.hardware.times_file import TimesKey
from moechat.loading.model import ExpertsPart
from moechat.offload.experts import ExpertCounters, ExpertLayer
from moechat.store.store import Store

_MOST_BYTES = 1 << 30
_PROMPT_TOKENS = 16
_WARMUP_TOKENS = 4
_LEAST_TOKENS = 8
_SECONDS = 3.0


def times_key(engine: Engine) -> TimesKey:
    """Key of the times of this engine."""
    described = engine.describe()
    return TimesKey(
        profile=this_machine().key,
        model=engine.loaded.store.manifest.source.fingerprint,
        dtype=described.dense_dtype,
        threads=_native.num_threads(),
        bits=engine.loaded.store.geometry.bits,
        dense_bits=described.dense_bits,
        dense_bytes=engine.loaded.form.nbytes,
        activation_bits=described.activation_bits,
        kv_bits=described.kv_bits,
    )


def measure_model_times(engine: Engine, *, seconds: float = _SECONDS, tokens: int = 1 << 20) -> ModelTimes:
    """Time decoded tokens of a model with all experts resident.

    Args:
        engine: The model; its state is restored at the end.
        seconds: Approximate duration; at least 8 tokens are timed.
        tokens: Most tokens.

    Returns:
        Medians over the tokens, of the mean over the expert layers. The head includes everything outside the
        decoder layers with experts.

    Raises:
        DoesNotFitError: There is too little memory for two tokens' experts.
        MoechatError: The engine was closed.
    """
    bench = Bench(engine)
    records = _resident_records(bench.store, bench.top_k)
    room = engine.context_length - _PROMPT_TOKENS - _WARMUP_TOKENS
    if room < 1:
        raise DoesNotFitError(f"a context of {engine.context_length} tokens is too short to time any")
    generator = np.random.default_rng(0)
    drawn = generator.integers(0, bench.vocabulary, size=_PROMPT_TOKENS + _WARMUP_TOKENS).tolist()
    token = int(drawn[-1])
    shared = _CyclicExperts(bench.store, records, bench.top_k, bench.activation_bits)
    passes: list[tuple[float, float, float]] = []
    with bench.experts([shared] * bench.layers), _timed_layers(bench) as clock:
        decoding = Decoding(engine)
        decoding.feed(drawn[:_PROMPT_TOKENS])
        for each in drawn[_PROMPT_TOKENS:]:
            decoding.feed([int(each)])
        started = time.perf_counter()
        while len(passes) < min(tokens, room) and (
            len(passes) < _LEAST_TOKENS or time.perf_counter() - started < seconds
        ):
            clock.seconds = bench.seconds_in_experts = 0.0
            whole = decoding.feed([token])
            passes.append((whole, clock.seconds, bench.seconds_in_experts))
    how = f"median of {len(passes)} tokens after {_PROMPT_TOKENS + _WARMUP_TOKENS}, all experts resident"
    moe = statistics.median(experts for _, _, experts in passes) / bench.layers
    attention = statistics.median(layers - experts for _, layers, experts in passes) / bench.layers
    head = statistics.median(whole - layers for whole, layers, _ in passes)
    return ModelTimes(
        attention=Figure(max(0.0, attention), "measured", how),
        moe=Figure(moe, "measured", how),
        head=Figure(max(0.0, head), "measured", how),
    )


def _resident_records(store: Store, top_k: int) -> npt.NDArray[np.uint8]:
    """Copy the model's first experts: uint8 ``[experts, blocks, record_bytes]``."""
    geometry = store.geometry
    everything = len(store.layers) * geometry.num_experts
    fits = min(_MOST_BYTES, available_bytes() // 2) // geometry.expert_bytes
    count = min(everything, max(fits, 2 * top_k))
    if count > fits and count * geometry.expert_bytes > available_bytes():
        raise DoesNotFitError(
            f"timing the model takes {count} experts of {geometry.expert_bytes >> 20} MiB in memory; "
            f"{available_bytes() >> 20} MiB are available",
            hint="close other programs, or take fewer bits",
        )
    records = touched_pages(count, geometry.expert_bytes).reshape(
        count, geometry.blocks_per_expert, geometry.record_bytes
    )
    for at in range(0, count, geometry.num_experts):
        here = min(geometry.num_experts, count - at)
        records[at : at + here] = store.expert_layer(store.layers[at // geometry.num_experts].layer)[:here]
    return records


class _CyclicExperts:
    """Computes as many experts as the router chose, but cycles through all experts in memory."""

    def __init__(
        self, store: Store, records: npt.NDArray[np.uint8], top_k: int, activation_bits: int
    ) -> None:
        self._layer = ExpertLayer(store.geometry, records, ExpertCounters(), activation_bits)
        order = np.random.default_rng(0).permutation(len(records)).astype(np.int64)
        self._order = torch.from_numpy(np.concatenate([order, order[:top_k]]))
        self._count = len(records)
        self._next = 0

    def forward(
        self, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """As :meth:`moechat.offload.experts.ExpertLayer.forward`, with other experts."""
        wanted = top_k_index.shape[-1]
        chosen = self._order[self._next : self._next + wanted]
        self._next = (self._next + wanted) % self._count
        return self._layer.forward(hidden, chosen.expand_as(top_k_index), top_k_weights)


@dataclass
class _Clock:
    """Measures the seconds in decoder layers with experts."""

    seconds: float = 0.0
    started: list[float] = field(default_factory=list)

    def start(self, module: nn.Module, arguments: Any) -> None:
        self.started.append(time.perf_counter())

    def stop(self, module: nn.Module, arguments: Any, output: Any) -> None:
        self.seconds += time.perf_counter() - self.started.pop()


@contextmanager
def _timed_layers(bench: Bench) -> Iterator[_Clock]:
    clock = _Clock()
    handles = []
    try:
        for part in bench.parts:
            layer = decoder_layer(bench.model, part)
            handles.append(layer.register_forward_pre_hook(clock.start))
            handles.append(layer.register_forward_hook(clock.stop))
        yield clock
    finally:
        for handle in handles:
            handle.remove()


def decoder_layer(model: nn.Module, part: ExpertsPart) -> nn.Module:
    """The decoder layer of an experts module: its outermost ancestor that is an entry of a module list.

    Raises:
        UnsupportedModelError: It is not inside a module list.
    """
    names = part.name.split(".")
    for depth in range(1, len(names)):
        if isinstance(model.get_submodule(".".join(names[:depth])), nn.ModuleList):
            return model.get_submodule(".".join(names[: depth + 1]))
    raise UnsupportedModelError(f"{part.name} is in no list of decoder layers")
