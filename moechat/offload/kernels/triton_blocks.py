"""Triton kernels over lists of block records: gate, up and activation, down, and the sum over experts.

A record's byte map is in ``native/src/kernels/layout/block_layout.h``. A tile of 16 rows and a group of 64
columns are steps of 16 lanes of 32-bit words; a word holds neighbouring columns of one row. A warp that reads
a step therefore reads 64 neighbouring bytes, and four steps make a full transaction.

What is computed is the same for every way in which the blocks of an expert were cut into launches:

- ``neurons`` writes the activations of a block for a token, which depend on nothing else;
- ``outputs`` adds the blocks of an expert in ascending order, each split of the block numbers one chain that
  a later launch takes up where an earlier one ended;
- ``combine`` adds the splits, then the experts of a token, in ascending order.

Weights meet their inputs as integers, which 16-bit floats hold exactly; scales follow after the products of a
group. ``DOT`` says how products are made, always with float32 sums: 0, element by element in float32; 1,
by tensor cores from inputs in their 16-bit type; 2, as matrices in float32.

Every kernel is launched by :mod:`moechat.offload.kernels.launch`, which gives the meaning of the arguments.
"""

# Triton reads annotations as types of its own, and its functions are not functions to a type checker.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, operator, index"

import triton
import triton.language as tl

from moechat.offload.kernels.triton_scales import factor_of, offset_of, step_of

SILU = 0
GELU = 1
GELU_TANH = 2
CLAMPED_SWIGLU = 3


@triton.jit
def _codes(words, rows, BITS: tl.constexpr, ROWS: tl.constexpr):
    """Codes int32 ``[64, ROWS]`` of a group: ``words`` points to its first word in int32, ``rows`` ``[ROWS]``
    is the offset in words of each row's lane in its tile.
    """
    if BITS == 3:
        low_steps = tl.arange(0, 4)
        low = tl.load(words + low_steps[:, None] * 16 + rows[None, :])
        two = tl.arange(0, 16) * 2
        low = (low[:, None, :] >> two[None, :, None]) & 3
        high_steps = tl.arange(0, 2)
        high = tl.load(words + 64 + high_steps[:, None] * 16 + rows[None, :])
        one = tl.arange(0, 32)
        high = (high[:, None, :] >> one[None, :, None]) & 1
        codes = tl.reshape(low, [64, ROWS]) | (tl.reshape(high, [64, ROWS]) << 2)
    else:
        COLUMNS: tl.constexpr = 32 // BITS
        STEPS: tl.constexpr = 64 // COLUMNS
        steps = tl.arange(0, STEPS)
        packed = tl.load(words + steps[:, None] * 16 + rows[None, :])
        shifts = tl.arange(0, COLUMNS) * BITS
        codes = (packed[:, None, :] >> shifts[None, :, None]) & ((1 << BITS) - 1)
        codes = tl.reshape(codes, [64, ROWS])
    return codes


@triton.jit
def _halves(words, rows, ROWS: tl.constexpr, FP16: tl.constexpr):
    """16-bit weights ``[64, ROWS]`` of a group, as they are; as :func:`_codes`."""
    steps = tl.arange(0, 32)
    packed = tl.load(words + steps[:, None] * 16 + rows[None, :])
    halves = tl.arange(0, 2) * 16
    patterns = tl.reshape((packed[:, None, :] >> halves[None, :, None]) & 0xFFFF, [64, ROWS]).to(tl.int16)
    if FP16:
        weights = patterns.to(tl.float16, bitcast=True)
    else:
        weights = patterns.to(tl.bfloat16, bitcast=True)
    return weights


