"""What the native parts of a decoding step work on."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

# Names of the native code.
ELEMENTS = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
# Tokens of a pass that counts as decoding; in passes of more, torch's own price is small beside the products.
FEW_TOKENS = 8


def tolerance(dtype: torch.dtype) -> float:
    """Relative distance at which two ways of rounding the same result still count as the same."""
    return {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]


def close(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Whether two results differ by no more than rounding does, element by element of the largest one."""
    if found.dtype != wanted.dtype or found.shape != wanted.shape or found.dtype not in ELEMENTS:
        return False
    size = float(wanted.float().abs().max()) if wanted.numel() else 0.0
    return bool(((found.float() - wanted.float()).abs() <= tolerance(wanted.dtype) * size).all())


def takes_hidden_states_only(module: nn.Module) -> bool:
    """Whether ``forward`` has one parameter. With more, a gate say, a probe would not show what they do."""
    try:
        return len(inspect.signature(module.forward).parameters) == 1
    except (TypeError, ValueError):
        return False


@contextmanager
def probing() -> Iterator[torch.Generator]:
    """Probes are the same for every load, and their results no inference tensors."""
    with torch.inference_mode(False), torch.no_grad():
        yield torch.Generator().manual_seed(4099)
