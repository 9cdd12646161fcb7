"""Triton kernels over dense matrices in kept encodings: the values of a file, not quantised again.

The byte map is in ``native/src/kernels/layout/kept_encodings.h``. A group of 64 columns is cut into 2 or 4
sub-blocks, and a weight is ``step * code - min`` with a step and a min of its sub-block. Column ``4d + k`` of
a group is byte ``k`` of code dword ``d``, and dwords are cut into planes of 8, 4, 2 or 1 bits.

A *piece* is the part of a plane's word, or the words, whose columns lie in one sub-block. Products are added
by piece, so that steps and mins are applied once for each.

Every kernel is launched by :mod:`moechat.offload.kernels.packed_linear`, as its namesake in
:mod:`moechat.offload.kernels.triton_linear`; ``FIRST`` to ``SHARED`` come from
:func:`moechat.offload.kernels.kept_form.kept_constants`.
"""

# Triton reads annotations as types of its own, and its functions are not functions to a type checker.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, operator, index"

import triton
import triton.language as tl

from moechat.offload.kernels.triton_linear import store_rows

NO_TABLE = tl.constexpr(0)
IQ4 = tl.constexpr(1)
E2M1 = tl.constexpr(2)
FP8 = tl.constexpr(3)

HALVES = tl.constexpr(0)
MINS = tl.constexpr(1)
EXPONENTS = tl.constexpr(2)
SIGNED2 = tl.constexpr(3)
SIGNED4 = tl.constexpr(4)
FACTORS = tl.constexpr(5)
NIBBLES = tl.constexpr(6)
FLOATS = tl.constexpr(7)
E4M3 = tl.constexpr(8)
WHOLES = tl.constexpr(9)


