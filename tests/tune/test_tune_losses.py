"""The losses: the worked example, slow references for values and gradients, and the norm of the cache."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moechat.tune import losses
from moechat.tune.losses import cache_loss, chosen_mask, rank_loss, soft_cache, straight_through

EXAMPLE = torch.tensor([[[[0, 1], [0, 2], [0, 1]]]])  # one layer, one sequence, three tokens, K = 2


def slow_cache(
    requests: torch.Tensor, gamma: float, capacity: float, top_k: int, uniform: bool
) -> torch.Tensor:
    """The cache token by token, with the recursion of the paper: for ``requests`` ``[T, E]``."""
    tokens, experts = requests.shape
    if uniform:
        z, cache = 1.0, torch.full((experts,), capacity / experts, dtype=requests.dtype)
        found = []
        for t in range(tokens):
            found.append(cache)
            following = gamma * z + top_k / capacity
            cache = (gamma * z * cache + requests[t]) / following
            z = following
        return torch.stack(found)
    counts, norm, found = torch.zeros(experts, dtype=requests.dtype), 0.0, []
    for t in range(tokens):
        found.append(counts * (min(1.0, capacity / norm) if norm else 1.0))
        counts, norm = gamma * counts + requests[t], gamma * norm + top_k
    return torch.stack(found)


def slow_rank(tuned: torch.Tensor, base: torch.Tensor, margin: float) -> torch.Tensor:
    """The sum over all pairs of one token."""
    total = tuned.new_zeros(())
    for i in range(len(tuned)):
        for j in range(len(tuned)):
            if base[i] > base[j]:
                total = total + (margin - (tuned[i] - tuned[j])).clamp(min=0)
    return total


@pytest.mark.parametrize(("uniform", "expected"), [(True, (1 + 1 + 0.668) / 3), (False, (2 + 1 + 0.526) / 3)])
def test_the_worked_example_of_the_cache_loss(uniform: bool, expected: float) -> None:
    requests = chosen_mask(EXAMPLE, 4)
    found = cache_loss(requests, torch.tensor([3]), gamma=0.9, capacity=2, top_k=2, uniform=uniform)
    assert found.tolist() == pytest.approx([expected], abs=5e-4)
    assert expected == pytest.approx(0.889 if uniform else 1.175, abs=6e-4)


def test_the_worked_example_of_the_rank_loss_bounds_the_inversions() -> None:
    tuned, base = torch.tensor([[[[0.45, 0.2, 0.35]]]]), torch.tensor([[[[0.5, 0.3, 0.2]]]])
    found = float(rank_loss(tuned, base, torch.tensor([1]), margin=0.1))
    inversions = 1  # of experts 1 and 2
    assert found == pytest.approx(0.25)
    assert found >= 0.1 * inversions


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 999),
    tokens=st.integers(1, 40),
    gamma=st.sampled_from([0.0, 0.3, 0.9, 1.0]),
    capacity=st.integers(1, 8),
    uniform=st.booleans(),
)
def test_the_cache_is_that_of_the_paper_token_by_token(
    seed: int, tokens: int, gamma: float, capacity: int, uniform: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    index = torch.rand(tokens, 8, generator=generator).topk(2).indices
    requests = chosen_mask(index, 8).double()
    found = soft_cache(requests, gamma=gamma, capacity=capacity, top_k=2, uniform=uniform)
    torch.testing.assert_close(found, slow_cache(requests, gamma, capacity, 2, uniform))
    norms = found.sum(-1)
    if uniform:
        torch.testing.assert_close(norms, torch.full_like(norms, capacity))
    else:
        assert norms[0] == 0
        assert bool((norms <= capacity + 1e-9).all())


def test_a_filled_cache_holds_exactly_its_capacity() -> None:
    requests = chosen_mask(torch.rand(64, 16, generator=torch.Generator().manual_seed(1)).topk(4).indices, 16)
    norms = soft_cache(requests, gamma=0.9, capacity=8, top_k=4, uniform=False).sum(-1)
    assert norms[:3].tolist() == pytest.approx([0, 4, 7.6])
    assert norms[3:].tolist() == pytest.approx([8] * 61, abs=1e-5)


@pytest.mark.parametrize("uniform", [True, False])
def test_gradients_pass_through_both_factors_of_the_cache_loss(uniform: bool) -> None:
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(2, 3, 9, 6, generator=generator, dtype=torch.float64, requires_grad=True)
    tokens = torch.tensor([9, 4, 1])

    def requests() -> torch.Tensor:
        p = logits.softmax(-1)
        return straight_through(chosen_mask(p.topk(2).indices, 6).double(), p)

    fast = cache_loss(requests(), tokens, gamma=0.8, capacity=3, top_k=2, uniform=uniform)
    (gradient,) = torch.autograd.grad(fast.sum(), logits)

    made = requests()
    slow = []
    for row, length in enumerate(tokens.tolist()):
        of_layers = []
        for layer in range(2):
            r = made[layer, row, :length]
            of_layers.append((r * (1 - slow_cache(r, 0.8, 3, 2, uniform))).sum() / length)
        slow.append(torch.stack(of_layers).mean())
    torch.testing.assert_close(fast, torch.stack(slow))
    (expected,) = torch.autograd.grad(torch.stack(slow).sum(), logits)
    torch.testing.assert_close(gradient, expected)
    assert float(gradient[:, 0].abs().sum()) > 0
    assert float(gradient[:, 1, 4:].abs().sum()) == 0  # padding


@pytest.mark.parametrize("chunk", [1, 50, 1 << 22])
def test_the_rank_loss_and_its_gradient_are_those_of_all_pairs(
    monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    monkeypatch.setattr(losses, "CHUNK_ELEMENTS", chunk)
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(2, 2, 5, 7, generator=generator, dtype=torch.float64, requires_grad=True)
    base = torch.randn(2, 2, 5, 7, generator=generator, dtype=torch.float64).softmax(-1)
    tokens = torch.tensor([5, 3])
    fast = rank_loss(logits.softmax(-1), base, tokens, margin=0.1)
    (gradient,) = torch.autograd.grad((fast * torch.tensor([1.0, 2.0])).sum(), logits)

    tuned = logits.softmax(-1)
    slow = torch.stack(
        [
            torch.stack(
                [slow_rank(tuned[x, b, t], base[x, b, t], 0.1) for x in range(2) for t in range(length)]
            ).sum()
            / (2 * length)
            for b, length in enumerate(tokens.tolist())
        ]
    )
    torch.testing.assert_close(fast, slow)
    (expected,) = torch.autograd.grad((slow * torch.tensor([1.0, 2.0])).sum(), logits)
    torch.testing.assert_close(gradient, expected)


def test_a_flat_router_has_the_largest_rank_loss_without_inversions() -> None:
    base = torch.randn(1, 1, 1, 16, generator=torch.Generator().manual_seed(4)).softmax(-1)
    flat = torch.full_like(base, 1 / 16)
    found = float(rank_loss(flat, base, torch.tensor([1]), margin=0.1))
    assert found == pytest.approx(0.1 * 16 * 15 / 2, rel=1e-5)
