"""The Triton kernel for few tokens over blocks in kept encodings, as in ``triton_few``.

Gate and up have one encoding, down has another; see :mod:`moechat.offload.kernels.triton_kept_codes`. Inputs
are multiplied with codes as in :mod:`moechat.offload.kernels.triton_codes`, a sub-block at a time; steps and
mins are applied to the sums. Words of grids' numbers become code dwords a half at a time; see
:mod:`moechat.offload.kernels.triton_kept_grids`.

Launched by :mod:`moechat.offload.kernels.launch`, which gives the meaning of the arguments.
"""

# Triton reads annotations as types of its own, and its functions are not functions to a type checker.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, operator, index, assignment"

import triton
import triton.language as tl

from moechat.offload.kernels.triton_blocks import activate
from moechat.offload.kernels.triton_codes import (
    INPUT_EXPONENT,
    UNSCALED,
    column_input,
    issue_loads,
    packed_words,
    plane_words,
)
from moechat.offload.kernels.triton_kept_codes import (
    E2M1,
    HALVES,
    MINS,
    NO_TABLE,
    kept_values,
    steps_of,
    super_of,
    super_values,
)
from moechat.offload.kernels.triton_kept_grids import grid_steps, group_words, half_codes


@triton.jit
def _term(
    products,
    value,
    word,
    table,
    COLUMN: tl.constexpr,
    WIDTH: tl.constexpr,
    SHIFT: tl.constexpr,
    TABLE: tl.constexpr,
):
    """``products`` plus inputs times the codes of one column of words, which count ``2^SHIFT``.

    What is added is smaller by a factor that :func:`_sub_products` undoes; see
    :mod:`moechat.offload.kernels.triton_codes`.
    """
    PLACE: tl.constexpr = 8 * (COLUMN % 4) + WIDTH * (COLUMN // 4)
    if TABLE == NO_TABLE:
        bits = word.to(tl.uint32, bitcast=True)
        code = (bits >> 16 if PLACE >= 16 else bits) & (((1 << WIDTH) - 1) << (PLACE % 16))
        scaled = value * (2.0 ** (INPUT_EXPONENT + SHIFT - PLACE % 16))
        products += scaled * code.to(tl.float32, bitcast=True)
    elif TABLE == E2M1:
        # The patterns of kept_values, without its multiplication.
        least = (word >> (PLACE - 22) if PLACE > 22 else word << (22 - PLACE)) & (7 << 22)
        pattern = least | ((word << (28 - PLACE)) & -(1 << 31))
        products += value * (2.0**INPUT_EXPONENT) * pattern.to(tl.float32, bitcast=True)
    else:
        products += value * kept_values((word >> PLACE) & ((1 << WIDTH) - 1), table, TABLE, 0)
    return products


@triton.jit
def _sub_products(
    total,
    x,
    last,
    low,
    high,
    scales,
    first,
    second,
    table,
    BEGIN: tl.constexpr,
    SUB: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    TABLE: tl.constexpr,
    SUBS: tl.constexpr,
    SCALES: tl.constexpr,
    ZERO: tl.constexpr,
    SUPERS: tl.constexpr,
    MASKED: tl.constexpr,
):
    """``total`` ``[T, G, R]`` plus the products with sub-block ``SUB`` of groups.

    ``low`` and ``high`` are the words of the planes from column ``BEGIN`` on.
    """
    products = tl.zeros_like(total)
    sums = tl.zeros([total.shape[0], x.shape[1], 1], dtype=tl.float32)
    FROM: tl.constexpr = SUB * (64 // SUBS) - BEGIN
    for at in tl.static_range(FROM, FROM + 64 // SUBS):
        value = column_input(x, BEGIN + at, last, MASKED)
        sums += value
        products = _term(products, value, low[at * FIRST // 32], table, at % (32 // FIRST), FIRST, 0, TABLE)
        if SECOND:
            products = _term(
                products, value, high[at * SECOND // 32], table, at % (32 // SECOND), SECOND, FIRST, NO_TABLE
            )
    if TABLE == NO_TABLE:
        products *= UNSCALED
    elif TABLE == E2M1:
        products *= 2.0 ** (127 - INPUT_EXPONENT)
    if ZERO:
        products -= sums * ZERO
    step, minimum = steps_of(scales, first, second, SUB, SUPERS, SCALES)
    total += products * step
    if SCALES >= MINS:
        total -= sums * minimum
    return total


@triton.jit
def _part_words(
    words, real, PART: tl.constexpr, PARTS: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr,
    PARTLY: tl.constexpr,
):  # fmt: skip
    """Words of both planes for one of ``PARTS`` parts of groups; of the first one twice if there is one."""
    LOW: tl.constexpr = 2 * FIRST // PARTS
    low = plane_words(words, real, PART * LOW, LOW, PARTLY)
    if SECOND:
        HIGH: tl.constexpr = 2 * SECOND // PARTS
        high = plane_words(words + 32 * FIRST, real, PART * HIGH, HIGH, PARTLY)
    else:
        high = low
    return low, high


@triton.jit
def _part_products(
    total,
    x,
    last,
    low,
    high,
    scales,
    first,
    second,
    table,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    TABLE: tl.constexpr,
    SUBS: tl.constexpr,
    SCALES: tl.constexpr,
    ZERO: tl.constexpr,
    SUPERS: tl.constexpr,
    MASKED: tl.constexpr,
):
    """``total`` plus the products with the words of :func:`_part_words`."""
    for sub in tl.static_range(SUBS // PARTS):
        total = _sub_products(
            total, x, last, low, high, scales, first, second, table,
            PART * (64 // PARTS), PART * (SUBS // PARTS) + sub, FIRST, SECOND, TABLE, SUBS, SCALES, ZERO,
            SUPERS, MASKED,
        )  # fmt: skip
    return total


@triton.jit
def _pair_products(
    x,
    last,
    words,
    sz,
    supers,
    table,
    UP: tl.constexpr,
    UP_SZ: tl.constexpr,
    UP_SUPER: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    TABLE: tl.constexpr,
    SUBS: tl.constexpr,
    SCALES: tl.constexpr,
    ZERO: tl.constexpr,
    SUPERS: tl.constexpr,
    GATED: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Products ``[T, G, R]`` of the inputs with one group of 64 columns of gate and of up.

    Args:
        x: ``[T, G, 1]`` points to the first column of a group of each token.
        last: ``[1, G, 1]`` where the columns end, from there on.
        words: ``[1, G, R]`` points to the first word of a group of each row of gate, in int32.
        sz: ``[1, G, R]`` points to its scale word.
        supers: ``[1, G, R]`` points to its values of the super field.
        UP: Elements from the words of gate to those of up; ``UP_SZ`` and ``UP_SUPER`` likewise.
        GATED: There is an up; else its products are 0.
        MASKED: Some columns are not there.
    """
    every = tl.full([1, 1, 1], True, tl.int1)
    gate = tl.zeros([x.shape[0], words.shape[1], words.shape[2]], dtype=tl.float32)
    up = tl.zeros_like(gate)
    gate_scales = tl.load(sz)
    gate_factors = gate_scales
    gate_first, gate_second = super_values(supers, every, SUPERS, SCALES)
    if GATED:
        up_scales = tl.load(sz + UP_SZ)
        up_factors = up_scales
        up_first, up_second = super_values(supers + UP_SUPER, every, SUPERS, SCALES)
    if SCALES < HALVES:
        gate_words = plane_words(words, every, 0, grid_steps(SCALES), False)
        if GATED:
            up_words = plane_words(words + UP, every, 0, grid_steps(SCALES), False)
        issue_loads()
    # With more words at once a thread has too few registers.
    PARTS: tl.constexpr = 1 if FIRST + SECOND <= 4 else 2
    for part in tl.static_range(PARTS):
        if SCALES < HALVES:
            low, gate_factors = half_codes(gate_words, gate_scales, table, part, SCALES)
            high = low
            if GATED:
                up_low, up_factors = half_codes(up_words, up_scales, table, part, SCALES)
                up_high = up_low
        else:
            low, high = _part_words(words, every, part, PARTS, FIRST, SECOND, False)
            if GATED:
                up_low, up_high = _part_words(words + UP, every, part, PARTS, FIRST, SECOND, False)
        issue_loads()
        gate = _part_products(
            gate, x, last, low, high, gate_factors, gate_first, gate_second, table,
            part, PARTS, FIRST, SECOND, TABLE, SUBS, SCALES, ZERO, SUPERS, MASKED,
        )  # fmt: skip
        if GATED:
            up = _part_products(
                up, x, last, up_low, up_high, up_factors, up_first, up_second, table,
                part, PARTS, FIRST, SECOND, TABLE, SUBS, SCALES, ZERO, SUPERS, MASKED,
            )  # fmt: skip
    return gate, up


@triton.jit
def _group_products(
    x,
    last,
    words,
    sz,
    supers,
    table,
    real,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    TABLE: tl.constexpr,
    SUBS: tl.constexpr,
    SCALES: tl.constexpr,
    ZERO: tl.constexpr,
    SUPERS: tl.constexpr,
    PARTLY: tl.constexpr,
):
    """As :func:`_pair_products`, of one matrix; if ``PARTLY``, ``real`` ``[1, 1, R]`` says which rows there
    are.
    """
    total = tl.zeros([x.shape[0], words.shape[1], words.shape[2]], dtype=tl.float32)
    scales = packed_words(sz, real, PARTLY)
    factors = scales
    first, second = super_values(supers, real, SUPERS, SCALES)
    if SCALES < HALVES:
        packed = plane_words(words, real, 0, grid_steps(SCALES), PARTLY)
        issue_loads()
    PARTS: tl.constexpr = 1 if FIRST + SECOND <= 4 else 2
    for part in tl.static_range(PARTS):
        if SCALES < HALVES:
            low, factors = half_codes(packed, scales, table, part, SCALES)
            high = low
        else:
            low, high = _part_words(words, real, part, PARTS, FIRST, SECOND, PARTLY)
        issue_loads()
        total = _part_products(
            total, x, last, low, high, factors, first, second, table,
            part, PARTS, FIRST, SECOND, TABLE, SUBS, SCALES, ZERO, SUPERS, False,
        )  # fmt: skip
    return total


# The number of items is another one in every pass: kernels built for one would be built in the middle of it.
@triton.jit(do_not_specialize=["items_padded", "clear"])
def blocks(
    pages,
    entry_page,
    entry_slot,
    row_entry,
    row_block,
    row_item,
    item_token,
    x,
    activations,
    partial,
    items_padded,
    clear,
    alpha,
    limit,
    table,
    HIDDEN: tl.constexpr,
    BLOCKS: tl.constexpr,
    SPLITS: tl.constexpr,
    GATE: tl.constexpr,
    UP: tl.constexpr,
    DOWN: tl.constexpr,
    GATE_SZ: tl.constexpr,
    UP_SZ: tl.constexpr,
    DOWN_SZ: tl.constexpr,
    GATE_SUPER: tl.constexpr,
    UP_SUPER: tl.constexpr,
    DOWN_SUPER: tl.constexpr,
    GATE_BIAS: tl.constexpr,
    UP_BIAS: tl.constexpr,
    DOWN_BIAS: tl.constexpr,
    BIAS_ROWS: tl.constexpr,
    RECORD: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    CLAMP: tl.constexpr,
    OFFSET: tl.constexpr,
    GATED: tl.constexpr,
    TOKENS: tl.constexpr,
    LANES: tl.constexpr,
    ROWS: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    TABLE: tl.constexpr,
    SUBS: tl.constexpr,
    SCALES: tl.constexpr,
    ZERO: tl.constexpr,
    SUPERS: tl.constexpr,
    SHARED: tl.constexpr,
    DOWN_FIRST: tl.constexpr,
    DOWN_SECOND: tl.constexpr,
    DOWN_TABLE: tl.constexpr,
    DOWN_SUBS: tl.constexpr,
    DOWN_SCALES: tl.constexpr,
    DOWN_ZERO: tl.constexpr,
    DOWN_SUPERS: tl.constexpr,
):
    """As ``triton_few.blocks``."""
    GROUPS: tl.constexpr = (HIDDEN + 63) // 64
    PADDED: tl.constexpr = GROUPS * 64
    row = tl.program_id(0) // SPLITS
    split = tl.program_id(0) % SPLITS
    chunk = tl.program_id(1)
    first_entry = tl.load(row_entry + row)
    entries = tl.load(row_entry + row + 1) - first_entry
    first_block = tl.load(row_block + row)
    begin = tl.load(row_item + row)
    count = tl.load(row_item + row + 1) - begin
    split_begin = split * BLOCKS // SPLITS
    begins = tl.maximum(first_block, split_begin)
    ends = tl.minimum(first_block + entries, (split + 1) * BLOCKS // SPLITS)
    if (chunk * TOKENS < count) & (begins < ends):
        WORDS: tl.constexpr = group_words(FIRST, SECOND, SCALES)
        DOWN_WORDS: tl.constexpr = group_words(DOWN_FIRST, DOWN_SECOND, DOWN_SCALES)
        items = chunk * TOKENS + tl.arange(0, TOKENS)
        there = items < count
        # What is read in place of an absent item is not stored.
        some = tl.minimum(items, count - 1)
        token = tl.load(item_token + begin + some).to(tl.int64)
        neuron = tl.arange(0, 64)
        tile = (neuron // 16)[None, None, :]
        lane = (neuron % 16)[None, None, :]
        spots = (split.to(tl.int64) * items_padded + begin + items) * PADDED
        whole = tl.full([1, 1, 1], 64, tl.int32)
        for block in range(begins, ends):
            entry = first_entry + block - first_block
            record = pages + tl.load(entry_page + entry).to(tl.int64) * RECORD
            slot = tl.load(entry_slot + entry).to(tl.int64)
            gate_words = (record + GATE).to(tl.pointer_type(tl.int32))
            gate_sz = (record + GATE_SZ).to(tl.pointer_type(tl.int32))
            gate_super = (record + GATE_SUPER).to(tl.pointer_type(tl.float16))
            gates = tl.zeros([TOKENS, LANES, 64], dtype=tl.float32)
            ups = tl.zeros([TOKENS, LANES, 64], dtype=tl.float32)
            for first in range(0, GROUPS, LANES):
                group = first + tl.arange(0, LANES)
                read = tl.minimum(group, GROUPS - 1)[None, :, None]
                words = gate_words + (tile * (GROUPS * WORDS) + lane) + read * WORDS
                sz = gate_sz + (tile * (GROUPS * 16) + lane) + read * 16
                supers = super_of(gate_super, tile, read, GROUPS, lane, SUPERS, SHARED)
                inputs = x + (token * HIDDEN)[:, None, None] + read * 64
                MASKED: tl.constexpr = HIDDEN % 64 != 0
                gate, up = _pair_products(
                    inputs, HIDDEN - read * 64, words, sz, supers, table,
                    (UP - GATE) // 4, (UP_SZ - GATE_SZ) // 4, (UP_SUPER - GATE_SUPER) // 2,
                    FIRST, SECOND, TABLE, SUBS, SCALES, ZERO, SUPERS, GATED, MASKED,
                )  # fmt: skip
                if GROUPS % LANES:
                    there_are = (group < GROUPS)[None, :, None]
                    gate = tl.where(there_are, gate, 0.0)
                    up = tl.where(there_are, up, 0.0)
                gates += gate
                ups += up
            gate = tl.sum(gates, axis=1)
            up = tl.sum(ups, axis=1)
            if HAS_BIAS:
                gate += tl.load((record + GATE_BIAS).to(tl.pointer_type(tl.float32)) + neuron)[None, :]
                if GATED:
                    up += tl.load((record + UP_BIAS).to(tl.pointer_type(tl.float32)) + neuron)[None, :]
            result = activate(gate, up, ACTIVATION, CLAMP, OFFSET, GATED, alpha, limit)
            places = (slot + items)[:, None] * 64 + neuron[None, :]
            tl.store(activations + places, result, mask=there[:, None])
            # All threads read what each has written.
            tl.debug_barrier()
            down_words = (record + DOWN).to(tl.pointer_type(tl.int32))
            down_sz = (record + DOWN_SZ).to(tl.pointer_type(tl.int32))
            down_super = (record + DOWN_SUPER).to(tl.pointer_type(tl.float16))
            inputs = activations + ((slot + some) * 64)[:, None, None]
            for part in range(0, PADDED, ROWS):
                output = part + tl.arange(0, ROWS)
                real = output < PADDED
                at = (output // 16)[None, None, :]
                on = (output % 16)[None, None, :]
                PARTLY: tl.constexpr = PADDED % ROWS != 0
                one = _group_products(
                    inputs, whole, down_words + at * DOWN_WORDS + on, down_sz + at * 16 + on,
                    super_of(down_super, at, 0, 1, on, DOWN_SUPERS, 1), table, real[None, None, :],
                    DOWN_FIRST, DOWN_SECOND, DOWN_TABLE, DOWN_SUBS, DOWN_SCALES, DOWN_ZERO, DOWN_SUPERS,
                    PARTLY,
                )  # fmt: skip
                total = tl.sum(one, axis=1)
                if HAS_BIAS:
                    bias = (record + DOWN_BIAS).to(tl.pointer_type(tl.float32))
                    own = real & (output >= block * BIAS_ROWS) & (output < (block + 1) * BIAS_ROWS)
                    total += tl.load(bias + output - block * BIAS_ROWS, mask=own, other=0.0)[None, :]
                spot = partial + spots[:, None] + output[None, :]
                stored = there[:, None] & real[None, :]
                # What comes earlier in the chain comes first.
                total += tl.load(spot, mask=stored & (block > split_begin), other=0.0)
                tl.store(spot, total, mask=stored)
    elif (chunk * TOKENS < count) & (clear != 0):
        items = chunk * TOKENS + tl.arange(0, TOKENS)
        spots = (split.to(tl.int64) * items_padded + begin + items) * PADDED
        for part in range(0, PADDED, ROWS):
            output = part + tl.arange(0, ROWS)
            stored = (items < count)[:, None] & (output < PADDED)[None, :]
            nothing = tl.zeros([TOKENS, ROWS], dtype=tl.float32)
            tl.store(partial + spots[:, None] + output[None, :], nothing, mask=stored)
