"""Random tensors for the kernels of small steps, and how far their results may be from torch's."""

from __future__ import annotations

import torch
from kernel_support import DEVICE

TYPES = [torch.float32, torch.float16, torch.bfloat16]
# Of the largest element. The interpreter cuts what it converts to bfloat16, where a GPU rounds.
TOLERANCE = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def drawn(*sizes: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> torch.Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def close(found: torch.Tensor, expected: torch.Tensor, terms: int = 1) -> bool:
    """Whether results agree within rounding; of sums of so many terms, which round in another order."""
    assert found.dtype is expected.dtype
    assert found.shape == expected.shape
    error = (found.float() - expected.float()).abs().max()
    return float(error) <= TOLERANCE[found.dtype] * terms**0.5 * float(expected.float().abs().max())
