"""Attention over latents that are not expanded, against keys and values expanded for every head."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from moechat import _native
from moechat.models.decode.probe import close
from moechat.models.element_types import ELEMENTS

# Heads, plain, rotated, rank, elements of a value: of GLM-4.7-Flash with fewer heads, of DeepSeek's, with
# parts of vectors, and with more columns than are computed at once.
Sizes = tuple[int, int, int, int, int]
SIZES: list[Sizes] = [
    (5, 192, 64, 512, 256),
    (16, 128, 64, 512, 128),
    (3, 20, 12, 40, 24),
    (2, 7, 6, 275, 67),
]
SCALE = 0.11


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = _native.num_threads()
    yield
    _native.set_num_threads(before)


def inputs(sizes: Sizes, context: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Weight, query, latents and rotated parts."""
    heads, plain, rotated, rank, value = sizes
    generator = torch.Generator().manual_seed(sum(sizes) + context)

    def normal(*shape: int, size: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * size).to(dtype)

    return [
        normal(heads, plain + value, rank, size=rank**-0.5),
        normal(heads, plain + rotated),
        normal(context, rank),
        normal(context, rotated),
    ]


def attended(
    sizes: Sizes,
    weight: torch.Tensor,
    query: torch.Tensor,
    latents: torch.Tensor,
    turned: torch.Tensor,
) -> torch.Tensor:
    heads, plain, rotated, rank, value = sizes
    run = _native.LatentAttention(
        ELEMENTS[weight.dtype], heads, plain, rotated, rank, value, weight.data_ptr(), SCALE
    )
    out = torch.full((heads, value), torch.nan, dtype=weight.dtype)
    run(
        *(query.data_ptr(), query.stride(0), latents.data_ptr(), latents.stride(0)),
        *(turned.data_ptr(), turned.stride(0), len(latents), out.data_ptr()),
    )
    return out


def expanded(
    sizes: Sizes,
    weight: torch.Tensor,
    query: torch.Tensor,
    latents: torch.Tensor,
    turned: torch.Tensor,
) -> torch.Tensor:
    _, plain, _, _, _ = sizes
    weight, query, latents, turned = (each.double() for each in (weight, query, latents, turned))
    both = torch.einsum("hor,cr->hco", weight, latents)
    scores = torch.einsum("hp,hcp->hc", query[:, :plain], both[..., :plain]) + query[:, plain:] @ turned.T
    return torch.einsum("hc,hco->ho", (scores * SCALE).softmax(-1), both[..., plain:])


@pytest.mark.parametrize("dtype", list(ELEMENTS))
@pytest.mark.parametrize("sizes", SIZES)
def test_a_token_attends_as_to_expanded_keys_and_values(sizes: Sizes, dtype: torch.dtype) -> None:
    for context in (1, 9, 130):
        given = inputs(sizes, context, dtype)
        wanted = expanded(sizes, *given).to(dtype)
        assert float(wanted.float().abs().max()) > 0.1
        assert close(attended(sizes, *given), wanted)


def test_rows_may_lie_apart() -> None:
    sizes = SIZES[2]
    weight, *rows = inputs(sizes, 33, torch.bfloat16)
    apart = [torch.cat([each, each + 1], dim=1)[:, : each.shape[1]] for each in rows]
    assert not any(each.is_contiguous() for each in apart)
    assert torch.equal(attended(sizes, weight, *apart), attended(sizes, weight, *rows))


@pytest.mark.parametrize("sizes", SIZES)
def test_the_result_does_not_depend_on_threads(sizes: Sizes) -> None:
    given = inputs(sizes, 300, torch.bfloat16)
    results = []
    for count in (1, 2, 3, 7):
        _native.set_num_threads(count)
        results.append(attended(sizes, *given))
    assert all(torch.equal(results[0], other) for other in results)


def test_sizes_that_are_not_possible_are_refused() -> None:
    weight = torch.zeros(64)
    for place, name in enumerate(("heads", "plain", "rotated", "rank", "value_dim")):
        sizes = [2, 4, 4, 4, 4]
        sizes[place] = 0
        with pytest.raises(ValueError, match=f"{name} is 0; it must be at least 1"):
            _native.LatentAttention("float32", *sizes, weight.data_ptr(), 1.0)
    run = _native.LatentAttention("float32", 2, 4, 4, 4, 4, weight.data_ptr(), 1.0)
    with pytest.raises(ValueError, match="context is 0"):
        run(0, 0, 0, 0, 0, 0, 0, 0)
