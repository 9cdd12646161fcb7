"""Triton kernels over lists of block records: gate, up and activation, down, and the sum over experts.

A record's byte map is in ``native/src/kernels/layout/block_layout.h``. A tile of 16 rows and a group of 64
columns are steps of 16 lanes of 32-bit words; a word holds neighbouring columns of one row. A warp that reads
a step therefore reads 64 neighbouring bytes, and four steps make a full transaction.

What is computed is the same for every way in which the blocks of an expert were cut into launches:

- ``neurons`` writes the activations of a block for a token, which depend on nothing else;
- ``outputs`` adds the blocks of an expert in ascending order, in one chain that a later launch takes up where
  an earlier one ended;
- ``combine`` adds the chains of an expert, then the experts of a token, in ascending order.

Few tokens have a kernel of their own in place of the first two: :mod:`moechat.offload.kernels.triton_few`.

Weights meet their inputs as integers, which 16-bit floats hold exactly; scales follow after the products of a
group. ``DOT`` says how products are made, always with float32 sums: 1, by tensor cores from inputs in their
16-bit type; 2, as matrices in float32.

Every kernel is launched by :mod:`moechat.offload.kernels.launch`, which gives the meaning of the arguments.
"""

# Triton reads annotations as types of its own, and its functions are not functions to a type checker.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, operator, index"

import triton
import triton.language as tl

from moechat.offload.kernels.triton_scales import MOST_WORD_BITS, factor_of, offset_of, step_of