@triton.jit
def _fp16(bits):
    """float32 of the fp16 patterns in the low halves of int32."""
    return (bits & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _signed(words, place):
    """float32 of the signed byte at bit ``place`` of int32."""
    return ((words << (24 - place)) >> 24).to(tl.float32)


@triton.jit
def _e4m3(patterns):
    """float32 of the e4m3 patterns in the low bytes of int32, 256 times smaller: as fp16."""
    return _fp16(((patterns & 0x7F) << 7) | ((patterns & 0x80) << 8))


@triton.jit
def _values(codes, table, TABLE: tl.constexpr, ZERO: tl.constexpr):
    """float32 values of codes int32, less the zero of the encoding; those of E2M1 twice as large, of FP8 256
    times smaller.
    """
    if TABLE == IQ4:
        values = tl.load(table + codes)
    elif TABLE == E2M1:
        # The three low bits of E2M1 are exponent and mantissa: in the place of those of a float32, they are
        # its value times 2^-126, the subnormal 0.5 included.
        patterns = ((codes & 7) << 22) | ((codes & 8) << 28)
        values = patterns.to(tl.float32, bitcast=True) * (2.0**127)
    elif TABLE == FP8:
        values = _e4m3(codes)
    else:
        # In the mantissa of 2^23 a code becomes a float by an OR and a subtraction, both exact.
        values = (codes | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + ZERO)
    return values


@triton.jit
def _piece_codes(packed, piece, column, PIECES: tl.constexpr, WIDTH: tl.constexpr):
    """Codes of a plane of ``WIDTH`` bits: column ``column`` of piece ``piece``, in the word that has it."""
    inside = (piece * (64 // PIECES) + column) % (32 // WIDTH)
    return (packed >> (8 * (inside % 4) + WIDTH * (inside // 4))) & ((1 << WIDTH) - 1)


@triton.jit
def _both(supers, there):
    """The 32 bits that lie in the place of two fp16 values."""
    return tl.load(supers.to(tl.pointer_type(tl.int32)), mask=there, other=0)


@triton.jit
def _steps(words, supers, sub, there, SCALES: tl.constexpr, SUPERS: tl.constexpr):
    """Steps and mins, float32, of sub-blocks ``sub``.

    Args:
        words: int32 scale words.
        supers: Points to the row's ``SUPERS`` fp16 values of a block.
    """
    if SCALES == FLOATS:
        # In the low byte the zero, above it a float32.
        words = tl.where(sub == 0, words, _both(supers, there) if SUPERS else words)
    if SCALES == HALVES or SCALES == MINS:
        step = _fp16(words >> (16 * sub))
    elif SCALES == EXPONENTS:
        step = (((words >> (8 * sub)) & 255) << 23).to(tl.float32, bitcast=True)
    elif SCALES == FLOATS:
        step = (words & -256).to(tl.float32, bitcast=True)
    elif SCALES == E4M3:
        step = _e4m3(words >> (8 * sub))
        step *= _both(supers, there).to(tl.float32, bitcast=True)
    elif SCALES == WHOLES:
        step = words.to(tl.float32, bitcast=True) * 256.0
    elif SCALES == SIGNED2:
        step = _fp16(words >> 16) * _signed(words, 8 * sub)
    elif SCALES == SIGNED4:
        step = tl.load(supers, mask=there, other=0.0).to(tl.float32) * _signed(words, 8 * sub)
    elif SCALES == FACTORS:
        step = tl.load(supers, mask=there, other=0.0).to(tl.float32)
        step *= ((words >> (8 * sub)) & 255).to(tl.float32)
    else:
        step = tl.load(supers, mask=there, other=0.0).to(tl.float32)
        step *= ((words >> (8 * sub)) & 15).to(tl.float32)
    if SCALES == MINS:
        minimum = -tl.load(supers + sub, mask=there, other=0.0).to(tl.float32)
    elif SCALES == FACTORS:
        minimum = tl.load(supers + 1, mask=there, other=0.0).to(tl.float32)
        minimum *= ((words >> (16 + 8 * sub)) & 255).to(tl.float32)
    elif SCALES == NIBBLES:
        minimum = tl.load(supers + 1, mask=there, other=0.0).to(tl.float32)
        minimum *= ((words >> (4 + 8 * sub)) & 15).to(tl.float32)
    elif SCALES == FLOATS:
        minimum = step * (words & 255).to(tl.float32)
    else:
        minimum = tl.zeros_like(step)
    return step, minimum


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
def _super_of(data, super_at, tile, group, groups, row, SUPERS: tl.constexpr, SHARED: tl.constexpr):
    """Points to the ``SUPERS`` fp16 values of rows for a group."""
    blocks = (groups + SHARED - 1) // SHARED
    at = ((tile * blocks + group // SHARED) * 16 + row % 16) * SUPERS
    return (data + super_at).to(tl.pointer_type(tl.float16)) + at


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
    word = PLACE + piece * STEPS // PIECES * 16
    at = group[:, None] * GROUP_WORDS + word[None, :]
    packed = tl.load(words[None, None, :] + at[:, :, None], mask=there[:, None, :], other=0)
    codes = _piece_codes(
        packed[None, :, :, :], piece[None, None, :, None], column[:, None, None, None], PIECES, WIDTH
    )
    place_of_x = group[None, :, None] * 64 + piece[None, None, :] * COLUMNS + column[:, None, None]
    inputs = tl.load(x + place_of_x, mask=place_of_x < cols, other=0.0).to(tl.float32)
    products = tl.sum(inputs[:, :, :, None] * _values(codes, table, TABLE, ZERO), axis=0)
    scales = tl.load(sz[None, :] + group[:, None] * 16, mask=there, other=0)
    sub = (piece * SUBS // PIECES)[None, :, None]
    supers = _super_of(data, super_at, tile[None, :], group[:, None], groups, row[None, :], SUPERS, SHARED)
    step, minimum = _steps(scales[:, None, :], supers[:, None, :], sub, there[:, None, :], SCALES, SUPERS)
    terms = products * (step * (1 << SHIFT))
    HAS_MINS: tl.constexpr = SCALES == MINS or SCALES == FACTORS or SCALES == NIBBLES or SCALES == FLOATS
    if SHIFT == 0 and HAS_MINS:
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

    ``super_at`` is the offset of the super field, ``table`` has the values of IQ4 codes.
    """
    token = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    GROUP_WORDS: tl.constexpr = 32 * (FIRST + SECOND)
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
    """Codes int32 ``[GROUPS, steps, columns of a word, ROWS]`` of a plane."""
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
    GROUP_WORDS: tl.constexpr = 32 * (FIRST + SECOND)
    tile, words, scales = _rows_of(data, sz, row, groups, first_tile, GROUP_WORDS)
    first = tl.program_id(1) * GROUPS
    group = first + tl.arange(0, GROUPS)
    there = (group < groups)[:, None] & (row < rows)[None, :]
    SUB_COLUMNS: tl.constexpr = 64 // SUBS
    codes = tl.reshape(
        _plane_codes(words, group, there, 0, FIRST, GROUP_WORDS), [GROUPS, SUBS, SUB_COLUMNS, ROWS]
    )
    if SECOND:
        high = _plane_codes(words, group, there, 32 * FIRST, SECOND, GROUP_WORDS)
        codes |= tl.reshape(high, [GROUPS, SUBS, SUB_COLUMNS, ROWS]) << FIRST
    both = tl.load(scales[None, :] + group[:, None] * 16, mask=there, other=0)
    supers = _super_of(data, super_at, tile[None, :], group[:, None], groups, row[None, :], SUPERS, SHARED)
    sub = tl.arange(0, SUBS)[None, :, None]
    step, minimum = _steps(both[:, None, :], supers[:, None, :], sub, there[:, None, :], SCALES, SUPERS)
    values = _values(codes, table, TABLE, ZERO) * step[:, :, None, :] - minimum[:, :, None, :]
    store_rows(out, tl.reshape(values, [GROUPS * 64, ROWS]), row, rows, first * 64, cols)
