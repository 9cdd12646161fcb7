"""Triton kernels of the small steps between a decoded token's products: norm, rotation, choice of experts.

Each does in one launch what takes torch about ten. They compute in float32 and round where the families
round. Launched by :mod:`moechat.offload.kernels.steps`, which gives the shapes.

Strides are specialised as usual: only rows known to be aligned are read 16 bytes at a time, and a model has
few strides.
"""

# Triton reads annotations as types of its own, and its functions are not functions to a type checker.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, operator, index"

import triton
import triton.language as tl

# How scores are made of logits.
SOFTMAX = tl.constexpr(0)
SIGMOID = tl.constexpr(1)
SOFTMAX_CHOSEN = tl.constexpr(2)


@triton.jit
def rms_norm(
    x,
    weight,
    out,
    row_stride,
    eps,
    offset,
    COLUMNS: tl.constexpr,
    PADDED: tl.constexpr,
    ROUND_FIRST: tl.constexpr,
):
    """One row for each program."""
    row = tl.program_id(0)
    column = tl.arange(0, PADDED)
    inside = column < COLUMNS
    wide = tl.load(x + row * row_stride + column, mask=inside, other=0.0).to(tl.float32)
    factor = offset + tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    wide = wide * tl.rsqrt(tl.sum(wide * wide, axis=0) / COLUMNS + eps)
    if ROUND_FIRST:
        wide = wide.to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * COLUMNS + column, (factor * wide).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _turn(
    x,
    cos,
    sin,
    out,
    DIM: tl.constexpr,
    ANGLES: tl.constexpr,
    WIDTH: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    REST_PADDED: tl.constexpr,
):
    """Rotate the first ``WIDTH`` elements of a head, and copy the others."""
    HALF: tl.constexpr = WIDTH // 2
    # Where the second element of a pair has its angle: it has one of its own, or shares that of the first.
    SECOND: tl.constexpr = HALF if ANGLES == WIDTH else 0
    pair = tl.arange(0, HALF_PADDED)
    inside = pair < HALF
    kind = out.dtype.element_ty
    first = tl.load(x + pair, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(x + HALF + pair, mask=inside, other=0.0).to(tl.float32)
    first_cos = tl.load(cos + pair, mask=inside, other=0.0).to(tl.float32)
    first_sin = tl.load(sin + pair, mask=inside, other=0.0).to(tl.float32)
    second_cos = tl.load(cos + SECOND + pair, mask=inside, other=0.0).to(tl.float32)
    second_sin = tl.load(sin + SECOND + pair, mask=inside, other=0.0).to(tl.float32)
    # Each product is rounded, as in the families' functions.
    low = (first * first_cos).to(kind).to(tl.float32) - (second * first_sin).to(kind).to(tl.float32)
    high = (second * second_cos).to(kind).to(tl.float32) + (first * second_sin).to(kind).to(tl.float32)
    tl.store(out + pair, low.to(kind), mask=inside)
    tl.store(out + HALF + pair, high.to(kind), mask=inside)
    if WIDTH < DIM:
        rest = WIDTH + tl.arange(0, REST_PADDED)
        tl.store(out + rest, tl.load(x + rest, mask=rest < DIM, other=0.0), mask=rest < DIM)


@triton.jit(do_not_specialize=["q_heads", "k_heads"])
def rotate(
    q,
    k,
    cos,
    sin,
    q_out,
    k_out,
    q_heads,
    k_heads,
    q_head,
    q_token,
    k_head,
    k_token,
    DIM: tl.constexpr,
    ANGLES: tl.constexpr,
    WIDTH: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    REST_PADDED: tl.constexpr,
):
    """Programs ``[q_heads + k_heads, tokens]``: one head of queries or of keys each."""
    head = tl.program_id(0)
    token = tl.program_id(1)
    cos += token * ANGLES
    sin += token * ANGLES
    if head < q_heads:
        x = q + head * q_head + token * q_token
        out = q_out + (token * q_heads + head) * DIM
        _turn(x, cos, sin, out, DIM, ANGLES, WIDTH, HALF_PADDED, REST_PADDED)
    else:
        head -= q_heads
        x = k + head * k_head + token * k_token
        out = k_out + (token * k_heads + head) * DIM
        _turn(x, cos, sin, out, DIM, ANGLES, WIDTH, HALF_PADDED, REST_PADDED)


@triton.jit
def route(
    logits,
    correction,
    weights,
    index,
    scale,
    EXPERTS: tl.constexpr,
    PADDED: tl.constexpr,
    CHOSEN: tl.constexpr,
    SCORING: tl.constexpr,
    CORRECTED: tl.constexpr,
    NORMALISE: tl.constexpr,
):
    """Experts of one token for each program, best first; of equal ranks the lower expert first.

    A rank that is no number comes first, as for torch. Chosen experts are distinct whatever the logits.
    """
    token = tl.program_id(0)
    expert = tl.arange(0, PADDED)
    inside = expert < EXPERTS
    score = tl.load(logits + token * EXPERTS + expert, mask=inside, other=float("-inf")).to(tl.float32)
    if SCORING == SOFTMAX:
        score = tl.exp(score - tl.max(score, axis=0))
        score = score / tl.sum(score, axis=0)
    elif SCORING == SIGMOID:
        score = 1.0 / (1.0 + tl.exp(-score))
    rank = score
    if CORRECTED:
        rank = score + tl.load(correction + expert, mask=inside, other=0.0).to(tl.float32)
    rank = tl.where(rank == rank, rank, float("inf"))
    # Both zeros are one number.
    bits = tl.where(rank == 0.0, 0.0, rank).to(tl.int32, bitcast=True)
    # Integers in the order of the ranks, and below them the experts, so that all are different.
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    key = order * 4294967296 + (PADDED - 1 - expert)
    LEAST: tl.constexpr = -9223372036854775808
    key = tl.where(inside, key, LEAST)
    place = tl.full([PADDED], -1, tl.int32)
    for turn in tl.static_range(CHOSEN):
        best = key == tl.max(key, axis=0)
        place = tl.where(best, turn, place)
        key = tl.where(best, LEAST, key)
    chosen = place >= 0
    if SCORING == SOFTMAX_CHOSEN:
        highest = tl.max(tl.where(chosen, score, float("-inf")), axis=0)
        power = tl.where(chosen, tl.exp(score - highest), 0.0)
        weight = power / tl.sum(power, axis=0)
    elif NORMALISE:
        weight = score / tl.sum(tl.where(chosen, score, 0.0), axis=0)
    else:
        weight = score
    to = token * CHOSEN + place
    tl.store(weights + to, (weight * scale).to(weights.dtype.element_ty), mask=chosen)
    tl.store(index + to, expert.to(tl.int64), mask=chosen)


@triton.jit
def request(
    index,
    weights,
    x,
    router,
    bias,
    correction,
    packed,
    PICKS: tl.constexpr,
    PICKS_PADDED: tl.constexpr,
    HIDDEN: tl.constexpr,
    COLUMNS: tl.constexpr,
    SCORES_AT: tl.constexpr,
    INPUTS_AT: tl.constexpr,
    FIRST: tl.constexpr,
    SCORES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SIGMOID_FIRST: tl.constexpr,
    CORRECTED: tl.constexpr,
):
    """One word of the scores of a place for each program, or none; the first program writes the rest, if
    ``FIRST``: what the router chose, and from ``INPUTS_AT`` on the inputs (-1: not them).
    """
    expert = tl.program_id(0)
    column = tl.arange(0, COLUMNS)
    if FIRST and expert == 0:
        pick = tl.arange(0, PICKS_PADDED)
        there = pick < PICKS
        tl.store(packed + pick, tl.load(index + pick, mask=there, other=0).to(tl.int32), mask=there)
        weight = tl.load(weights + pick, mask=there, other=0.0).to(tl.float32)
        tl.store(packed + PICKS + pick, weight.to(tl.int32, bitcast=True), mask=there)
        if INPUTS_AT >= 0:
            for first in range(0, HIDDEN, COLUMNS):
                inside = first + column < HIDDEN
                value = tl.load(x + first + column, mask=inside, other=0.0).to(tl.float32)
                to = packed + INPUTS_AT + first + column
                tl.store(to, value.to(tl.int32, bitcast=True), mask=inside)
    if SCORES:
        row = router + expert.to(tl.int64) * HIDDEN
        products = tl.zeros([COLUMNS], tl.float32)
        for first in range(0, HIDDEN, COLUMNS):
            inside = first + column < HIDDEN
            value = tl.load(x + first + column, mask=inside, other=0.0).to(tl.float32)
            products += value * tl.load(row + first + column, mask=inside, other=0.0)
        score = tl.sum(products, axis=0)
        if HAS_BIAS:
            score += tl.load(bias + expert)
        if SIGMOID_FIRST:
            score = 1.0 / (1.0 + tl.exp(-score))
        if CORRECTED:
            score += tl.load(correction + expert)
        tl.store(packed + SCORES_AT + expert, score.to(tl.int32, bitcast=True))
