"""Triton kernels for the attention of a few decoded tokens over the reserved attention cache, in place.

The valid keys are divided among programs (split-KV): a program computes the attention of all query heads of a
key/value head over one part of the keys, and a second kernel merges the parts (Flash-Decoding; the sums are
those of online softmax, Milakov and Gimelshein 2018, section 3). The number of valid keys is read from the
GPU's memory, so a recorded launch serves every context: the grid is fixed, and programs whose part is empty
end at once.

``numbers`` is int64 on the GPU: the number of tokens before the new ones, then for each layer of the cache
the slot of its first new token. A new token attends to the slots before its own: to all of them, or in a
layer with a window to as many as the window holds. Slots outside are never read.

A key may have two parts: ``MAIN`` elements, a power of two, and a tail. For heads of 192 elements these are
128 and 64; for latent attention the latents, which are the values as well (``SHARED``), and the rotated part.

Every kernel is launched by :mod:`moechat.offload.kernels.attention`, which gives the meaning of the
arguments.
"""

# Triton reads annotations as types of its own, and its functions are not functions to a type checker.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, operator, index"

import triton
import triton.language as tl

from moechat.offload.kernels.triton_rows import elements, unpacked, write_packed


@triton.jit
def _range(numbers, place, TOKENS: tl.constexpr, WINDOW: tl.constexpr):
    """First valid slot, slot of the first new token, and number of slots from the first to the last."""
    slot = tl.load(numbers + 1 + place).to(tl.int32)
    first = slot * 0
    if WINDOW > 0:
        first = slot - tl.minimum(tl.load(numbers).to(tl.int32), WINDOW - 1)
    return first, slot, slot + TOKENS - first


@triton.jit
def _each(count, BLOCK: tl.constexpr, SPLITS: tl.constexpr, LEAST: tl.constexpr):
    """Keys of a split, a multiple of ``BLOCK``."""
    return tl.maximum(tl.cdiv(tl.cdiv(count, BLOCK), SPLITS), LEAST) * BLOCK


@triton.jit
def _tile(
    rows,
    ALL: tl.constexpr,
    ROW: tl.constexpr,
    START: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PACKED: tl.constexpr,
    inside,
    like,
):
    """Elements of ``BLOCK`` neighbouring rows, in the type of ``like``, which holds both forms exactly."""
    places = rows + tl.arange(0, BLOCK)[:, None] * ROW
    if PACKED:
        found = unpacked(places, ALL, START, DIM, WIDTH, BLOCK, inside[:, None])
    else:
        found = elements(places, START, DIM, WIDTH, inside[:, None])
    return found.to(like.dtype)


@triton.jit
def _scores(q, k, total, DOT: tl.constexpr):
    """``total + q @ k.T``: with tensor cores, or element by element in float32."""
    if DOT:
        result = tl.dot(q, tl.trans(k), total, input_precision="ieee")
    else:
        result = total + tl.sum(q[:, None, :] * k[None, :, :], axis=2)
    return result


@triton.jit
def _sums(weights, v, total, DOT: tl.constexpr):
    """``total + weights @ v``, as :func:`_scores`."""
    if DOT:
        result = tl.dot(weights.to(v.dtype), v, total, input_precision="ieee")
    else:
        result = total + tl.sum(weights[:, :, None] * v[None, :, :], axis=1)
    return result


