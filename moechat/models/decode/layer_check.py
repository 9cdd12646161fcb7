"""Compares the native step of a decoder layer with the layer itself.

Layers that differ only in their weights are of one kind, and one layer of each kind is compared: bitwise if
the step is exact. Else its structure is compared too, see :mod:`moechat.models.decode.known_layers`, since
small parts are not seen in a sum that is rounded.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import DynamicCache

from moechat.models.cache_argument import CACHE
from moechat.models.cache_layers import ReservedLayer
from moechat.models.cache_states import tensors_of
from moechat.models.decode.native_step import Forward, NativeStep
from moechat.models.decode.probe import close, probing
from moechat.models.experts_interface import is_experts_module
from moechat.models.skeleton import EXPERTS_RUNNER

_PROBES = 3
_PROBE_KEYS = 5
_SEED = 4099


class _StubExperts:
    """Replaces the experts of a layer; its result depends on the chosen experts and their weights."""

    def forward(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        mixed = (weights.float() * (1 + index.float() / 8)).sum(-1, keepdim=True)
        return (hidden.float() * mixed).to(hidden.dtype)


def agrees(layer: Any, ours: Forward) -> bool:
    """Whether ``ours`` and ``layer`` have the same results and cache contents for random tokens."""
    native: NativeStep = ours.__dict__["kept"]
    with stub_experts(layer), probing() as generator:
        return _same(layer.forward, ours, native, generator)


@contextmanager
def stub_experts(module: nn.Module) -> Iterator[None]:
    """Replace the experts of a module, which may not be attached yet, in this context."""
    before = {part: vars(part).get(EXPERTS_RUNNER) for part in module.modules() if is_experts_module(part)}
    try:
        for part in before:
            vars(part)[EXPERTS_RUNNER] = _StubExperts()
        yield
    finally:
        for part, runner in before.items():
            vars(part)[EXPERTS_RUNNER] = runner


def _same(theirs: Forward, ours: Forward, native: NativeStep, generator: torch.Generator) -> bool:
    dtype, index = native.dtype, native.index
    caches: list[Any] = [DynamicCache(), DynamicCache()]
    for cache in caches:
        slot = native.first_slot(_PROBE_KEYS, torch.Generator().manual_seed(_SEED))
        cache.layers = [*(ReservedLayer(1) for _ in range(index)), slot]
    scale = 1.0
    for _ in range(_PROBES):
        hidden = (torch.randn((1, 1, native.hidden_size), generator=generator) * scale).to(dtype)
        angle = torch.rand(native.angles, generator=generator) * 6
        turns = angle.cos()[None, None].to(dtype), angle.sin()[None, None].to(dtype)
        results = []
        for forward, cache in zip((theirs, ours), caches, strict=True):
            try:
                result = forward(
                    hidden.clone(),
                    attention_mask=None,
                    **{CACHE: cache},
                    position_embeddings=turns if native.angles else None,
                )
            except Exception:  # the family's code needs more than the probe has
                return False
            if not isinstance(result, torch.Tensor):
                return False
            results.append([result, *(rows.clone() for rows in tensors_of(cache.layers[index]))])
        if not all(map(torch.equal if native.exact else close, *results)):
            return False
        # Small hidden states, so that what a layer adds to them is seen in spite of rounding.
        scale *= 30 if native.exact else 0.01
    return True
