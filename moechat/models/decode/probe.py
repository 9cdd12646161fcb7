"""Helpers to compare modules with native code on probe inputs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from moechat.models.element_types import ELEMENTS
from moechat.models.light_meta import light_meta

# Most tokens of a decoding pass; in larger passes torch's overhead is small compared to the products.
FEW_TOKENS = 8


def tolerance(dtype: torch.dtype) -> float:
    """Relative difference up to which two results count as equal but for rounding."""
    return {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]


def close(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Whether two results differ only by rounding, relative to the largest element."""
    if found.dtype != wanted.dtype or found.shape != wanted.shape or found.dtype not in ELEMENTS:
        return False
    size = float(wanted.float().abs().max()) if wanted.numel() else 0.0
    return bool(((found.float() - wanted.float()).abs() <= tolerance(wanted.dtype) * size).all())


def takes_hidden_states_only(module: nn.Module) -> bool:
    """Whether ``forward`` has one parameter; a probe would not show the effect of others, such as a gate."""
    try:
        return len(inspect.signature(module.forward).parameters) == 1
    except (TypeError, ValueError):
        return False


# Sizes of hidden states that are tried: with large ones, values that a family clips would differ.
SIZES = (1.0, 1.0, 20.0)
# Tokens of a probe of several at once.
MANY = 5


def normal_numbers(generator: torch.Generator, dtype: torch.dtype) -> Callable[..., torch.Tensor]:
    """A function that makes random tensors of given sizes."""

    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=generator).to(dtype)

    return normal


def hooks_of(modules: Iterable[nn.Module]) -> tuple[Any, ...]:
    """Hook dictionaries of modules that are bypassed if something is computed in another way."""
    return tuple(hooks for module in modules for hooks in (module._forward_pre_hooks, module._forward_hooks))


@contextmanager
def probing() -> Iterator[torch.Generator]:
    """Yield a generator with a fixed seed for probes, outside inference mode and without gradients."""
    with torch.inference_mode(False), torch.no_grad():
        yield torch.Generator().manual_seed(4099)


def inputs_dtype(model: Any) -> torch.dtype:
    """Type of the hidden states of a transformers model: its routers may have float32 weights beside."""
    embedding: nn.Module = model.get_input_embeddings()
    held = next(embedding.parameters(), None)
    device = "cpu" if held is None else held.device
    with probing(), light_meta():
        made: torch.Tensor = embedding(torch.zeros((1, 1), dtype=torch.int64, device=device))
    return made.dtype
