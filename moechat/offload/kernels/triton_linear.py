"""Triton kernels over packed matrices: projections and heads in the form of expert weights.

The byte map is in ``native/src/kernels/dense/linear.h``. The steps of all groups of a tile of 16 rows follow
each other, so that a program reads its tile's weights as one stream.

Every kernel is launched by :mod:`moechat.offload.kernels.packed_linear`, which gives the meaning of the
arguments.
"""

# Triton reads annotations as types of its own, and its functions are not functions to a type checker.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, operator, index"

import triton
import triton.language as tl

from moechat.offload.kernels.triton_scales import MOST_WORD_BITS, factor_of, offset_of, step_of


@triton.jit
def _words(words, step, present, BITS: tl.constexpr):
    """Words int32 of steps, numbered through all groups. At 6 bits, words with the low four bits of codes and
    those with the high two.

    Args:
        words: Points to the first word of each row.
        step: Numbers of steps: eight a group at 6 bits, else ``2 * BITS``.
        present: Which words to read; others are 0.
    """
    if BITS == 6:
        first = step // 8 * 12
        low = tl.load(words + (first + step % 8) * 16, mask=present, other=0)
        high = tl.load(words + (first + 8 + step % 8 // 2) * 16, mask=present, other=0)
    else:
        low = tl.load(words + step * 16, mask=present, other=0)
        high = low
    return low, high


@triton.jit
def _codes(low, high, step, column, BITS: tl.constexpr):
    """Codes in float32 of the given columns of the words of :func:`_words`.

    Set into the mantissa of 2²³, a code becomes a float by an OR and a subtraction, both exact. The
    conversion of integers has a quarter or less of their rate on most GPUs, which would be what a product
    waits for.
    """
    if BITS == 6:
        place = column // 2 * 8 + step % 2 * 4 + column % 2 * 2
        codes = (low >> (column * 4)) & 15 | ((high >> place) & 3) << 4
    else:
        codes = (low >> (column * BITS)) & ((1 << BITS) - 1)
    return (codes | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0


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
    BITS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """``ROWS`` outputs of one token, products and sums in float32.

    Program (token, part of the rows). Axes are (column of a word, group, step, row): the first two are added
    within a thread. The sums of the steps stay apart until the end, so that threads need not meet before.
    """
    token = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    tile = (row // 16).to(tl.int64)
    lane = row % 16
    STEPS: tl.constexpr = 8 if BITS == 6 else 2 * BITS
    COLUMNS: tl.constexpr = 64 // STEPS
    words = data.to(tl.pointer_type(tl.int32)) + tile * groups * (2 * BITS * 16) + lane
    scales = (data + sz).to(tl.pointer_type(tl.int32)) + tile * groups * 16 + lane
    fp16_scales = (data + sz).to(tl.pointer_type(tl.float16)) + tile * groups * 32 + lane
    present = tile < tiles
    step = tl.arange(0, STEPS)
    columns = tl.arange(0, COLUMNS)
    total = tl.zeros([STEPS, ROWS], dtype=tl.float32)
    for first in range(0, groups, GROUPS):
        group = first + tl.arange(0, GROUPS)
        here = group[:, None] * STEPS + step[None, :]
        there = (group < groups)[:, None] & present[None, :]
        low, high = _words(words[None, None, :], here[:, :, None], there[:, None, :], BITS)
        column = here[None, :, :] * COLUMNS + columns[:, None, None]
        values = tl.load(x + token * cols + column, mask=column < cols, other=0.0).to(tl.float32)
        shift = columns[:, None, None, None]
        codes = _codes(low[None, :, :, :], high[None, :, :, :], here[None, :, :, None], shift, BITS)
        products = tl.sum(values[:, :, :, None] * codes, axis=0)
        sums = tl.sum(values, axis=0)
        if BITS > MOST_WORD_BITS:
            scale = tl.load(fp16_scales[None, :] + group[:, None] * 32, mask=there, other=0.0).to(tl.float32)
            zero = tl.load(fp16_scales[None, :] + group[:, None] * 32 + 16, mask=there, other=0.0).to(
                tl.float32
            )
            terms = products - sums[:, :, None] * zero[:, None, :]
        else:
            both = tl.load(scales[None, :] + group[:, None] * 16, mask=there, other=0)
            half = (step // BITS)[None, :, None]
            scale = step_of(both)
            terms = products * factor_of(both[:, None, :], half).to(tl.float32)
            terms -= sums[:, :, None] * offset_of(both[:, None, :], half).to(tl.float32)
        total += tl.sum(terms * scale[:, None, :], axis=0)
    result = tl.sum(total, axis=0)
    inside = row < rows
    if HAS_BIAS:
        result += tl.load(bias + row, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * rows + row, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def store_rows(out, values, row, rows, first_column, cols):
    """Write ``values`` ``[columns, ROWS]`` to the rows ``row`` of ``out`` ``[rows, cols]``."""
    column = first_column + tl.arange(0, values.shape[0])
    inside = (column < cols)[:, None] & (row < rows)[None, :]
    places = row.to(tl.int64)[None, :] * cols + column[:, None]
    tl.store(out + places, values.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["first_tile", "groups"])
def unpack(
    data,
    out,
    first_tile,
    rows,
    cols,
    groups,
    sz,
    BITS: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """The values of ``ROWS`` rows and ``GROUPS`` groups of columns, from tile ``first_tile`` on.

    Program (part of the rows, part of the groups).
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tile = (first_tile + row // 16).to(tl.int64)
    lane = row % 16
    STEPS: tl.constexpr = 8 if BITS == 6 else 2 * BITS
    first = tl.program_id(1) * GROUPS
    here = first * STEPS + tl.arange(0, GROUPS * STEPS)
    there = (here < groups * STEPS)[:, None] & (row < rows)[None, :]
    words = data.to(tl.pointer_type(tl.int32)) + tile * groups * (2 * BITS * 16) + lane
    low, high = _words(words[None, :], here[:, None], there, BITS)
    group = (here // STEPS)[:, None]
    columns = tl.arange(0, 64 // STEPS)
    codes = _codes(low[:, None, :], high[:, None, :], here[:, None, None], columns[None, :, None], BITS)
    if BITS > MOST_WORD_BITS:
        fp16_scales = (data + sz).to(tl.pointer_type(tl.float16)) + tile * groups * 32 + lane
        scale = tl.load(fp16_scales[None, :] + group * 32, mask=there, other=0.0).to(tl.float32)
        zero = tl.load(fp16_scales[None, :] + group * 32 + 16, mask=there, other=0.0).to(tl.float32)
        values = (codes - zero[:, None, :]) * scale[:, None, :]
    else:
        scales = (data + sz).to(tl.pointer_type(tl.int32)) + tile * groups * 16 + lane
        both = tl.load(scales[None, :] + group * 16, mask=there, other=0)
        half = (here % STEPS // BITS)[:, None]
        factor = factor_of(both, half).to(tl.float32)
        offset = offset_of(both, half).to(tl.float32)
        values = (codes * factor[:, None, :] - offset[:, None, :]) * step_of(both)[:, None, :]
    store_rows(out, tl.reshape(values, [GROUPS * 64, ROWS]), row, rows, first * 64, cols)
