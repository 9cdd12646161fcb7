"""Attention over latents that are not expanded, against keys and values expanded for every head."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from isa_runner import isa_fixture

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
# Packed weights: the first two of those, and with groups that are not full.
PACKED: list[Sizes] = [*SIZES[:2], (3, 32, 12, 40, 16), (2, 16, 6, 275, 48)]
# Relative error against float64 with the same weights, by the bits of inputs; as test_linear.py.
BOUNDS = {32: 1e-5, 16: 1e-4, 8: 2e-2}
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
    packed: tuple[_native.LinearLayout, np.ndarray, int] | None = None,
) -> torch.Tensor:
    heads, plain, rotated, rank, value = sizes
    run = _native.LatentAttention(
        ELEMENTS[weight.dtype], heads, plain, rotated, rank, value, weight.data_ptr(), SCALE
    )
    if packed is not None:
        run = run.packed(*packed)
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


def quantised(
    sizes: Sizes, bits: int, activation_bits: int, weight: torch.Tensor
) -> tuple[tuple[_native.LinearLayout, np.ndarray, int], torch.Tensor]:
    """The weight packed, and as it is then."""
    rows = weight.float().flatten(0, 1).numpy()
    layout = _native.LinearLayout(*rows.shape, bits)
    data = _native.pack_linear(layout, rows)
    values = torch.from_numpy(_native.unpack_linear(layout, data)).view(weight.shape)
    return (layout, data, activation_bits), values


@pytest.mark.parametrize("activation_bits", list(BOUNDS))
@pytest.mark.parametrize("bits", [4, 6, 8])
@pytest.mark.parametrize("sizes", PACKED)
def test_packed_weights_give_what_their_values_give(sizes: Sizes, bits: int, activation_bits: int) -> None:
    for dtype in ELEMENTS:
        weight, *rows = inputs(sizes, 70, dtype)
        packed, values = quantised(sizes, bits, activation_bits, weight)
        wanted = expanded(sizes, values, *rows)
        got = attended(sizes, weight, *rows, packed=packed).double()
        rounding = {torch.float32: 0.0, torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype]
        error = (got - wanted).square().mean().sqrt() / wanted.square().mean().sqrt()
        assert error < BOUNDS[activation_bits] + rounding


@pytest.mark.parametrize("bits", [4, 6, 8])
def test_the_result_of_packed_weights_does_not_depend_on_threads(bits: int) -> None:
    for sizes in PACKED:
        weight, *rows = inputs(sizes, 300, torch.bfloat16)
        packed, _ = quantised(sizes, bits, 8, weight)
        results = []
        for count in (1, 2, 3, 7):
            _native.set_num_threads(count)
            results.append(attended(sizes, weight, *rows, packed=packed))
        assert all(torch.equal(results[0], other) for other in results)


run_under = isa_fixture(__file__, "packed_weights_give or expanded_keys")


@pytest.mark.parametrize("isa", _native.available_isas())
def test_every_instruction_set_computes_the_same(isa: str, run_under: Callable[[str], None]) -> None:
    run_under(isa)


def test_packed_weights_that_do_not_fit_are_refused() -> None:
    def run(*sizes: int) -> _native.LatentAttention:
        return _native.LatentAttention("float32", *sizes, 0, 1.0)

    def packed(rows: int, cols: int, bits: int) -> tuple[_native.LinearLayout, np.ndarray]:
        layout = _native.LinearLayout(rows, cols, bits)
        return layout, np.zeros(layout.nbytes, np.uint8)

    fits = packed(64, 40, 6)
    run(2, 16, 4, 40, 16).packed(*fits, 8)
    with pytest.raises(ValueError, match="plain and value_dim must be multiples of 16"):
        run(2, 12, 4, 40, 20).packed(*fits, 8)
    for rows, cols in ((96, 40), (64, 41)):
        with pytest.raises(ValueError, match="rows or columns do not fit the heads"):
            run(2, 16, 4, 40, 16).packed(*packed(rows, cols, 6), 8)
    with pytest.raises(ValueError, match="must have 4, 6 or 8 bits"):
        run(2, 16, 4, 40, 16).packed(*packed(64, 40, 3), 8)
    with pytest.raises(ValueError, match="activations of 9 bits"):
        run(2, 16, 4, 40, 16).packed(*fits, 9)
    with pytest.raises(ValueError, match="data"):
        run(2, 16, 4, 40, 16).packed(fits[0], fits[1][:-1], 8)


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
