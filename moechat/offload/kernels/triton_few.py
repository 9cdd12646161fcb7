"""The Triton kernel for experts of few tokens: a program computes blocks from end to end.

What is computed is the same for every way in which the blocks of an expert were cut into launches, and for
every number of tokens: the order of a sum depends on the shape of the experts alone. See
:mod:`moechat.offload.kernels.triton_blocks`, whose :func:`combine` adds the chains.

Launched by :mod:`moechat.offload.kernels.launch`, which gives the meaning of the arguments.
"""

# Triton reads annotations as types of its own, and its functions are not functions to a type checker.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, operator, index"

import triton
import triton.language as tl

from moechat.offload.kernels.triton_blocks import activate
from moechat.offload.kernels.triton_codes import group_products, pair_products
from moechat.offload.kernels.triton_scales import MOST_WORD_BITS


@triton.jit
def _scales(record, PLACE: tl.constexpr, BITS: tl.constexpr):
    """Pointer to the scales of a matrix."""
    if BITS > MOST_WORD_BITS:
        pointer = (record + PLACE).to(tl.pointer_type(tl.float16))
    else:
        pointer = (record + PLACE).to(tl.pointer_type(tl.int32))
    return pointer


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
    HIDDEN: tl.constexpr,
    BLOCKS: tl.constexpr,
    SPLITS: tl.constexpr,
    GATE: tl.constexpr,
    UP: tl.constexpr,
    DOWN: tl.constexpr,
    GATE_SZ: tl.constexpr,
    UP_SZ: tl.constexpr,
    DOWN_SZ: tl.constexpr,
    GATE_BIAS: tl.constexpr,
    UP_BIAS: tl.constexpr,
    DOWN_BIAS: tl.constexpr,
    BIAS_ROWS: tl.constexpr,
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
    LANES: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Adds the blocks of one expert that fall into one split to the outputs of ``TOKENS`` items.

    Program (split of the row, chunk of items). ``LANES`` groups of inputs are read at once, and ``ROWS``
    outputs are computed at once. The first block of a split begins its chain, so ``partial`` need not be
    cleared; with ``clear`` the outputs of splits without blocks here are set to 0.
    """
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
    low = tl.maximum(first_block, split_begin)
    high = tl.minimum(first_block + entries, (split + 1) * BLOCKS // SPLITS)
    if (chunk * TOKENS < count) & (low < high):
        WORDS: tl.constexpr = GROUP_BYTES // 4
        SCALES: tl.constexpr = 32 if BITS > MOST_WORD_BITS else 16
        items = chunk * TOKENS + tl.arange(0, TOKENS)
        there = items < count
        # What is read in place of an absent item is not stored.
        some = tl.minimum(items, count - 1)
        token = tl.load(item_token + begin + some).to(tl.int64)
        neuron = tl.arange(0, 64)
        tile = neuron // 16
        lane = neuron % 16
        spots = (split.to(tl.int64) * items_padded + begin + items) * PADDED
        whole = tl.full([1, 1, 1], 64, tl.int32)
        for block in range(low, high):
            entry = first_entry + block - first_block
            record = pages + tl.load(entry_page + entry).to(tl.int64) * RECORD
            slot = tl.load(entry_slot + entry).to(tl.int64)
            gate_words = (record + GATE).to(tl.pointer_type(tl.int32))
            gate_sz = _scales(record, GATE_SZ, BITS)
            UP_WORDS: tl.constexpr = (UP - GATE) // 4
            UP_SCALES: tl.constexpr = (UP_SZ - GATE_SZ) // (2 if BITS > MOST_WORD_BITS else 4)
            gates = tl.zeros([TOKENS, LANES, 64], dtype=tl.float32)
            ups = tl.zeros([TOKENS, LANES, 64], dtype=tl.float32)
            for first in range(0, GROUPS, LANES):
                group = first + tl.arange(0, LANES)
                read = tl.minimum(group, GROUPS - 1)[None, :, None]
                words = (tile * (GROUPS * WORDS) + lane)[None, None, :] + read * WORDS
                lanes = (tile * (GROUPS * SCALES) + lane)[None, None, :] + read * SCALES
                inputs = x + (token * HIDDEN)[:, None, None] + read * 64
                last = HIDDEN - read * 64
                MASKED: tl.constexpr = HIDDEN % 64 != 0
                gate, up = pair_products(
                    inputs, last, gate_words + words, gate_sz + lanes, UP_WORDS, UP_SCALES, BITS, FP16, MASKED
                )
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
                up += tl.load((record + UP_BIAS).to(tl.pointer_type(tl.float32)) + neuron)[None, :]
            result = activate(gate, up, ACTIVATION, CLAMP, OFFSET, GATED, alpha, limit)
            places = (slot + items)[:, None] * 64 + neuron[None, :]
            tl.store(activations + places, result, mask=there[:, None])
            # All threads read what each has written.
            tl.debug_barrier()
            down_words = (record + DOWN).to(tl.pointer_type(tl.int32))
            down_sz = _scales(record, DOWN_SZ, BITS)
            inputs = activations + ((slot + some) * 64)[:, None, None]
            for part in range(0, PADDED, ROWS):
                output = part + tl.arange(0, ROWS)
                real = output < PADDED
                words = (output // 16 * WORDS + output % 16)[None, None, :]
                lanes = (output // 16 * SCALES + output % 16)[None, None, :]
                PARTLY: tl.constexpr = PADDED % ROWS != 0
                one = group_products(
                    inputs,
                    whole,
                    down_words + words,
                    down_sz + lanes,
                    real[None, None, :],
                    BITS,
                    FP16,
                    False,
                    PARTLY,
                )
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
