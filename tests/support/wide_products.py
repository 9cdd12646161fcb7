"""The products of few tokens in wide operations, for Triton's interpreter: its time goes by their number.

For tests of what surrounds the kernels; ``tests/offload/kernels`` tests the kernels themselves.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from moechat.offload.kernels.triton_kept_codes import HALVES, kept_values, steps_of, super_values
from moechat.offload.kernels.triton_kept_grids import factor_words, grid_codes


@triton.jit
def group_products(x, last, words, sz, real, BITS: tl.constexpr, FP16: tl.constexpr, _masked, _partly):
    column = tl.arange(0, 64)
    inputs = tl.load(x[:, :, :, None] + column, mask=column < last[:, :, :, None], other=0.0).to(tl.float32)
    if BITS == 3:
        low = tl.load(words[:, :, :, None] + column // 16 * 16, mask=real[:, :, :, None], other=0)
        high = tl.load(words[:, :, :, None] + 64 + column // 32 * 16, mask=real[:, :, :, None], other=0)
        codes = ((low >> (column % 16 * 2)) & 3) + ((high >> column % 32) & 1) * 4
    elif BITS == 6:
        low = tl.load(words[:, :, :, None] + column // 8 * 16, mask=real[:, :, :, None], other=0)
        high = tl.load(words[:, :, :, None] + 128 + column // 16 * 16, mask=real[:, :, :, None], other=0)
        place = 8 * (column % 8 // 2) + 4 * (column % 16 // 8) + 2 * (column % 2)
        codes = ((low >> (column % 8 * 4)) & 15) + ((high >> place) & 3) * 16
    else:
        COLUMNS: tl.constexpr = 32 // BITS
        packed = tl.load(words[:, :, :, None] + column // COLUMNS * 16, mask=real[:, :, :, None], other=0)
        codes = (packed >> (column % COLUMNS * BITS)) & ((1 << BITS) - 1)
    if BITS == 16:
        if FP16:
            weights = codes.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        else:
            weights = (codes << 16).to(tl.float32, bitcast=True)
    elif BITS > 4:
        scale = tl.load(sz, mask=real, other=0.0).to(tl.float32)
        zero = tl.load(sz + 16, mask=real, other=0.0).to(tl.float32)
        weights = (codes.to(tl.float32) - zero[:, :, :, None]) * scale[:, :, :, None]
    else:
        both = tl.load(sz, mask=real, other=0)
        step = (((both >> 4) & 0x0FF00000) + 0x33800000).to(tl.float32, bitcast=True)[:, :, :, None]
        both = both[:, :, :, None]
        half = column // 32
        whole = codes * ((both >> (8 + 4 * half)) & 15) - ((both >> (16 * half)) & 255)
        weights = whole.to(tl.float32) * step
    return tl.sum(inputs * weights, axis=3)


@triton.jit
def pair_products(
    x, last, words, sz, UP: tl.constexpr, UP_SZ: tl.constexpr, BITS: tl.constexpr, FP16: tl.constexpr, _masked
):
    every = tl.full([1, 1, 1], True, tl.int1)
    gate = group_products(x, last, words, sz, every, BITS, FP16, True, True)
    up = group_products(x, last, words + UP, sz + UP_SZ, every, BITS, FP16, True, True)
    return gate, up


@triton.jit
def _kept_plane(words, real, PLACE: tl.constexpr, WIDTH: tl.constexpr):
    column = tl.arange(0, 64)
    PER: tl.constexpr = 32 // WIDTH
    packed = tl.load(words[:, :, :, None] + PLACE + column // PER * 16, mask=real[:, :, :, None], other=0)
    inside = column % PER
    return (packed >> (8 * (inside % 4) + WIDTH * (inside // 4))) & ((1 << WIDTH) - 1)


@triton.jit
def kept_group_products(
    x, last, words, sz, supers, table, real, FIRST: tl.constexpr, SECOND: tl.constexpr, TABLE: tl.constexpr,
    SUBS: tl.constexpr, SCALES: tl.constexpr, ZERO: tl.constexpr, SUPERS: tl.constexpr, _partly,
):  # fmt: skip
    column = tl.arange(0, 64)
    inputs = tl.load(x[:, :, :, None] + column, mask=column < last[:, :, :, None], other=0.0).to(tl.float32)
    scales = tl.load(sz, mask=real, other=0)[:, :, :, None]
    if SCALES < HALVES:
        at, there = words[:, :, :, None], real[:, :, :, None]
        packed = grid_codes(at, scales, column // 4, there, table, SCALES)
        codes = (packed >> (8 * (column % 4))) & 255
        scales = factor_words(at, scales, column // 32, there, SCALES)
    else:
        codes = _kept_plane(words, real, 0, FIRST)
        if SECOND:
            codes |= _kept_plane(words, real, 32 * FIRST, SECOND) << FIRST
    first, second = super_values(supers, real, SUPERS, SCALES)
    step, minimum = steps_of(
        scales, first[:, :, :, None], second[:, :, :, None], column // (64 // SUBS), SUPERS, SCALES
    )
    return tl.sum(inputs * (kept_values(codes, table, TABLE, ZERO) * step - minimum), axis=3)


@triton.jit
def kept_pair_products(
    x, last, words, sz, supers, table, UP: tl.constexpr, UP_SZ: tl.constexpr, UP_SUPER: tl.constexpr,
    FIRST: tl.constexpr, SECOND: tl.constexpr, TABLE: tl.constexpr, SUBS: tl.constexpr, SCALES: tl.constexpr,
    ZERO: tl.constexpr, SUPERS: tl.constexpr, GATED: tl.constexpr, _masked,
):  # fmt: skip
    every = tl.full([1, 1, 1], True, tl.int1)
    gate = kept_group_products(
        x, last, words, sz, supers, table, every, FIRST, SECOND, TABLE, SUBS, SCALES, ZERO, SUPERS, False
    )
    up = tl.zeros_like(gate)
    if GATED:
        up = kept_group_products(
            x, last, words + UP, sz + UP_SZ, supers + UP_SUPER, table, every, FIRST, SECOND, TABLE, SUBS,
            SCALES, ZERO, SUPERS, False,
        )  # fmt: skip
    return gate, up


def use_wide_products(patch: Any) -> None:
    """Until ``patch``, a ``pytest.MonkeyPatch``, is undone; where the kernels are interpreted."""
    from moechat.offload.kernels import launch, triton_few, triton_kept_few

    if launch.INTERPRETED:
        patch.setattr(triton_few, "group_products", group_products)
        patch.setattr(triton_few, "pair_products", pair_products)
        patch.setattr(triton_kept_few, "_group_products", kept_group_products)
        patch.setattr(triton_kept_few, "_pair_products", kept_pair_products)


def use_cheaper_kernels(patch: Any) -> None:
    """Everything that makes kernels cheap in the interpreter, as tests of the engine use it."""
    from moechat.offload.kernels import attention, launch, layer_steps, packed_linear

    use_wide_products(patch)
    if launch.INTERPRETED:
        # Few splits of few keys, so that short contexts have several.
        patch.setattr(attention, "PROGRAMS", 8)
        patch.setattr(attention, "TILE_KEYS", (16, 16))
        patch.setattr(packed_linear, "ROWS", 64)
        patch.setattr(layer_steps, "_ROWS", 64)
        patch.setattr(layer_steps, "_MANY_ROWS", 1)
