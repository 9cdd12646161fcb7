"""Compares the native step of a decoder layer with the layer itself, bitwise.

Layers that differ only in their weights are of one kind, and one layer of each kind is compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import DynamicCache

from moechat.models.cache_layers import ReservedLayer
from moechat.models.decode.layers import Forward, LayerParts
from moechat.models.decode.probe import probing
from moechat.models.experts_interface import is_experts_module
from moechat.models.skeleton import EXPERTS_RUNNER

_PROBES = 3
_PROBE_KEYS = 5


def layer_kind(layer: nn.Module) -> tuple[Any, ...]:
    """A key that is equal for layers that differ only in their weights and index."""

    def plain(module: nn.Module) -> tuple[Any, ...]:
        values = sorted(
            (name, repr(value))
            for name, value in vars(module).items()
            if type(value) in (bool, int, float, str, tuple, type(None)) and name != "layer_idx"
        )
        tensors = [
            (name, tuple(tensor.shape), tensor.dtype)
            for holder in (module._parameters, module._buffers)
            for name, tensor in holder.items()
            if tensor is not None
        ]
        rule = getattr(vars(module).get("forward"), "__dict__", {}).get("rule")
        return (type(module), tuple(values), tuple(tensors), repr(rule))

    return tuple((name, plain(module)) for name, module in layer.named_modules())


class _StubExperts:
    """Replaces the experts of a layer; its result depends on the chosen experts and their weights."""

    def forward(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        mixed = (weights.float() * (1 + index.float() / 8)).sum(-1, keepdim=True)
        return (hidden.float() * mixed).to(hidden.dtype)


def agrees(layer: Any, ours: Forward) -> bool:
    """Whether ``ours`` and ``layer`` have the same results and cache contents for random tokens."""
    parts: LayerParts = ours.__dict__["kept"].parts
    weight = parts.before.weight
    assert isinstance(weight, torch.Tensor)
    with stub_experts(layer), probing() as generator:
        return _same(layer.forward, ours, parts, weight, generator)


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


def _same(
    theirs: Forward, ours: Forward, parts: LayerParts, weight: torch.Tensor, generator: torch.Generator
) -> bool:
    dtype, hidden_size = weight.dtype, weight.shape[0]
    attention, index = parts.attention, parts.attention.layer_idx
    kv_heads = attention.k_proj.out_features // attention.head_dim

    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=generator).to(dtype)

    caches = [DynamicCache(), DynamicCache()]
    for cache in caches:
        cache.layers = [ReservedLayer(_PROBE_KEYS + _PROBES) for _ in range(index + 1)]
    start = [normal(1, kv_heads, _PROBE_KEYS, attention.head_dim) for _ in range(2)]
    for cache in caches:
        cache.layers[index].update(*start)
    scale = 1.0
    for _ in range(_PROBES):
        hidden, angle = normal(1, 1, hidden_size) * scale, torch.rand(parts.angles, generator=generator) * 6
        results = []
        for forward, cache in zip((theirs, ours), caches, strict=True):
            try:
                result = forward(
                    hidden.clone(),
                    attention_mask=None,
                    past_key_values=cache,
                    position_embeddings=(
                        angle.cos()[None, None].to(dtype),
                        angle.sin()[None, None].to(dtype),
                    ),
                )
            except Exception:  # the family's code needs more than the probe has
                return False
            if not isinstance(result, torch.Tensor):
                return False
            layer = cache.layers[index]
            results.append([result, layer.keys, layer.values])
        if not all(map(torch.equal, *results)):
            return False
        scale *= 30
    return True
