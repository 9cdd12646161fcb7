"""Decoding of given tokens without sampling, so that all systems compute the same passes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from moechat.engine import Engine
from moechat.offload.experts import ExpertCounters, ExpertLayer, RunsExperts, attach
from moechat.store.store import Store


class Bench:
    """A loaded model for measurements, with forced decoding and replaceable expert runners.

    The dense weights are loaded once; only the expert runners are replaced between measurements.

    Attributes:
        engine: The loaded model.
        store: Its store.
        parts: Its experts modules, in order.
        top_k: Experts per token.
        vocabulary: Size of the vocabulary.
        seconds_in_experts: Seconds in expert layers during :meth:`experts`.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.store: Store = engine.loaded.store
        self.parts = engine.loaded.named_parts()
        self.activation_bits = int(engine.loaded.form.activation_bits)
        self.vocabulary = engine.decoder.vocabulary
        self.seconds_in_experts = 0.0
        self.top_k = self._observe_top_k()

    @property
    def model(self) -> nn.Module:
        """The transformers model."""
        model: nn.Module = self.engine.loaded.model
        return model

    @property
    def layers(self) -> int:
        """Number of expert layers."""
        return len(self.parts)

    @contextmanager
    def experts(self, runners: Sequence[RunsExperts]) -> Iterator[None]:
        """Compute the expert layers by ``runners`` during the block, and time them."""
        before: list[Any] = [part.module._moechat_layer for part in self.parts]
        try:
            for part, runner in zip(self.parts, runners, strict=True):
                attach(part.module, _Timed(self, runner))
            yield
        finally:
            for part, layer in zip(self.parts, before, strict=True):
                attach(part.module, layer)

    def mapped(self) -> list[RunsExperts]:
        """Runners that compute experts from the mapped store, as chosen by the model's routers."""
        counters = ExpertCounters()
        return [
            ExpertLayer(
                self.store.geometry,
                self.store.expert_layer(record.layer),
                counters,
                self.activation_bits,
                ordinal,
            )
            for ordinal, record in enumerate(self.store.layers)
        ]

    def start(self, prompt: Sequence[int]) -> tuple[float, Decoding]:
        """Compute a prompt; returns its seconds and the decoding to continue with."""
        decoding = Decoding(self.engine)
        return decoding.feed(prompt), decoding

    def watch(self, seen: Callable[[int, torch.Tensor, torch.Tensor], None]) -> Callable[[], None]:
        """Call ``seen(ordinal, hidden, top_k_index)`` before each expert layer; returns a function to
        end it.
        """

        def hook_of(ordinal: int) -> Callable[..., None]:
            def hook(module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
                hidden = named.get("hidden_states", arguments[0] if arguments else None)
                index = named.get("top_k_index", arguments[1] if len(arguments) > 1 else None)
                assert isinstance(hidden, torch.Tensor)
                assert isinstance(index, torch.Tensor)
                flat = hidden.detach().reshape(-1, hidden.shape[-1])
                seen(ordinal, flat.float(), index.detach().reshape(len(flat), -1))

            return hook

        handles = [
            part.module.register_forward_pre_hook(hook_of(ordinal), with_kwargs=True)
            for ordinal, part in enumerate(self.parts)
        ]

        def end() -> None:
            for handle in handles:
                handle.remove()

        return end

    def _observe_top_k(self) -> int:
        # Observed, because configurations have many names for it, and in some it is not a constant.
        found: list[int] = []
        end = self.watch(lambda _, __, index: found.append(index.shape[-1]))
        try:
            self.start([0])
        finally:
            end()
        return found[0]


class Decoding:
    """Decodes one sequence, in the same passes as an answer of the engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._cache: Any = engine.decoder.new_cache()

    def feed(self, tokens: Sequence[int]) -> float:
        """Compute tokens and the logits after the last one; returns the seconds."""
        started = time.perf_counter()
        _, self._cache = self._engine.decoder.feed(tokens, self._cache)
        return time.perf_counter() - started


class _Timed:
    """Adds up the seconds that an expert layer takes."""

    def __init__(self, bench: Bench, runner: RunsExperts) -> None:
        self._bench = bench
        self._runner = runner

    def forward(
        self, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        started = time.perf_counter()
        out = self._runner.forward(hidden, top_k_index, top_k_weights)
        self._bench.seconds_in_experts += time.perf_counter() - started
        return out