@triton.jit(do_not_specialize=["place", "query_head", "query_token", "total_rows"])
def attend(
    query,
    keys,
    tails,
    values,
    numbers,
    partial,
    stats,
    place,
    query_head,
    query_token,
    key_head,
    tail_head,
    value_head,
    total_rows,
    scale,
    softcap,
    GROUP: tl.constexpr,
    TOKENS: tl.constexpr,
    WINDOW: tl.constexpr,
    MAIN_DIM: tl.constexpr,
    MAIN: tl.constexpr,
    TAIL_DIM: tl.constexpr,
    TAIL: tl.constexpr,
    TAIL_START: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE: tl.constexpr,
    KEY_ALL: tl.constexpr,
    TAIL_ALL: tl.constexpr,
    SHARED: tl.constexpr,
    PACKED: tl.constexpr,
    CAPPED: tl.constexpr,
    DOT: tl.constexpr,
    EXACT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    LEAST: tl.constexpr,
):
    """Attention of ``ROWS`` (query head, token) pairs of one key/value head over one split of the keys.

    Program (key/value head and part of its rows, split). Writes sums that are not yet divided, the largest
    score and the sum of the weights. Scores are in units of ln 2.
    """
    PARTS: tl.constexpr = (GROUP * TOKENS + ROWS - 1) // ROWS
    head = tl.program_id(0) // PARTS
    row = (tl.program_id(0) % PARTS) * ROWS + tl.arange(0, ROWS)
    split = tl.program_id(1)
    first, slot, count = _range(numbers, place, TOKENS, WINDOW)
    each = _each(count, BLOCK, SPLITS, LEAST)
    begin = split * each
    if begin < count:
        token = row % TOKENS
        wide = head.to(tl.int64)
        ours = query + (wide * GROUP + row // TOKENS) * query_head + token * query_token
        there = (row < GROUP * TOKENS)[:, None]
        q = elements(ours[:, None], 0, MAIN_DIM, MAIN, there)
        if EXACT:
            q = q.to(tl.float32)
        if TAIL > 0:
            q_tail = elements(ours[:, None], MAIN_DIM, TAIL_DIM, TAIL, there).to(q.dtype)
        KEY_ROW: tl.constexpr = KEY_ALL + ((KEY_ALL + 31) // 32 if PACKED else 0)
        TAIL_ROW: tl.constexpr = TAIL_ALL + ((TAIL_ALL + 31) // 32 if PACKED else 0)
        VALUE_ROW: tl.constexpr = VALUE_DIM + ((VALUE_DIM + 31) // 32 if PACKED else 0)
        oldest = (first + begin).to(tl.int64)
        key_rows = keys + wide * key_head + oldest * KEY_ROW
        tail_rows = tails + wide * tail_head + oldest * TAIL_ROW
        value_rows = values + wide * value_head + oldest * VALUE_ROW
        most = tl.full([ROWS], float("-inf"), dtype=tl.float32)
        weights = tl.zeros([ROWS], dtype=tl.float32)
        total = tl.zeros([ROWS, VALUE], dtype=tl.float32)
        nothing = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
        # Keys that only some tokens attend to: a later token's own, and what has left its window.
        newest = slot - first + token[:, None]
        for start in range(begin, tl.minimum(begin + each, count), BLOCK):
            at = start + tl.arange(0, BLOCK)
            inside = at < count
            k = _tile(key_rows, KEY_ALL, KEY_ROW, 0, MAIN_DIM, MAIN, BLOCK, PACKED, inside, q)
            scores = _scores(q, k, nothing, DOT)
            if TAIL > 0:
                tail = _tile(
                    tail_rows, TAIL_ALL, TAIL_ROW, TAIL_START, TAIL_DIM, TAIL, BLOCK,
                    PACKED, inside, q,
                )  # fmt: skip
                scores = _scores(q_tail, tail, scores, DOT)
            scores = scores * scale
            if CAPPED:
                # tanh by way of the sigmoid, which overflows on neither side.
                scores = (2.0 * tl.sigmoid(2.0 * scores) - 1.0) * softcap
            attends = inside[None, :]
            if TOKENS > 1:
                attends = attends & (at[None, :] <= newest)
                if WINDOW > 0:
                    attends = attends & (at[None, :] > newest - WINDOW)
            scores = tl.where(attends, scores, float("-inf"))
            larger = tl.maximum(most, tl.max(scores, axis=1))
            # A token may attend to none of these keys.
            finite = tl.where(larger == float("-inf"), 0.0, larger)
            shrink = tl.exp2(most - finite)
            weight = tl.exp2(scores - finite[:, None])
            weights = weights * shrink + tl.sum(weight, axis=1)
            if SHARED:
                v = k
            else:
                v = _tile(
                    value_rows, VALUE_DIM, VALUE_ROW, 0, VALUE_DIM, VALUE, BLOCK,
                    PACKED, inside, q,
                )  # fmt: skip
            total = _sums(weight, v, total * shrink[:, None], DOT)
            most = larger
            key_rows += BLOCK * KEY_ROW
            tail_rows += BLOCK * TAIL_ROW
            value_rows += BLOCK * VALUE_ROW
        spot = split.to(tl.int64) * total_rows + head * (GROUP * TOKENS) + row
        d = tl.arange(0, VALUE)[None, :]
        tl.store(partial + spot[:, None] * VALUE_DIM + d, total, mask=there & (d < VALUE_DIM))
        mine = row < GROUP * TOKENS
        tl.store(stats + spot * 2, most, mask=mine)
        tl.store(stats + spot * 2 + 1, weights, mask=mine)


@triton.jit(do_not_specialize=["place", "total_rows"])
def merge(
    partial,
    stats,
    sinks,
    numbers,
    out,
    place,
    total_rows,
    GROUP: tl.constexpr,
    TOKENS: tl.constexpr,
    WINDOW: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE: tl.constexpr,
    SINKS: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    LEAST: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Merges the splits of one (query head, token), in ascending order. Program (row).

    A sink is a score of its own, which takes weight and adds nothing.
    """
    row = tl.program_id(0)
    _, _, count = _range(numbers, place, TOKENS, WINDOW)
    used = tl.cdiv(count, _each(count, BLOCK, SPLITS, LEAST))
    head = row // TOKENS
    split = tl.arange(0, SPLITS)
    spot = split.to(tl.int64) * total_rows + row
    mosts = tl.load(stats + spot * 2, mask=split < used, other=float("-inf"))
    sums = tl.load(stats + spot * 2 + 1, mask=split < used, other=0.0)
    most = tl.max(mosts, axis=0)
    if SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * 1.4426950408889634
        most = tl.maximum(most, sink)
    weight = tl.sum(sums * tl.exp2(mosts - most), axis=0)
    if SINKS:
        weight += tl.exp2(sink - most)
    d = tl.arange(0, VALUE)
    inside = (d < VALUE_DIM)[None, :]
    total = tl.zeros([VALUE], dtype=tl.float32)
    for begin in range(0, used, AT_ONCE):
        part = begin + tl.arange(0, AT_ONCE)
        here = part.to(tl.int64) * total_rows + row
        share = tl.exp2(tl.load(stats + here * 2, mask=part < used, other=float("-inf")) - most)
        terms = partial + here[:, None] * VALUE_DIM + d[None, :]
        terms = tl.load(terms, mask=(part < used)[:, None] & inside, other=0.0)
        total += tl.sum(terms * share[:, None], axis=0)
    heads = total_rows // TOKENS
    to = out + ((row % TOKENS) * heads + head).to(tl.int64) * VALUE_DIM + d
    tl.store(to, (total / weight).to(out.dtype.element_ty), mask=d < VALUE_DIM)


@triton.jit(do_not_specialize=["place", "key_head", "key_token", "value_head", "value_token"])
def append(
    key,
    value,
    keys,
    values,
    numbers,
    place,
    key_head,
    key_token,
    value_head,
    value_token,
    keys_head,
    values_head,
    KEY_DIM: tl.constexpr,
    KEY: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Writes the new tokens' keys and values to their slots. Program (head, token)."""
    head = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1)
    slot = tl.load(numbers + 1 + place) + token
    # A vector of one row.
    one = tl.arange(0, 1)[:, None]
    key_from = key + head * key_head + token * key_token + one
    value_from = value + head * value_head + token * value_token + one
    if PACKED:
        KEY_ROW: tl.constexpr = KEY_DIM + (KEY_DIM + 31) // 32
        VALUE_ROW: tl.constexpr = VALUE_DIM + (VALUE_DIM + 31) // 32
        write_packed(keys + head * keys_head + slot * KEY_ROW + one, key_from, KEY_DIM, KEY, 1, one == 0)
        write_packed(
            values + head * values_head + slot * VALUE_ROW + one, value_from, VALUE_DIM, VALUE, 1, one == 0
        )
    else:
        d = tl.arange(0, KEY)[None, :]
        to = keys + head * keys_head + slot * KEY_DIM + d
        tl.store(to, elements(key_from, 0, KEY_DIM, KEY, one == 0), mask=d < KEY_DIM)
        d = tl.arange(0, VALUE)[None, :]
        to = values + head * values_head + slot * VALUE_DIM + d
        tl.store(to, elements(value_from, 0, VALUE_DIM, VALUE, one == 0), mask=d < VALUE_DIM)
