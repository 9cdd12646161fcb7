"""Triton kernels over dense matrices in kept encodings: the values of a file, not quantised again.

See :mod:`moechat.offload.kernels.triton_kept_codes` for encodings, and for the meaning of ``TABLE`` to
``SHARED``; ``FIRST`` and ``SECOND`` are the bits of the planes, 8 and 0 where codes come from a grid.

A *piece* is the part of a plane's word, or the words, whose columns lie in one sub-block. Products are added
by piece, so that steps and mins are applied once for each.

Every kernel is launched by :mod:`moechat.offload.kernels.packed_linear`, as its namesake in
:mod:`moechat.offload.kernels.triton_linear`.
"""

# Triton reads annotations as types of its own, and its functions are not functions to a type checker.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, operator, index"

import triton
import triton.language as tl

from moechat.offload.kernels.triton_kept_codes import (
    HALVES,
    MINS,
    kept_values,
    place_in_word,
    steps_of,
    super_of,
    super_values,
)
from moechat.offload.kernels.triton_kept_grids import factor_words, grid_codes, group_words
from moechat.offload.kernels.triton_linear import store_rows


@triton.jit
def _piece_codes(packed, piece, column, PIECES: tl.constexpr, WIDTH: tl.constexpr):
    """Codes of a plane of ``WIDTH`` bits: column ``column`` of piece ``piece``, in the word that has it."""
    inside = (piece * (64 // PIECES) + column) % (32 // WIDTH)
    return (packed >> place_in_word(inside, WIDTH)) & ((1 << WIDTH) - 1)


@triton.jit
def _super_values(
    data, place, tile, group, groups, row, there,
    SCALES: tl.constexpr, SUPERS: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """Values of the super field at ``place`` for rows of tiles and a group."""
    field = (data + place).to(tl.pointer_type(tl.float16))
    at = super_of(field, tile, group, groups, row % 16, SUPERS, SHARED)
    return super_values(at, there, SUPERS, SCALES)


@triton.jit
def _rows_of(data, sz, row, groups, first_tile, GROUP_WORDS: tl.constexpr):
    """Tiles ``[ROWS]`` of rows that are counted from the first tile on, and pointers to the words and scales
    of their group 0.
    """
    tile = (first_tile + row // 16).to(tl.int64)
    lane = row % 16
    words = data.to(tl.pointer_type(tl.int32)) + tile * groups * GROUP_WORDS + lane
    scales = (data + sz).to(tl.pointer_type(tl.int32)) + tile * groups * 16 + lane
    return tile, words, scales


@triton.jit
def _plane(
    total,
    data,
    table,
    x,
    words,
    sz,
    tile,
    row,
    group,
    there,
    cols,
    groups,
    super_at,
    PLACE: tl.constexpr,
    WIDTH: tl.constexpr,
    SHIFT: tl.constexpr,
    GROUP_WORDS: tl.constexpr,
    TABLE: tl.constexpr,
    SUBS: tl.constexpr,
    SCALES: tl.constexpr,
    ZERO: tl.constexpr,
    SUPERS: tl.constexpr,
    SHARED: tl.constexpr,
):
    """``total`` ``[ROWS]`` plus the products with one plane, whose codes count ``2^SHIFT``.

    ``PLACE``: its first word in a group. Axes are (column of a piece, group, piece, row).
    """
    STEPS: tl.constexpr = 2 * WIDTH
    PIECES: tl.constexpr = STEPS if STEPS > SUBS else SUBS
    COLUMNS: tl.constexpr = 64 // PIECES
    piece = tl.arange(0, PIECES)
    column = tl.arange(0, COLUMNS)
    if SCALES < HALVES:
        scales = tl.load(sz[None, :] + group[:, None] * 16, mask=there, other=0)
        at_group = (words[None, :] + group[:, None] * GROUP_WORDS)[:, None, :]
        # A piece is a code dword.
        dword = piece[None, :, None]
        packed = grid_codes(at_group, scales[:, None, :], dword, there[:, None, :], table, SCALES)
    else:
        word = PLACE + piece * STEPS // PIECES * 16
        at = group[:, None] * GROUP_WORDS + word[None, :]
        packed = tl.load(words[None, None, :] + at[:, :, None], mask=there[:, None, :], other=0)
    codes = _piece_codes(
        packed[None, :, :, :], piece[None, None, :, None], column[:, None, None, None], PIECES, WIDTH
    )
    place_of_x = group[None, :, None] * 64 + piece[None, None, :] * COLUMNS + column[:, None, None]
    inputs = tl.load(x + place_of_x, mask=place_of_x < cols, other=0.0).to(tl.float32)
    products = tl.sum(inputs[:, :, :, None] * kept_values(codes, table, TABLE, ZERO), axis=0)
    if SCALES >= HALVES:
        scales = tl.load(sz[None, :] + group[:, None] * 16, mask=there, other=0)
    sub = (piece * SUBS // PIECES)[None, :, None]
    first, second = _super_values(
        data, super_at, tile[None, :], group[:, None], groups, row[None, :], there, SCALES, SUPERS, SHARED
    )
    factors = scales[:, None, :]
    if SCALES < HALVES:
        factors = factor_words(at_group, factors, dword // 8, there[:, None, :], SCALES)
    step, minimum = steps_of(factors, first[:, None, :], second[:, None, :], sub, SUPERS, SCALES)
    terms = products * (step * (1 << SHIFT))
    if SHIFT == 0 and SCALES >= MINS:
        terms -= tl.sum(inputs, axis=0)[:, :, None] * minimum
    return total + tl.sum(tl.sum(terms, axis=0), axis=0)


@triton.jit(do_not_specialize=["tiles", "groups"])
def few(
    data,
    x,
    bias,
    out,
    rows,
    cols,
    tiles,
    groups,
    sz,
    super_at,
    table,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    TABLE: tl.constexpr,
    SUBS: tl.constexpr,
    SCALES: tl.constexpr,
    ZERO: tl.constexpr,
    SUPERS: tl.constexpr,
    SHARED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """``ROWS`` outputs of one token, products and sums in float32. Program (token, part of the rows).

    ``super_at`` is the offset of the super field, ``table`` that of ``kept_form.value_table``.
    """
    token = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    GROUP_WORDS: tl.constexpr = group_words(FIRST, SECOND, SCALES)
    tile, words, scales = _rows_of(data, sz, row, groups, 0, GROUP_WORDS)
    present = tile < tiles
    total = tl.zeros([ROWS], dtype=tl.float32)
    for first in range(0, groups, GROUPS):
        group = first + tl.arange(0, GROUPS)
        there = (group < groups)[:, None] & present[None, :]
        total = _plane(
            total, data, table, x + token * cols, words, scales, tile, row, group, there, cols, groups,
            super_at, 0, FIRST, 0, GROUP_WORDS, TABLE, SUBS, SCALES, ZERO, SUPERS, SHARED,
        )  # fmt: skip
        if SECOND:
            total = _plane(
                total, data, table, x + token * cols, words, scales, tile, row, group, there, cols, groups,
                super_at, 32 * FIRST, SECOND, FIRST, GROUP_WORDS, TABLE, SUBS, SCALES, 0, SUPERS, SHARED,
            )  # fmt: skip
    inside = row < rows
    if HAS_BIAS:
        total += tl.load(bias + row, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * rows + row, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _plane_codes(words, group, there, PLACE: tl.constexpr, WIDTH: tl.constexpr, GROUP_WORDS: tl.constexpr):
    """Codes int32 ``[GROUPS, words of a row, columns of a word, ROWS]`` of a plane."""
    STEPS: tl.constexpr = 2 * WIDTH
    step = tl.arange(0, STEPS)
    at = group[:, None] * GROUP_WORDS + PLACE + step[None, :] * 16
    packed = tl.load(words[None, None, :] + at[:, :, None], mask=there[:, None, :], other=0)
    column = tl.arange(0, 32 // WIDTH)[None, None, :, None]
    return _piece_codes(packed[:, :, None, :], step[None, :, None, None], column, STEPS, WIDTH)


@triton.jit(do_not_specialize=["first_tile", "groups"])
def unpack(
    data,
    out,
    first_tile,
    rows,
    cols,
    groups,
    sz,
    super_at,
    table,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    TABLE: tl.constexpr,
    SUBS: tl.constexpr,
    SCALES: tl.constexpr,
    ZERO: tl.constexpr,
    SUPERS: tl.constexpr,
    SHARED: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """The values of ``ROWS`` rows and ``GROUPS`` groups of columns, from tile ``first_tile`` on.

    Program (part of the rows, part of the groups).
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    GROUP_WORDS: tl.constexpr = group_words(FIRST, SECOND, SCALES)
    tile, words, scales = _rows_of(data, sz, row, groups, first_tile, GROUP_WORDS)
    first = tl.program_id(1) * GROUPS
    group = first + tl.arange(0, GROUPS)
    there = (group < groups)[:, None] & (row < rows)[None, :]
    SUB_COLUMNS: tl.constexpr = 64 // SUBS
    if SCALES < HALVES:
        both = tl.load(scales[None, :] + group[:, None] * 16, mask=there, other=0)
        at_group = (words[None, :] + group[:, None] * GROUP_WORDS)[:, None, :]
        dword = tl.arange(0, 16)[None, :, None]
        packed = grid_codes(at_group, both[:, None, :], dword, there[:, None, :], table, SCALES)
        low = (packed[:, :, None, :] >> (8 * tl.arange(0, 4))[None, None, :, None]) & 255
        codes = tl.reshape(low, [GROUPS, SUBS, SUB_COLUMNS, ROWS])
    else:
        codes = tl.reshape(
            _plane_codes(words, group, there, 0, FIRST, GROUP_WORDS), [GROUPS, SUBS, SUB_COLUMNS, ROWS]
        )
        if SECOND:
            high = _plane_codes(words, group, there, 32 * FIRST, SECOND, GROUP_WORDS)
            codes |= tl.reshape(high, [GROUPS, SUBS, SUB_COLUMNS, ROWS]) << FIRST
        both = tl.load(scales[None, :] + group[:, None] * 16, mask=there, other=0)
    one, two = _super_values(
        data, super_at, tile[None, :], group[:, None], groups, row[None, :], there, SCALES, SUPERS, SHARED
    )
    sub = tl.arange(0, SUBS)[None, :, None]
    factors = both[:, None, :]
    if SCALES < HALVES:
        factors = factor_words(at_group, factors, sub * 2 // SUBS, there[:, None, :], SCALES)
    step, minimum = steps_of(factors, one[:, None, :], two[:, None, :], sub, SUPERS, SCALES)
    values = kept_values(codes, table, TABLE, ZERO) * step[:, :, None, :] - minimum[:, :, None, :]
    store_rows(out, tl.reshape(values, [GROUPS * 64, ROWS]), row, rows, first * 64, cols)
