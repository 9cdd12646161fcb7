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
def _terms(
    x,
    factors,
    starts,
    column,
    inside,
    there,
    ROWS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    LANE: tl.constexpr,
    FACTORS: tl.constexpr,
    HEAD: tl.constexpr,
):
    """Sums of ``LANE`` neighbouring products of each row, which one thread reads: ``[ROWS, parts]``."""
    values = tl.load(x + column, mask=inside, other=0.0).to(tl.float32)
    if FACTORS:
        kind = x.dtype.element_ty
        if HEAD:
            # The gates of a head lie behind its query.
            place = column + (column // HEAD + 1) * HEAD
            gates = tl.load(factors + place, mask=inside, other=0.0).to(tl.float32)
            values *= (1.0 / (1.0 + tl.exp(-gates))).to(kind).to(tl.float32)
        else:
            others = tl.load(factors + column, mask=inside, other=0.0).to(tl.float32)
            values = (values / (1.0 + tl.exp(-values))).to(kind).to(tl.float32) * others
        values = values.to(kind).to(tl.float32)
    weights = tl.load(starts + column[None, :], mask=there & inside[None, :], other=0.0).to(tl.float32)
    return tl.sum(tl.reshape(weights * values[None, :], [ROWS, AT_ONCE // LANE, LANE]), axis=2)


@triton.jit
def _product(
    x,
    factors,
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
    FACTORS: tl.constexpr,
    HEAD: tl.constexpr,
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
        sums += _terms(
            x, factors, starts, first + column, column >= 0, there[:, None], ROWS, AT_ONCE, LANE, FACTORS,
            HEAD,
        )  # fmt: skip
    if WHOLE < COLUMNS:
        last = WHOLE + column
        sums += _terms(
            x, factors, starts, last, last < COLUMNS, there[:, None], ROWS, AT_ONCE, LANE, FACTORS, HEAD
        )  # fmt: skip
    total = tl.sum(sums, axis=1)
    if HAS_BIAS:
        total += tl.load(bias + row, mask=there, other=0.0).to(tl.float32)
    tl.store(out + row, total.to(out.dtype.element_ty), mask=there)


@triton.jit
def products(
    x,
    factors,
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
    FACTORS: tl.constexpr,
    HEAD: tl.constexpr,
):
    """Products of one row with up to four matrices, their results in a row. Program (part of the rows).

    If ``FACTORS``, the row is the SiLU of ``x`` times ``factors``; or, where heads have ``HEAD`` elements,
    ``x`` times the sigmoid of gates, which are every second ``HEAD`` elements of ``factors``.
    """
    program = tl.program_id(0)
    firsts = tl.cdiv(rows_0, ROWS)
    if MATRICES == 1:
        _product(
            x, factors, matrix_0, bias_0, out, program, rows_0, COLUMNS, AT_ONCE, LANE, ROWS, HAS_BIAS,
            FACTORS, HEAD,
        )  # fmt: skip
    else:
        seconds = firsts + tl.cdiv(rows_1, ROWS)
        thirds = seconds + tl.cdiv(rows_2, ROWS)
        if program < firsts:
            _product(
                x, factors, matrix_0, bias_0, out, program, rows_0, COLUMNS, AT_ONCE, LANE, ROWS, HAS_BIAS,
                FACTORS, HEAD,
            )  # fmt: skip
        elif program < seconds:
            to = out + rows_0
            program -= firsts
            _product(
                x, factors, matrix_1, bias_1, to, program, rows_1, COLUMNS, AT_ONCE, LANE, ROWS, HAS_BIAS,
                FACTORS, HEAD,
            )  # fmt: skip
        elif program < thirds:
            to = out + rows_0 + rows_1
            program -= seconds
            _product(
                x, factors, matrix_2, bias_2, to, program, rows_2, COLUMNS, AT_ONCE, LANE, ROWS, HAS_BIAS,
                FACTORS, HEAD,
            )  # fmt: skip
        else:
            to = out + rows_0 + rows_1 + rows_2
            program -= thirds
            _product(
                x, factors, matrix_3, bias_3, to, program, rows_3, COLUMNS, AT_ONCE, LANE, ROWS, HAS_BIAS,
                FACTORS, HEAD,
            )  # fmt: skip


@triton.jit
def add_shared(x, shared, gate, out, COLUMNS: tl.constexpr, AT_ONCE: tl.constexpr, GATED: tl.constexpr):
    """``x + shared``; if ``GATED``, ``shared`` is first multiplied by the sigmoid of a number."""
    column = tl.program_id(0) * AT_ONCE + tl.arange(0, AT_ONCE)
    inside = column < COLUMNS
    kind = out.dtype.element_ty
    added = tl.load(shared + column, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        factor = tl.load(gate).to(tl.float32)
        factor = (1.0 / (1.0 + tl.exp(-factor))).to(kind).to(tl.float32)
        added = (factor * added).to(kind).to(tl.float32)
    added += tl.load(x + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + column, added.to(kind), mask=inside)


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
    q_stride,
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
        turned(
            q + head * q_stride, q_weight, cos, sin, q_out + head * DIM, q_eps, q_offset, DIM, ANGLES, WIDTH,
            HALF_PADDED, REST_PADDED, NORMED, Q_ROUND_FIRST,
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
