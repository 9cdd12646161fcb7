"""The losses of MELINOE: misses of a simulated cache, and the order of the base router's experts.

Shapes: L expert layers, T tokens of a sequence, E experts of a layer, K chosen for a token.
"""

from __future__ import annotations

from typing import Any

import torch

# Elements of a chunk of the rank loss, in which a row of E probabilities makes E x E: 16 MiB in float32.
CHUNK_ELEMENTS = 1 << 22


def chosen_mask(index: torch.Tensor, experts: int) -> torch.Tensor:
    """The request vectors r.

    Args:
        index: Chosen experts, int64 ``[..., K]``.
        experts: E.

    Returns:
        float32 ``[..., E]``, 1 for chosen experts.
    """
    mask = torch.zeros((*index.shape[:-1], experts), device=index.device)
    return mask.scatter_(-1, index, 1.0)


def straight_through(chosen: torch.Tensor, probabilities: torch.Tensor) -> torch.Tensor:
    """Request vectors with the values of ``chosen`` and the gradient of ``probabilities``, ``[..., E]``."""
    return chosen + (probabilities - probabilities.detach())


def soft_cache(
    requests: torch.Tensor, *, gamma: float, capacity: float, top_k: int, uniform: bool
) -> torch.Tensor:
    """The soft cache before each token (equations 8 and 11).

    Counts decay by γ for each token; scaled to the capacity they are the cache. All tokens are computed by
    one product with a triangular matrix of powers of γ instead of a loop.

    Args:
        requests: r, float ``[..., T, E]``; each sums to K.
        gamma: γ.
        capacity: C.
        top_k: K. The norm of the counts depends on it alone, so the norm has no gradient.
        uniform: Counts start with C/E each; else with none, and fill up to C.

    Returns:
        c ``[..., T, E]``.
    """
    tokens, experts = requests.shape[-2:]
    step = torch.arange(tokens, dtype=torch.float64)
    age = step[:, None] - 1 - step[None, :]  # of request i before token t
    decay = torch.where(age >= 0, torch.as_tensor(gamma, dtype=torch.float64) ** age.clamp(min=0), 0.0)
    start = torch.as_tensor(gamma, dtype=torch.float64) ** step  # what is left of the initial counts
    norm = top_k * decay.sum(1) + (capacity * start if uniform else 0.0)
    scale = capacity / norm.clamp(min=1e-300)
    if not uniform:
        scale = scale.clamp(max=1.0)
    where: dict[str, Any] = {"dtype": requests.dtype, "device": requests.device}
    counts = (decay * scale[:, None]).to(**where) @ requests
    if uniform:
        counts = counts + (start * scale * (capacity / experts)).to(**where)[:, None]
    return counts


def cache_loss(
    requests: torch.Tensor,
    tokens: torch.Tensor,
    *,
    gamma: float,
    capacity: float,
    top_k: int,
    uniform: bool,
) -> torch.Tensor:
    """The cache simulation loss of each sequence (equation 4).

    Args:
        requests: r of :func:`straight_through`, ``[L, B, T, E]``; padding stands at the end.
        tokens: Of each sequence, int64 ``[B]``.
        gamma: γ.
        capacity: C.
        top_k: K.
        uniform: As for :func:`soft_cache`.

    Returns:
        ``[B]``: means over layers and tokens of Σ r (1 - c).
    """
    cache = soft_cache(requests, gamma=gamma, capacity=capacity, top_k=top_k, uniform=uniform)
    misses = (requests * (1.0 - cache)).sum(-1)  # [L, B, T]
    return mean_over_tokens(misses, tokens)


def rank_loss(
    tuned: torch.Tensor, base: torch.Tensor, tokens: torch.Tensor, *, margin: float
) -> torch.Tensor:
    """The rank matching loss of each sequence (equation 5).

    Args:
        tuned: Probabilities of the tuned routers, float32 ``[L, B, T, E]``.
        base: Those of the base routers, without gradient.
        tokens: Of each sequence, int64 ``[B]``.
        margin: ρ.

    Returns:
        ``[B]``: means over layers and tokens of Σ [ρ - (p_i - p_j)]₊ over the pairs with base p_i > p_j.
    """
    experts = tuned.shape[-1]
    mistakes: torch.Tensor = _Mistakes.apply(  # type: ignore[no-untyped-call]
        tuned.reshape(-1, experts), base.reshape(-1, experts), margin
    )
    return mean_over_tokens(mistakes.reshape(tuned.shape[:-1]), tokens)


def mean_over_tokens(values: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Means ``[B]`` over layers and the first ``tokens`` of ``[L, B, T]``."""
    real = torch.arange(values.shape[-1], device=values.device) < tokens[:, None]  # [B, T]
    sums = torch.where(real, values, 0.0).sum(-1).mean(0)
    return sums / tokens.clamp(min=1)


class _Mistakes(torch.autograd.Function):
    """Sums over pairs, by rows in chunks. The gradient is computed at once: no pair is kept for backward."""

    @staticmethod
    def forward(ctx: Any, tuned: torch.Tensor, base: torch.Tensor, margin: float) -> torch.Tensor:
        """Rows ``[N, E]`` to sums ``[N]``."""
        rows, experts = tuned.shape
        chunk = max(1, CHUNK_ELEMENTS // (experts * experts))
        out = tuned.new_empty(rows)
        slope = torch.empty_like(tuned)
        for a in range(0, rows, chunk):
            part, before = tuned[a : a + chunk], base[a : a + chunk]
            gap = margin - (part[:, :, None] - part[:, None, :])  # [rows, i, j]
            active = (before[:, :, None] > before[:, None, :]) & (gap > 0)
            out[a : a + chunk] = torch.where(active, gap, 0.0).sum((1, 2))
            slope[a : a + chunk] = active.sum(1).to(part.dtype) - active.sum(2).to(part.dtype)
        ctx.save_for_backward(slope)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (slope,) = ctx.saved_tensors
        return slope * grads[0][:, None], None, None
