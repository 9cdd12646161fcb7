"""Keys and values in 8 bits: the same rows everywhere, and attention that reads them as if unpacked."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from native_support import run_isa

from moechat import _native
from moechat.models.packed_rows import pack, row_bytes, unpack

TYPES = [torch.float32, torch.bfloat16, torch.float16]


def packed(states: torch.Tensor) -> torch.Tensor:
    rows = torch.empty((*states.shape[:-1], row_bytes(states.shape[-1])), dtype=torch.uint8)
    pack(states, rows)
    return rows


def results(isa: str, known: dict[str, Any]) -> dict[str, Any]:
    if isa not in known:
        done = run_isa("import packed_rows_child; packed_rows_child.main()", isa)
        assert done.returncode == 0, done.stderr
        known[isa] = json.loads(done.stdout)
    return known[isa]


@pytest.fixture(scope="module")
def known() -> dict[str, Any]:
    return {}


@pytest.mark.parametrize("isa", _native.available_isas())
def test_attention_over_packed_rows_has_the_bits_of_attention_over_what_they_unpack_to(
    isa: str, known: dict[str, Any]
) -> None:
    result = results(isa, known)
    assert result["isa"] == isa
    assert result["unlike"] == []


def test_every_instruction_set_makes_the_same_rows(known: dict[str, Any]) -> None:
    assert len({results(isa, known)["digest"] for isa in _native.available_isas()}) == 1


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("dim", [1, 16, 33, 64, 128, 576])
def test_no_element_moves_by_more_than_a_128th_of_the_largest_of_its_group(
    dtype: torch.dtype, dim: int
) -> None:
    generator = torch.Generator().manual_seed(3)
    states = (torch.randn(1, 3, 50, dim, generator=generator) * 4).to(dtype)
    found = unpack(packed(states), dim, dtype)
    assert row_bytes(dim) == dim + -(-dim // 32)
    for x, y in zip(states.float().split(32, -1), found.float().split(32, -1), strict=True):
        largest = x.abs().amax(-1, keepdim=True)
        # Half a unit of rounding; the largest may be one unit off where 127 and a half would be 128.
        assert bool(((x - y).abs() <= largest / 64).all())
        assert float((x - y).norm() / x.norm()) < 0.012
    assert torch.equal(packed(found), packed(states)), "what was unpacked packs to the same rows"


@pytest.mark.parametrize("dtype", TYPES)
def test_rows_read_the_same_in_every_type(dtype: torch.dtype) -> None:
    states = torch.randn(1, 2, 40, 96, generator=torch.Generator().manual_seed(1)).to(dtype)
    rows = packed(states)
    assert torch.equal(unpack(rows, 96, dtype).float(), unpack(rows, 96, torch.float32))


def test_small_and_large_numbers_keep_their_magnitude() -> None:
    powers = torch.tensor([2.0**e for e in range(-118, 127, 7)])
    states = powers[None, None, :, None] * torch.linspace(-1, 1, 32)
    found = unpack(packed(states), 32, torch.float32)
    assert bool(((states - found).abs() <= powers[None, None, :, None] / 128).all())
    nothing = torch.zeros(1, 1, 2, 32)
    assert torch.equal(unpack(packed(nothing), 32, torch.float32), nothing)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), float("-inf")])
def test_what_is_no_number_makes_its_group_nan(dtype: torch.dtype, wrong: float) -> None:
    states = torch.ones(1, 1, 2, 70, dtype=dtype)
    states[0, 0, 1, 40] = wrong
    found = unpack(packed(states), 70, dtype)
    assert bool(found[0, 0, 1, 32:64].isnan().all())
    assert bool((found[0, 0, 1, :32] == 1).all())
    assert bool((found[0, 0, 1, 64:] == 1).all())
    assert bool((found[0, 0, 0] == 1).all())


def test_rows_of_another_size_are_refused() -> None:
    with pytest.raises(ValueError, match="do not hold 2 tokens of 1 heads of 32 elements"):
        pack(torch.ones(1, 1, 2, 32), torch.empty(1, 1, 2, 32, dtype=torch.uint8))