@triton.jit
def _many(
    total,
    x,
    words,
    sz,
    rows,
    lanes,
    BITS: tl.constexpr,
    ROWS: tl.constexpr,
    FP16: tl.constexpr,
    DOT: tl.constexpr,
):
    """``total`` float32 ``[T, ROWS]`` plus the products of ``x`` ``[T, 64]`` with one group of weights.

    ``sz`` points to its scales in fp16, 16 of them and 16 zeros a tile; ``lanes`` ``[ROWS]`` is the offset of
    each row's scale. Below 8 bits it points to scale words.
    """
    if BITS == 16:
        weights = _halves(words, rows, ROWS, FP16)
        if DOT == 1:
            total = tl.dot(x.to(weights.dtype), weights, total)
        else:
            total = tl.dot(x, weights.to(tl.float32), total, input_precision="ieee")
    else:
        codes = _codes(words, rows, BITS, ROWS)
        if BITS == 8:
            scale = tl.load(sz + lanes).to(tl.float32)
            zero = tl.load(sz + lanes + 16).to(tl.float32)
            products = tl.dot(x, codes.to(x.dtype), input_precision="ieee")
            sums = tl.sum(x.to(tl.float32), axis=1)
            total += (products - sums[:, None] * zero[None, :]) * scale[None, :]
        else:
            both = tl.load(sz + lanes)
            half = (tl.arange(0, 64) // 32)[:, None]
            # Integers of 8 bits and a sign, which 16-bit floats hold exactly.
            steps = codes * factor_of(both[None, :], half) - offset_of(both[None, :], half)
            products = tl.dot(x, steps.to(tl.float32).to(x.dtype), input_precision="ieee")
            total += products * step_of(both)[None, :]
    return total


@triton.jit
def _inputs(x, inside, first, last, STEPS: tl.constexpr, COLUMNS: tl.constexpr):
    """Inputs float32 ``[T, STEPS, COLUMNS]`` from column ``first`` on, 0 from ``last`` on.

    ``x`` ``[T]`` points to the tokens' first columns; ``inside`` ``[T]`` says which there are.
    """
    column = first + tl.arange(0, STEPS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    there = inside[:, None, None] & (column < last)[None, :, :]
    return tl.load(x[:, None, None] + column[None, :, :], mask=there, other=0.0).to(tl.float32)


@triton.jit
def _plane(words, rows, x, BITS: tl.constexpr, STEPS: tl.constexpr, COLUMNS: tl.constexpr):
    """Products float32 ``[T, STEPS, ROWS]`` of ``x`` ``[T, STEPS, COLUMNS]`` with the codes of each word."""
    packed = tl.load(words + tl.arange(0, STEPS)[:, None] * 16 + rows[None, :])
    shifts = tl.arange(0, COLUMNS) * BITS
    codes = (packed[:, None, :] >> shifts[None, :, None]) & ((1 << BITS) - 1)
    return tl.sum(x[:, :, :, None] * codes.to(tl.float32)[None, :, :, :], axis=2)


@triton.jit
def _few(total, x, inside, first, last, words, sz, rows, lanes, BITS: tl.constexpr, FP16: tl.constexpr):
    """``total`` float32 ``[T, KEPT, ROWS]`` plus the products with one group of weights.

    The sums over the ``KEPT`` steps of a group stay apart until the end: threads hold steps of their own, and
    need not meet for each group. ``x`` and ``inside`` as in :func:`_inputs`, the rest as in :func:`_many`.
    """
    if BITS == 16:
        values = _inputs(x, inside, first, last, 32, 2)
        packed = tl.load(words + tl.arange(0, 32)[:, None] * 16 + rows[None, :])
        patterns = (packed[:, None, :] >> (tl.arange(0, 2) * 16)[None, :, None]) & 0xFFFF
        if FP16:
            weights = patterns.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        else:
            weights = (patterns << 16).to(tl.float32, bitcast=True)
        total += tl.sum(values[:, :, :, None] * weights[None, :, :, :], axis=2)
    else:
        if BITS == 8:
            scale = tl.load(sz + lanes).to(tl.float32)
            zero = tl.load(sz + lanes + 16).to(tl.float32)
            values = _inputs(x, inside, first, last, 16, 4)
            products = _plane(words, rows, values, 8, 16, 4)
            sums = tl.sum(values, axis=2)
            total += (products - sums[:, :, None] * zero[None, None, :]) * scale[None, None, :]
        else:
            both = tl.load(sz + lanes)[None, None, :]
            if BITS == 3:
                low = _inputs(x, inside, first, last, 4, 16)
                high = _inputs(x, inside, first, last, 2, 32)
                quarter = (tl.arange(0, 4) // 2)[None, :, None]
                half = tl.arange(0, 2)[None, :, None]
                lows = _plane(words, rows, low, 2, 4, 16) * factor_of(both, quarter).to(tl.float32)
                highs = _plane(words + 64, rows, high, 1, 2, 32) * factor_of(both, half).to(tl.float32)
                taken = tl.sum(high, axis=2)[:, :, None] * offset_of(both, half).to(tl.float32)
                terms = tl.sum(lows, axis=1) + tl.sum(4.0 * highs - taken, axis=1)
                total += terms[:, None, :] * step_of(both)
            else:
                values = _inputs(x, inside, first, last, 2 * BITS, 32 // BITS)
                products = _plane(words, rows, values, BITS, 2 * BITS, 32 // BITS)
                half = (tl.arange(0, 2 * BITS) // BITS)[None, :, None]
                taken = tl.sum(values, axis=2)[:, :, None] * offset_of(both, half).to(tl.float32)
                total += (products * factor_of(both, half).to(tl.float32) - taken) * step_of(both)
    return total


@triton.jit
def _activate(gate, up, ACTIVATION: tl.constexpr, alpha, limit):
    if ACTIVATION == 3:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
        result = (up + 1.0) * gate * tl.sigmoid(alpha * gate)
    elif ACTIVATION == 0:
        result = gate * tl.sigmoid(gate) * up
    elif ACTIVATION == 1:
        result = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476)) * up
    else:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        # tanh by way of the sigmoid, which overflows on neither side.
        result = gate * tl.sigmoid(2.0 * inner) * up
    return result


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
    GROUPS: tl.constexpr,
    GATE: tl.constexpr,
    UP: tl.constexpr,
    GATE_SZ: tl.constexpr,
    UP_SZ: tl.constexpr,
    GATE_BIAS: tl.constexpr,
    UP_BIAS: tl.constexpr,
    RECORD: tl.constexpr,
    GROUP_BYTES: tl.constexpr,
    BITS: tl.constexpr,
    FP16: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    DOT: tl.constexpr,
):
    """Activations of ``ROWS`` neurons of one block for ``TOKENS`` items of its row.

    Program (entry, part of the block, chunk of items).
    """
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
        rows = tile * (GROUPS * GROUP_BYTES // 4) + lane
        SCALES: tl.constexpr = 32 if BITS == 8 else 16
        lanes = tile * (GROUPS * SCALES) + lane
        items = chunk * TOKENS + tl.arange(0, TOKENS)
        token = tl.load(item_token + begin + items, mask=items < count, other=0).to(tl.int64)
        gate_words = (record + GATE).to(tl.pointer_type(tl.int32))
        up_words = (record + UP).to(tl.pointer_type(tl.int32))
        if BITS == 8:
            gate_sz = (record + GATE_SZ).to(tl.pointer_type(tl.float16))
            up_sz = (record + UP_SZ).to(tl.pointer_type(tl.float16))
        else:
            gate_sz = (record + GATE_SZ).to(tl.pointer_type(tl.int32))
            up_sz = (record + UP_SZ).to(tl.pointer_type(tl.int32))
        there = items < count
        WORDS: tl.constexpr = GROUP_BYTES // 4
        if DOT == 0:
            inputs = x + token * hidden
            KEPT: tl.constexpr = 1 if BITS == 3 else 2 * BITS
            gates = tl.zeros([TOKENS, KEPT, ROWS], dtype=tl.float32)
            ups = tl.zeros([TOKENS, KEPT, ROWS], dtype=tl.float32)
            for group in range(GROUPS):
                first = group * 64
                words, sz = gate_words + group * WORDS, gate_sz + group * SCALES
                gates = _few(gates, inputs, there, first, hidden, words, sz, rows, lanes, BITS, FP16)
                words, sz = up_words + group * WORDS, up_sz + group * SCALES
                ups = _few(ups, inputs, there, first, hidden, words, sz, rows, lanes, BITS, FP16)
            gate = tl.sum(gates, axis=1)
            up = tl.sum(ups, axis=1)
        else:
            gate = tl.zeros([TOKENS, ROWS], dtype=tl.float32)
            up = tl.zeros([TOKENS, ROWS], dtype=tl.float32)
            for group in range(GROUPS):
                column = group * 64 + tl.arange(0, 64)
                inside = there[:, None] & (column < hidden)[None, :]
                values = tl.load(x + token[:, None] * hidden + column[None, :], mask=inside, other=0.0)
                if DOT == 2:
                    values = values.to(tl.float32)
                words, sz = gate_words + group * WORDS, gate_sz + group * SCALES
                gate = _many(gate, values, words, sz, rows, lanes, BITS, ROWS, FP16, DOT)
                words, sz = up_words + group * WORDS, up_sz + group * SCALES
                up = _many(up, values, words, sz, rows, lanes, BITS, ROWS, FP16, DOT)
        if HAS_BIAS:
            gate += tl.load((record + GATE_BIAS).to(tl.pointer_type(tl.float32)) + neuron)[None, :]
            up += tl.load((record + UP_BIAS).to(tl.pointer_type(tl.float32)) + neuron)[None, :]
        slot = tl.load(entry_slot + entry).to(tl.int64) + items
        result = _activate(gate, up, ACTIVATION, alpha, limit).to(activations.dtype.element_ty)
        tl.store(activations + slot[:, None] * 64 + neuron[None, :], result, mask=there[:, None])


# The number of items is another one in every pass: kernels built for one would be built in the middle of it.
@triton.jit(do_not_specialize=["items_padded"])
def outputs(
    pages,
    entry_page,
    entry_slot,
    row_entry,
    row_block,
    row_item,
    activations,
    partial,
    items_padded,
    BLOCKS: tl.constexpr,
    SPLITS: tl.constexpr,
    HIDDEN_PADDED: tl.constexpr,
    DOWN: tl.constexpr,
    DOWN_SZ: tl.constexpr,
    DOWN_BIAS: tl.constexpr,
    BIAS_ROWS: tl.constexpr,
    RECORD: tl.constexpr,
    GROUP_BYTES: tl.constexpr,
    BITS: tl.constexpr,
    FP16: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    DOT: tl.constexpr,
):
    """Adds the blocks of one expert that fall into one split to ``ROWS`` outputs of ``TOKENS`` items.

    Program (part of the outputs, split of the row, chunk of items). The first block of a split begins its
    chain, so ``partial`` need not be cleared.
    """
    part = tl.program_id(0)
    row = tl.program_id(1) // SPLITS
    split = tl.program_id(1) % SPLITS
    chunk = tl.program_id(2)
    first_entry = tl.load(row_entry + row)
    entries = tl.load(row_entry + row + 1) - first_entry
    first_block = tl.load(row_block + row)
    begin = tl.load(row_item + row)
    count = tl.load(row_item + row + 1) - begin
    split_begin = split * BLOCKS // SPLITS
    low = tl.maximum(first_block, split_begin)
    high = tl.minimum(first_block + entries, (split + 1) * BLOCKS // SPLITS)
    if (chunk * TOKENS < count) & (low < high):
        output = part * ROWS + tl.arange(0, ROWS)
        tile = output // 16
        lane = output % 16
        rows = tile * (GROUP_BYTES // 4) + lane
        lanes = tile * (32 if BITS == 8 else 16) + lane
        items = chunk * TOKENS + tl.arange(0, TOKENS)
        there = items < count
        spot = (split.to(tl.int64) * items_padded + begin + items)[:, None] * HIDDEN_PADDED + output[None, :]
        # What an earlier launch has added comes first in the chain.
        total = tl.load(partial + spot, mask=there[:, None] & (low > split_begin), other=0.0)
        KEPT: tl.constexpr = 1 if BITS == 3 else 2 * BITS
        for block in range(low, high):
            entry = first_entry + block - first_block
            record = pages + tl.load(entry_page + entry).to(tl.int64) * RECORD
            slot = tl.load(entry_slot + entry).to(tl.int64) + items
            words = (record + DOWN).to(tl.pointer_type(tl.int32))
            if BITS == 8:
                sz = (record + DOWN_SZ).to(tl.pointer_type(tl.float16))
            else:
                sz = (record + DOWN_SZ).to(tl.pointer_type(tl.int32))
            if DOT == 0:
                inputs = activations + slot * 64
                one = tl.zeros([TOKENS, KEPT, ROWS], dtype=tl.float32)
                one = _few(one, inputs, there, 0, 64, words, sz, rows, lanes, BITS, FP16)
                total += tl.sum(one, axis=1)
            else:
                places = slot[:, None] * 64 + tl.arange(0, 64)[None, :]
                values = tl.load(activations + places, mask=there[:, None], other=0.0)
                total = _many(total, values, words, sz, rows, lanes, BITS, ROWS, FP16, DOT)
            if HAS_BIAS:
                bias = (record + DOWN_BIAS).to(tl.pointer_type(tl.float32))
                own = output // BIAS_ROWS == block
                total += tl.load(bias + output - block * BIAS_ROWS, mask=own, other=0.0)[None, :]
        tl.store(partial + spot, total, mask=there[:, None])


@triton.jit(do_not_specialize=["items_padded"])
def combine(
    partial,
    token_item,
    item_weight,
    others,
    out,
    items_padded,
    hidden,
    PICKS: tl.constexpr,
    SPLITS: tl.constexpr,
    HIDDEN_PADDED: tl.constexpr,
    HAS_OTHERS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Weighted sum over the items of a token, in their order. Program (token, part of the outputs)."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < hidden
    total = tl.zeros([COLUMNS], dtype=tl.float32)
    for pick in range(PICKS):
        item = tl.load(token_item + token * PICKS + pick).to(tl.int64)
        if item >= 0:
            value = tl.zeros([COLUMNS], dtype=tl.float32)
            for split in range(SPLITS):
                spot = (split * items_padded + item) * HIDDEN_PADDED + column
                value += tl.load(partial + spot, mask=inside, other=0.0)
            total += tl.load(item_weight + item) * value
    if HAS_OTHERS:
        total += tl.load(others + token * hidden + column, mask=inside, other=0.0)
    tl.store(out + token * hidden + column, total.to(out.dtype.element_ty), mask=inside)
