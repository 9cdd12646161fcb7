"""Triton kernels over rows of the attention cache: plain elements, or packed in 8 bits.

A packed row is described in ``native/src/kernels/isa/decode_api.h``: a byte for every 32 elements, the
exponent of the group's unit, then one signed code for each element. Rows made here have the bytes of the
CPU's, and an element read here has the CPU's value.

Launched by :mod:`moechat.offload.kernels.attention` and :mod:`moechat.offload.kernels.device_rows`.
"""

# Triton reads annotations as types of its own, and its functions are not functions to a type checker.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, operator, index"

import triton
import triton.language as tl


@triton.jit
def elements(rows, START: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, inside):
    """Plain elements ``[START, START + DIM)`` of rows, zero-padded to ``WIDTH``: ``[rows, WIDTH]``.

    Args:
        rows: Pointers to the rows' first elements, ``[rows, 1]``.
        START: First element.
        DIM: Number of elements.
        WIDTH: A power of two, at least ``DIM``.
        inside: ``[rows, 1]``: rows that exist; others give zeros and are not read.
    """
    d = tl.arange(0, WIDTH)[None, :]
    if DIM < WIDTH:
        inside = inside & (d < DIM)
    return tl.load(rows + START + d, mask=inside, other=0.0)


@triton.jit
def unpacked(
    rows,
    ALL: tl.constexpr,
    START: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    inside,
):
    """Elements ``[START, START + DIM)`` of ``ROWS`` packed rows, in float32 and exact: ``[ROWS, WIDTH]``.

    Args:
        rows: Pointers to the rows' first bytes, ``[ROWS, 1]``.
        ALL: Elements of a whole row.
        START: First element, a multiple of 32.
        DIM: Number of elements.
        WIDTH: A power of two, at least ``DIM`` and 32.
        ROWS: Number of rows.
        inside: ``[ROWS, 1]``: rows that exist; others give zeros and are not read.
    """
    GROUPS: tl.constexpr = WIDTH // 32
    group = tl.arange(0, GROUPS)
    d = group[None, :, None] * 32 + tl.arange(0, 32)[None, None, :]
    units_there = inside
    codes_there = inside[:, :, None]
    if DIM < WIDTH:
        units_there = inside & (group < (DIM + 31) // 32)[None, :]
        codes_there = codes_there & (d < DIM)
    unit = tl.load(rows + START // 32 + group[None, :], mask=units_there, other=0)
    code = tl.load(rows[:, :, None] + (ALL + 31) // 32 + START + d, mask=codes_there, other=0)
    # The code plus 128 in the mantissa of 2²³ becomes a float by an OR and a subtraction, both exact: most
    # GPUs convert integers at a quarter of that rate.
    value = ((code ^ 0x80).to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True) - 8388736.0
    scale = (unit.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    return tl.reshape(value * scale[:, :, None], [ROWS, WIDTH])


@triton.jit
def write_packed(rows, states, DIM: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, inside):
    """Pack ``ROWS`` rows of ``DIM`` elements.

    Args:
        rows: Pointers to the packed rows' first bytes, ``[ROWS, 1]``.
        states: Pointers to the first elements, ``[ROWS, 1]``.
        DIM: Elements of a row.
        WIDTH: A power of two, at least ``DIM`` and 32.
        ROWS: Number of rows.
        inside: ``[ROWS, 1]``: rows that exist.
    """
    GROUPS: tl.constexpr = WIDTH // 32
    group = tl.arange(0, GROUPS)
    d = group[None, :, None] * 32 + tl.arange(0, 32)[None, None, :]
    there = inside[:, :, None] & (d < DIM)
    x = tl.load(states[:, :, None] + d, mask=there, other=0.0).to(tl.float32)
    # The bits of magnitudes are in the order of their values, and NaN comes last.
    largest = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=2)
    exponent = largest >> 23
    number = exponent != 255
    # The largest element becomes 64 to 127 units; 255: the group has an infinity or NaN and reads as NaN.
    unit = tl.where(number, tl.maximum(exponent - 6, 1), 255)
    inverse = (tl.where(number, 254 - unit, 0) << 23).to(tl.float32, bitcast=True)
    # Beside 1.5 * 2²³ a float has no fraction: the sum rounds to the nearest integer, ties to even.
    rounded = (x * inverse[:, :, None] + 12582912.0) - 12582912.0
    rounded = tl.minimum(tl.maximum(rounded, -127.0), 127.0)
    code = tl.where(number[:, :, None], rounded, 0.0).to(tl.int32)
    tl.store(rows + group[None, :], unit.to(tl.uint8), mask=inside & (group < (DIM + 31) // 32)[None, :])
    tl.store(rows[:, :, None] + (DIM + 31) // 32 + d, (code & 0xFF).to(tl.uint8), mask=there)


@triton.jit(do_not_specialize=["tokens", "states_head", "states_token"])
def pack(
    states,
    rows,
    tokens,
    states_head,
    states_token,
    rows_head,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Pack the rows of some tokens. Program (part of the tokens, head)."""
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    head = tl.program_id(1).to(tl.int64)
    wide = token.to(tl.int64)
    ROW: tl.constexpr = DIM + (DIM + 31) // 32
    to = rows + head * rows_head + wide * ROW
    write_packed(to, states + head * states_head + wide * states_token, DIM, WIDTH, ROWS, token < tokens)


@triton.jit(do_not_specialize=["tokens"])
def unpack(rows, out, tokens, rows_head, DIM: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    """Unpack the rows of tokens to ``out`` ``[heads, tokens, DIM]``. Program (part of the tokens, head)."""
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    head = tl.program_id(1).to(tl.int64)
    ROW: tl.constexpr = DIM + (DIM + 31) // 32
    inside = token < tokens
    d = tl.arange(0, WIDTH)[None, :]
    values = unpacked(rows + head * rows_head + token.to(tl.int64) * ROW, DIM, 0, DIM, WIDTH, ROWS, inside)
    place = (head * tokens + token) * DIM + d
    tl.store(out + place, values.to(out.dtype.element_ty), mask=inside & (d < DIM))
