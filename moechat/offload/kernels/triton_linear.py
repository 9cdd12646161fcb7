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

from moechat.offload.kernels.triton_scales import factor_of, offset_of, step_of


@triton.jit
def _codes(packed, column, BITS: tl.constexpr):
    """Codes in float32 of the given columns of words int32.

    Set into the mantissa of 2²³, a code becomes a float by an OR and a subtraction, both exact. The
    conversion of integers has a quarter or less of their rate on most GPUs, which would be what a product
    waits for.
    """
    codes = (packed >> (column * BITS)) & ((1 << BITS) - 1)
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
    STEPS: tl.constexpr = 2 * BITS
    COLUMNS: tl.constexpr = 32 // BITS
    words = data.to(tl.pointer_type(tl.int32)) + tile * groups * (STEPS * 16) + lane
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
        packed = tl.load(words[None, None, :] + here[:, :, None] * 16, mask=there[:, None, :], other=0)
        column = here[None, :, :] * COLUMNS + columns[:, None, None]
        values = tl.load(x + token * cols + column, mask=column < cols, other=0.0).to(tl.float32)
        codes = _codes(packed[None, :, :, :], columns[:, None, None, None], BITS)
        products = tl.sum(values[:, :, :, None] * codes, axis=0)
        sums = tl.sum(values, axis=0)
        if BITS == 8:
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
    STEPS: tl.constexpr = 2 * BITS
    first = tl.program_id(1) * GROUPS
    here = first * STEPS + tl.arange(0, GROUPS * STEPS)
    there = (here < groups * STEPS)[:, None] & (row < rows)[None, :]
    words = data.to(tl.pointer_type(tl.int32)) + tile * groups * (STEPS * 16) + lane
    packed = tl.load(words[None, :] + here[:, None] * 16, mask=there, other=0)
    group = (here // STEPS)[:, None]
    codes = _codes(packed[:, None, :], tl.arange(0, 32 // BITS)[None, :, None], BITS)
    if BITS == 8:
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
