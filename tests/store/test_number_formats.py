"""Number formats of quantised weights against torch, and packed integers against arithmetic."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moechat.store.quantised.codes import Codes
from moechat.store.quantised.number_formats import E2M1, E4M3, E8M0, as_float32, fields, nibbles, rounded


def test_every_code_has_the_value_that_torch_gives_it() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    for table, dtype in ((E4M3, torch.float8_e4m3fn), (E8M0, torch.float8_e8m0fnu)):
        expected = codes.view(dtype).float().numpy()
        assert np.array_equal(table, expected, equal_nan=True)
        assert np.array_equal(np.signbit(table), np.signbit(expected))


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=64))
@settings(max_examples=200, deadline=None)
def test_values_are_rounded_as_torch_rounds_them(bits: list[int]) -> None:
    values = np.array(bits, np.uint32).view(np.float32)
    for name, dtype in (("BF16", torch.bfloat16), ("F16", torch.float16)):
        expected = torch.from_numpy(values.copy()).to(dtype).float().numpy()
        ours = rounded(values, name)
        seen = ours.astype(np.float32) if name == "F16" else as_float32(ours, "BF16")
        assert np.array_equal(seen, expected, equal_nan=True)
    assert rounded(values, "F32") is values


@given(st.sampled_from([2, 4, 8]), st.integers(1, 5), st.integers(1, 4), st.randoms(use_true_random=False))
@settings(max_examples=100, deadline=None)
def test_fields_come_back_in_order(bits: int, rows: int, words: int, random: object) -> None:
    count = 32 // bits
    values = [[random.randrange(1 << bits) for _ in range(words * count)] for _ in range(rows)]  # type: ignore[attr-defined]
    packed = [
        [sum(row[word * count + i] << (bits * i) for i in range(count)) for word in range(words)]
        for row in values
    ]
    array = np.array(packed, np.uint32).view(np.int32)
    assert fields(array, bits).tolist() == values
    if bits == 4:
        assert nibbles(array.view(np.uint8)).tolist() == values


@pytest.mark.parametrize("group", [(1, 8), (1, 7), (4, 6), (5, 64), (64, 5), (200, 100)])
@pytest.mark.parametrize("taken", [slice(None), slice(3, 150, 2), slice(150, 151)])
def test_every_weight_takes_the_scale_of_its_group(group: tuple[int, int], taken: slice) -> None:
    generator = np.random.default_rng(0)
    rows, columns = 200, 40
    codes = generator.integers(0, 16, (rows, columns), dtype=np.uint8)
    grid = (-(-rows // group[0]), -(-columns // group[1]))
    scale = generator.standard_normal(grid).astype(np.float32)
    zero = generator.integers(0, 16, grid).astype(np.float32)
    by_row, by_column = np.arange(rows) // group[0], np.arange(columns) // group[1]
    wide, offset = scale[by_row][:, by_column], zero[by_row][:, by_column]
    affine = Codes("affine", 4, codes, scale, group, zero)
    assert np.array_equal(affine.values(taken), ((codes - offset) * wide)[taken])
    floats = Codes("e2m1", 4, codes, scale, group)
    assert np.array_equal(floats.values(taken), (E2M1[codes] * wide)[taken])
    own = np.linspace(-1, 1, 16).astype(np.float32)
    assert np.array_equal(Codes("table", 4, codes, scale, group, table=own).values(), own[codes] * wide)
    turned = Codes("affine", 4, np.asfortranarray(codes), scale, group, zero)
    assert np.array_equal(turned.values(taken), affine.values(taken))


def test_columns_in_another_order_take_the_scale_of_their_own_group() -> None:
    generator = np.random.default_rng(1)
    codes = generator.integers(0, 256, (700, 512), dtype=np.uint8)  # several pieces
    scale = generator.standard_normal((700, 4)).astype(np.float32)
    order = generator.integers(0, 4, 512)
    expected = codes.astype(np.float32) * scale[:, order]
    assert np.array_equal(Codes("affine", 8, codes, scale, (1, 128), column_group=order).values(), expected)
