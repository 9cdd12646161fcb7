"""Triton kernels of a layer for one token: products of several matrices at once, and what becomes of heads.

They compute in float32 and round where the families round. Launched by
:mod:`moechat.offload.kernels.layer_steps`, which gives the meaning of the arguments.
"""

# Triton reads annotations as types of its own, and its functions are not functions to a type checker.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, operator, index"

import triton
import triton.language as tl

from moechat.offload.kernels.triton_steps import turned


@triton.jit
def _terms(x, starts, column, inside, there, ROWS: tl.constexpr, AT_ONCE: tl.constexpr, LANE: tl.constexpr):
    """Sums of ``LANE`` neighbouring products of each row, which one thread reads: ``[ROWS, parts]``."""
    values = tl.load(x + column, mask=inside, other=0.0).to(tl.float32)
    weights = tl.load(starts + column[None, :], mask=there & inside[None, :], other=0.0).to(tl.float32)
    return tl.sum(tl.reshape(weights * values[None, :], [ROWS, AT_ONCE // LANE, LANE]), axis=2)


@triton.jit
def _product(
    x,
    weight,
    bias,
    out,
    program,
    rows,
    COLUMNS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    LANE: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """``ROWS`` outputs of a matrix. All threads share the rows, so that each reads the inputs once."""
    row = program * ROWS + tl.arange(0, ROWS)
    there = row < rows
    starts = weight + row.to(tl.int64)[:, None] * COLUMNS
    column = tl.arange(0, AT_ONCE)
    sums = tl.zeros([ROWS, AT_ONCE // LANE], dtype=tl.float32)
    # Whole tiles need no mask for their columns.
    WHOLE: tl.constexpr = COLUMNS // AT_ONCE * AT_ONCE
    for first in range(0, WHOLE, AT_ONCE):
        sums += _terms(x, starts, first + column, column >= 0, there[:, None], ROWS, AT_ONCE, LANE)
    if WHOLE < COLUMNS:
        last = WHOLE + column
        sums += _terms(x, starts, last, last < COLUMNS, there[:, None], ROWS, AT_ONCE, LANE)
    total = tl.sum(sums, axis=1)
    if HAS_BIAS:
        total += tl.load(bias + row, mask=there, other=0.0).to(tl.float32)
    tl.store(out + row, total.to(out.dtype.element_ty), mask=there)


@triton.jit
def products(
    x,
    matrix_0,
    matrix_1,
    matrix_2,
    matrix_3,
    bias_0,
    bias_1,
    bias_2,
    bias_3,
    out,
    rows_0,
    rows_1,
    rows_2,
    rows_3,
    COLUMNS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    LANE: tl.constexpr,
    ROWS: tl.constexpr,
    MATRICES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """Products of one row with up to four matrices, their results in a row. Program (part of the rows)."""
    program = tl.program_id(0)
    firsts = tl.cdiv(rows_0, ROWS)
    if MATRICES == 1:
        _product(x, matrix_0, bias_0, out, program, rows_0, COLUMNS, AT_ONCE, LANE, ROWS, HAS_BIAS)
    else:
        seconds = firsts + tl.cdiv(rows_1, ROWS)
        thirds = seconds + tl.cdiv(rows_2, ROWS)
        if program < firsts:
            _product(x, matrix_0, bias_0, out, program, rows_0, COLUMNS, AT_ONCE, LANE, ROWS, HAS_BIAS)
        elif program < seconds:
            to = out + rows_0
            _product(
                x, matrix_1, bias_1, to, program - firsts, rows_1, COLUMNS, AT_ONCE, LANE, ROWS, HAS_BIAS
            )
        elif program < thirds:
            to = out + rows_0 + rows_1
            _product(
                x, matrix_2, bias_2, to, program - seconds, rows_2, COLUMNS, AT_ONCE, LANE, ROWS, HAS_BIAS
            )
        else:
            to = out + rows_0 + rows_1 + rows_2
            _product(
                x, matrix_3, bias_3, to, program - thirds, rows_3, COLUMNS, AT_ONCE, LANE, ROWS, HAS_BIAS
            )


@triton.jit(do_not_specialize=["place", "q_heads", "kv_heads"])
def heads(
    q,
    k,
    v,
    q_weight,
    k_weight,
    cos,
    sin,
    q_out,
    keys,
    values,
    numbers,
    place,
    keys_head,
    values_head,
    q_heads,
    kv_heads,
    q_eps,
    k_eps,
    q_offset,
    k_offset,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
    ANGLES: tl.constexpr,
    WIDTH: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    REST_PADDED: tl.constexpr,
    NORMED: tl.constexpr,
    Q_ROUND_FIRST: tl.constexpr,
    K_ROUND_FIRST: tl.constexpr,
    PLACED: tl.constexpr,
):
    """Norms and rotates a token's queries and keys; writes keys and values to their slot.

    Unless ``PLACED``, keys alone are written, one behind the other.

    Program: a head of queries, of keys, or of values.
    """
    head = tl.program_id(0)
    if head < q_heads:
        at = head * DIM
        turned(
            q + at, q_weight, cos, sin, q_out + at, q_eps, q_offset, DIM, ANGLES, WIDTH, HALF_PADDED,
            REST_PADDED, NORMED, Q_ROUND_FIRST,
        )  # fmt: skip
    else:
        slot = tl.load(numbers + 1 + place)
        if not PLACED:
            slot = slot * 0
        head -= q_heads
        if head < kv_heads:
            to = keys + head.to(tl.int64) * keys_head + slot * DIM
            turned(
                k + head * DIM, k_weight, cos, sin, to, k_eps, k_offset, DIM, ANGLES, WIDTH, HALF_PADDED,
                REST_PADDED, NORMED, K_ROUND_FIRST,
            )  # fmt: skip
        else:
            head -= kv_heads
            d = tl.arange(0, PADDED)
            to = values + head.to(tl.int64) * values_head + slot * DIM
            tl.store(to + d, tl.load(v + head * DIM + d, mask=d < DIM, other=0.0), mask=d < DIM)