SILU = 0
GELU = 1
GELU_TANH = 2
RELU2 = 3


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
    elif BITS == 6:
        steps = tl.arange(0, 8)
        columns = tl.arange(0, 8)
        low = tl.load(words + steps[:, None] * 16 + rows[None, :])
        low = (low[:, None, :] >> (4 * columns)[None, :, None]) & 15
        high = tl.load(words + 128 + (steps // 2)[:, None] * 16 + rows[None, :])
        places = 4 * (steps % 2)[:, None] + (8 * (columns // 2) + 2 * (columns % 2))[None, :]
        high = (high[:, None, :] >> places[:, :, None]) & 3
        codes = tl.reshape(low | (high << 4), [64, ROWS])
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
def _small_float(integers):
    """float32 of integers from -2^22 to 2^22 - 1.

    Added to the pattern of 1.5 * 2^23 they stand in its mantissa, and a subtraction leaves them, exactly.
    The addition is part of the multiplication that comes before; a conversion has a lower rate.
    """
    return (integers + 0x4B400000).to(tl.float32, bitcast=True) - 12582912.0


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
    each row's scale. At 2 to 4 bits it points to scale words.
    """
    if BITS == 16:
        weights = _halves(words, rows, ROWS, FP16)
        if DOT == 1:
            total = tl.dot(x.to(weights.dtype), weights, total)
        else:
            total = tl.dot(x, weights.to(tl.float32), total, input_precision="ieee")
    else:
        codes = _codes(words, rows, BITS, ROWS)
        if BITS > MOST_WORD_BITS:
            scale = tl.load(sz + lanes).to(tl.float32)
            zero = tl.load(sz + lanes + 16).to(tl.float32)
            products = tl.dot(x, _small_float(codes).to(x.dtype), input_precision="ieee")
            sums = tl.sum(x.to(tl.float32), axis=1)
            total += (products - sums[:, None] * zero[None, :]) * scale[None, :]
        else:
            both = tl.load(sz + lanes)
            half = (tl.arange(0, 64) // 32)[:, None]
            # Integers of 8 bits and a sign, which 16-bit floats hold exactly.
            steps = codes * factor_of(both[None, :], half) - offset_of(both[None, :], half)
            products = tl.dot(x, _small_float(steps).to(x.dtype), input_precision="ieee")
            total += products * step_of(both)[None, :]
    return total


@triton.jit
def activate(
    gate,
    up,
    ACTIVATION: tl.constexpr,
    CLAMP: tl.constexpr,
    OFFSET: tl.constexpr,
    GATED: tl.constexpr,
    alpha,
    limit,
):
    """The gate of an expert; ``CLAMP``: 0 none, 1 of the inputs, 2 of the activation and of up. Without
    ``GATED`` up has no effect.
    """
    if CLAMP == 1:
        gate = tl.minimum(gate, limit)
    if ACTIVATION == 0:
        result = gate * tl.sigmoid(alpha * gate)
    elif ACTIVATION == 1:
        result = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    elif ACTIVATION == 2:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        # tanh by way of the sigmoid, which overflows on neither side.
        result = gate * tl.sigmoid(2.0 * inner)
    else:
        # Not a maximum, which would turn NaN into 0.
        result = tl.where(gate < 0, 0.0, gate * gate)
    if CLAMP == 2:
        result = tl.minimum(result, limit)
    if GATED:
        if CLAMP != 0:
            up = tl.minimum(tl.maximum(up, -limit), limit)
        result = result * (up + OFFSET)
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
    CLAMP: tl.constexpr,
    OFFSET: tl.constexpr,
    GATED: tl.constexpr,
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
        SCALES: tl.constexpr = 32 if BITS > MOST_WORD_BITS else 16
        lanes = tile * (GROUPS * SCALES) + lane
        items = chunk * TOKENS + tl.arange(0, TOKENS)
        token = tl.load(item_token + begin + items, mask=items < count, other=0).to(tl.int64)
        gate_words = (record + GATE).to(tl.pointer_type(tl.int32))
        up_words = (record + UP).to(tl.pointer_type(tl.int32))
        if BITS > MOST_WORD_BITS:
            gate_sz = (record + GATE_SZ).to(tl.pointer_type(tl.float16))
            up_sz = (record + UP_SZ).to(tl.pointer_type(tl.float16))
        else:
            gate_sz = (record + GATE_SZ).to(tl.pointer_type(tl.int32))
            up_sz = (record + UP_SZ).to(tl.pointer_type(tl.int32))
        there = items < count
        WORDS: tl.constexpr = GROUP_BYTES // 4
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
            if GATED:
                words, sz = up_words + group * WORDS, up_sz + group * SCALES
                up = _many(up, values, words, sz, rows, lanes, BITS, ROWS, FP16, DOT)
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
    BLOCKS: tl.constexpr,
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
    """Adds the blocks of one expert to ``ROWS`` outputs of ``TOKENS`` items.

    Program (part of the outputs, row, chunk of items). The first block of an expert begins its chain, so
    ``partial`` need not be cleared; with ``clear`` the outputs of rows without blocks here are set to 0.
    """
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
        rows = tile * (GROUP_BYTES // 4) + lane
        lanes = tile * (32 if BITS > MOST_WORD_BITS else 16) + lane
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
            if BITS > MOST_WORD_BITS:
                sz = (record + DOWN_SZ).to(tl.pointer_type(tl.float16))
            else:
                sz = (record + DOWN_SZ).to(tl.pointer_type(tl.int32))
            places = slot[:, None] * 64 + tl.arange(0, 64)[None, :]
            values = tl.load(activations + places, mask=there[:, None], other=0.0)
            total = _many(total, values, words, sz, rows, lanes, BITS, ROWS, FP16, DOT)
            if HAS_BIAS:
                bias = (record + DOWN_BIAS).to(tl.pointer_type(tl.float32))
                own = output // BIAS_ROWS == block
                total += tl.load(bias + output - block * BIAS_ROWS, mask=own, other=0.0)[None, :]
        tl.store(partial + spot, total, mask=there[:, None])


# The number of items is another one in every pass: kernels built for one would be built in the middle of it.
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
    TABLE: tl.constexpr,
    HIDDEN_PADDED: tl.constexpr,
    HAS_OTHERS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Weighted sum over the items of a token, in their order. Program (token, part of the outputs).

    ``TABLE`` is the next power of two of ``SPLITS``. No branch stands between the loads, so that those of all
    items are under way together.
    """
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < hidden
    split = tl.arange(0, TABLE).to(tl.int64)
    total = tl.zeros([COLUMNS], dtype=tl.float32)
    for pick in tl.static_range(PICKS):
        item = tl.load(token_item + token * PICKS + pick).to(tl.int64)
        spot = (split * items_padded + item)[:, None] * HIDDEN_PADDED + column[None, :]
        there = (split < SPLITS)[:, None] & inside[None, :] & (item >= 0)
        value = tl.sum(tl.load(partial + spot, mask=there, other=0.0), axis=0)
        total += tl.load(item_weight + item, mask=item >= 0, other=0.0) * value
    if HAS_OTHERS:
        total += tl.load(others + token * hidden + column, mask=inside, other=0.0)
    tl.store(out + token * hidden + column, total.to(out.dtype.element_ty), mask=inside)
