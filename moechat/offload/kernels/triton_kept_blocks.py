"""Triton kernels for many tokens over blocks in kept encodings: the values of a file.

Each computes what its namesake in :mod:`moechat.offload.kernels.triton_blocks` computes, from the same lists.
Gate and up have one encoding, down has another; see :mod:`moechat.offload.kernels.triton_kept_codes`. Inputs
are multiplied with codes as integers, a sub-block at a time; steps and mins are applied to the sums.

Launched by :mod:`moechat.offload.kernels.launch`, which gives the meaning of the arguments.
"""

# Triton reads annotations as types of its own, and its functions are not functions to a type checker.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, operator, index"

import triton
import triton.language as tl

from moechat.offload.kernels.triton_blocks import activate
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


@triton.jit
def _sub_codes(
    words,
    rows,
    SUB: tl.constexpr,
    SUBS: tl.constexpr,
    PLACE: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Codes int32 ``[64 / SUBS, ROWS]`` of one plane in a sub-block; ``PLACE`` is the plane's first word."""
    COLUMNS: tl.constexpr = 64 // SUBS
    PER: tl.constexpr = 32 // WIDTH
    WORDS: tl.constexpr = COLUMNS // PER if COLUMNS > PER else 1
    step = SUB * COLUMNS // PER + tl.arange(0, WORDS)
    packed = tl.load(words + PLACE + step[:, None] * 16 + rows[None, :])
    place = place_in_word(SUB * COLUMNS % PER + tl.arange(0, COLUMNS // WORDS), WIDTH)
    codes = (packed[:, None, :] >> place[None, :, None]) & ((1 << WIDTH) - 1)
    return tl.reshape(codes, [COLUMNS, ROWS])


@triton.jit
def _sub_grid_codes(
    words,
    rows,
    scales,
    table,
    SUB: tl.constexpr,
    SUBS: tl.constexpr,
    SCALES: tl.constexpr,
    ROWS: tl.constexpr,
):
    """As :func:`_sub_codes`, from the numbers of a grid; ``scales`` int32 ``[ROWS]``."""
    DWORDS: tl.constexpr = 16 // SUBS
    dword = SUB * DWORDS + tl.arange(0, DWORDS)
    every = tl.full([1, 1], True, tl.int1)
    packed = grid_codes((words + rows)[None, :], scales[None, :], dword[:, None], every, table, SCALES)
    codes = (packed[:, None, :] >> (8 * tl.arange(0, 4))[None, :, None]) & 255
    return tl.reshape(codes, [64 // SUBS, ROWS])


@triton.jit
def _sub_dot(
    total,
    values,
    words,
    rows,
    scales,
    first,
    second,
    table,
    SUB: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    TABLE: tl.constexpr,
    SUBS: tl.constexpr,
    SCALES: tl.constexpr,
    ZERO: tl.constexpr,
    SUPERS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """``total`` float32 ``[T, ROWS]`` plus the products of ``values`` ``[T, 64 / SUBS]`` with a sub-block.

    ``words`` points to the first word of the group, ``rows`` ``[ROWS]`` is the offset in words of each row's
    lane in its tile; ``scales`` int32, ``first`` and ``second`` ``[ROWS]``.
    """
    if SCALES < HALVES:
        codes = _sub_grid_codes(words, rows, scales, table, SUB, SUBS, SCALES, ROWS)
        every = tl.full([1], True, tl.int1)
        scales = factor_words(words + rows, scales, SUB * 2 // SUBS, every, SCALES)
    else:
        codes = _sub_codes(words, rows, SUB, SUBS, 0, FIRST, ROWS)
        if SECOND:
            codes |= _sub_codes(words, rows, SUB, SUBS, 32 * FIRST, SECOND, ROWS) << FIRST
    # Integers of 8 bits and a sign, which 16-bit floats hold exactly.
    weights = kept_values(codes, table, TABLE, ZERO).to(values.dtype)
    step, minimum = steps_of(scales, first, second, SUB, SUPERS, SCALES)
    total += tl.dot(values, weights, input_precision="ieee") * step[None, :]
    if SCALES >= MINS:
        total -= tl.sum(values.to(tl.float32), axis=1)[:, None] * minimum[None, :]
    return total


@triton.jit
def _sub_inputs(x, there, left, SUB: tl.constexpr, SUBS: tl.constexpr, DOT: tl.constexpr):
    """Inputs ``[T, 64 / SUBS]``; ``x`` ``[T]`` points to the first of a group, which has ``left`` columns."""
    column = SUB * (64 // SUBS) + tl.arange(0, 64 // SUBS)
    inside = there[:, None] & (column < left)[None, :]
    values = tl.load(x[:, None] + column[None, :], mask=inside, other=0.0)
    if DOT == 2:
        values = values.to(tl.float32)
    return values


@triton.jit
def neurons(
    pages,
    entry_page,
    entry_row,
    entry_slot,
    row_item,
    item_token,
    x,
    activations,
    alpha,
    limit,
    hidden,
    table,
    GROUPS: tl.constexpr,
    GATE: tl.constexpr,
    UP: tl.constexpr,
    GATE_SZ: tl.constexpr,
    UP_SZ: tl.constexpr,
    GATE_SUPER: tl.constexpr,
    UP_SUPER: tl.constexpr,
    GATE_BIAS: tl.constexpr,
    UP_BIAS: tl.constexpr,
    RECORD: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    CLAMP: tl.constexpr,
    OFFSET: tl.constexpr,
    GATED: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    DOT: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    TABLE: tl.constexpr,
    SUBS: tl.constexpr,
    SCALES: tl.constexpr,
    ZERO: tl.constexpr,
    SUPERS: tl.constexpr,
    SHARED: tl.constexpr,
):
    """As ``triton_blocks.neurons``."""
    entry = tl.program_id(0)
    part = tl.program_id(1)
    chunk = tl.program_id(2)
    row = tl.load(entry_row + entry)
    begin = tl.load(row_item + row)
    count = tl.load(row_item + row + 1) - begin
    if chunk * TOKENS < count:
        record = pages + tl.load(entry_page + entry).to(tl.int64) * RECORD
        neuron = part * ROWS + tl.arange(0, ROWS)
        tile = neuron // 16
        lane = neuron % 16
        WORDS: tl.constexpr = group_words(FIRST, SECOND, SCALES)
        rows = tile * (GROUPS * WORDS) + lane
        lanes = tile * (GROUPS * 16) + lane
        items = chunk * TOKENS + tl.arange(0, TOKENS)
        there = items < count
        token = tl.load(item_token + begin + items, mask=there, other=0).to(tl.int64)
        gate_words = (record + GATE).to(tl.pointer_type(tl.int32))
        gate_sz = (record + GATE_SZ).to(tl.pointer_type(tl.int32))
        gate_super = (record + GATE_SUPER).to(tl.pointer_type(tl.float16))
        every = tl.full([ROWS], True, tl.int1)
        gate = tl.zeros([TOKENS, ROWS], dtype=tl.float32)
        up = tl.zeros([TOKENS, ROWS], dtype=tl.float32)
        for group in range(GROUPS):
            supers = super_of(gate_super, tile, group, GROUPS, lane, SUPERS, SHARED)
            gate_scales = tl.load(gate_sz + group * 16 + lanes)
            gate_first, gate_second = super_values(supers, every, SUPERS, SCALES)
            if GATED:
                up_scales = tl.load(gate_sz + (UP_SZ - GATE_SZ) // 4 + group * 16 + lanes)
                up_first, up_second = super_values(
                    supers + (UP_SUPER - GATE_SUPER) // 2, every, SUPERS, SCALES
                )
            inputs = x + token * hidden + group * 64
            for sub in tl.static_range(SUBS):
                values = _sub_inputs(inputs, there, hidden - group * 64, sub, SUBS, DOT)
                gate = _sub_dot(
                    gate, values, gate_words + group * WORDS, rows, gate_scales, gate_first, gate_second,
                    table, sub, FIRST, SECOND, TABLE, SUBS, SCALES, ZERO, SUPERS, ROWS,
                )  # fmt: skip
                if GATED:
                    up = _sub_dot(
                        up, values, gate_words + (UP - GATE) // 4 + group * WORDS, rows, up_scales, up_first,
                        up_second, table, sub, FIRST, SECOND, TABLE, SUBS, SCALES, ZERO, SUPERS, ROWS,
                    )  # fmt: skip
        if HAS_BIAS:
            gate += tl.load((record + GATE_BIAS).to(tl.pointer_type(tl.float32)) + neuron)[None, :]
            if GATED:
                up += tl.load((record + UP_BIAS).to(tl.pointer_type(tl.float32)) + neuron)[None, :]
        slot = tl.load(entry_slot + entry).to(tl.int64) + items
        result = activate(gate, up, ACTIVATION, CLAMP, OFFSET, GATED, alpha, limit)
        result = result.to(activations.dtype.element_ty)
        tl.store(activations + slot[:, None] * 64 + neuron[None, :], result, mask=there[:, None])


@triton.jit(do_not_specialize=["clear"])
def outputs(
    pages,
    entry_page,
    entry_slot,
    row_entry,
    row_block,
    row_item,
    activations,
    partial,
    clear,
    table,
    BLOCKS: tl.constexpr,
    HIDDEN_PADDED: tl.constexpr,
    DOWN: tl.constexpr,
    DOWN_SZ: tl.constexpr,
    DOWN_SUPER: tl.constexpr,
    DOWN_BIAS: tl.constexpr,
    BIAS_ROWS: tl.constexpr,
    RECORD: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    DOT: tl.constexpr,
    DOWN_FIRST: tl.constexpr,
    DOWN_SECOND: tl.constexpr,
    DOWN_TABLE: tl.constexpr,
    DOWN_SUBS: tl.constexpr,
    DOWN_SCALES: tl.constexpr,
    DOWN_ZERO: tl.constexpr,
    DOWN_SUPERS: tl.constexpr,
):
    """As ``triton_blocks.outputs``."""
    part = tl.program_id(0)
    row = tl.program_id(1)
    chunk = tl.program_id(2)
    first_entry = tl.load(row_entry + row)
    entries = tl.load(row_entry + row + 1) - first_entry
    first_block = tl.load(row_block + row)
    begin = tl.load(row_item + row)
    count = tl.load(row_item + row + 1) - begin
    if (chunk * TOKENS < count) & ((entries > 0) | (clear != 0)):
        output = part * ROWS + tl.arange(0, ROWS)
        tile = output // 16
        lane = output % 16
        rows = tile * group_words(DOWN_FIRST, DOWN_SECOND, DOWN_SCALES) + lane
        every = tl.full([ROWS], True, tl.int1)
        items = chunk * TOKENS + tl.arange(0, TOKENS)
        there = items < count
        spot = (begin + items).to(tl.int64)[:, None] * HIDDEN_PADDED + output[None, :]
        # What an earlier launch has added comes first in the chain.
        begun = there[:, None] & (entries > 0) & (first_block > 0)
        total = tl.load(partial + spot, mask=begun, other=0.0)
        for block in range(first_block, first_block + entries):
            entry = first_entry + block - first_block
            record = pages + tl.load(entry_page + entry).to(tl.int64) * RECORD
            slot = tl.load(entry_slot + entry).to(tl.int64) + items
            words = (record + DOWN).to(tl.pointer_type(tl.int32))
            scales = tl.load((record + DOWN_SZ).to(tl.pointer_type(tl.int32)) + tile * 16 + lane)
            supers = (record + DOWN_SUPER).to(tl.pointer_type(tl.float16))
            supers = super_of(supers, tile, 0, 1, lane, DOWN_SUPERS, 1)
            first, second = super_values(supers, every, DOWN_SUPERS, DOWN_SCALES)
            for sub in tl.static_range(DOWN_SUBS):
                values = _sub_inputs(activations + slot * 64, there, 64, sub, DOWN_SUBS, DOT)
                total = _sub_dot(
                    total, values, words, rows, scales, first, second, table, sub, DOWN_FIRST, DOWN_SECOND,
                    DOWN_TABLE, DOWN_SUBS, DOWN_SCALES, DOWN_ZERO, DOWN_SUPERS, ROWS,
                )  # fmt: skip
            if HAS_BIAS:
                bias = (record + DOWN_BIAS).to(tl.pointer_type(tl.float32))
                own = output // BIAS_ROWS == block
                total += tl.load(bias + output - block * BIAS_ROWS, mask=own, other=0.0)[None, :]
        tl.store(partial + spot, total, mask=there[:, None])
