"""Triton kernels of a decoded token's choice of experts, and of the request that the host reads.

They compute in float32 and round where the families round. Launched by
:mod:`moechat.offload.kernels.routing`, which gives the shapes.
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
def _choice(
    logits,
    correction,
    scale,
    EXPERTS: tl.constexpr,
    PADDED: tl.constexpr,
    CHOSEN: tl.constexpr,
    SCORING: tl.constexpr,
    CORRECTED: tl.constexpr,
    NORMALISE: tl.constexpr,
):
    """Weight of each expert, and its place among the chosen ones, best first; -1: not chosen.

    Of equal ranks the lower expert comes first. A rank that is no number comes first, as for torch. Chosen
    experts are distinct whatever the logits.
    """
    expert = tl.arange(0, PADDED)
    inside = expert < EXPERTS
    score = tl.load(logits + expert, mask=inside, other=float("-inf")).to(tl.float32)
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
    return weight * scale, place


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
    """Experts of one token for each program, best first."""
    token = tl.program_id(0)
    weight, place = _choice(
        logits + token * EXPERTS, correction, scale, EXPERTS, PADDED, CHOSEN, SCORING, CORRECTED, NORMALISE
    )
    chosen = place >= 0
    to = token * CHOSEN + place
    tl.store(weights + to, weight.to(weights.dtype.element_ty), mask=chosen)
    tl.store(index + to, tl.arange(0, PADDED).to(tl.int64), mask=chosen)


@triton.jit
def _tell_inputs(x, packed, HIDDEN: tl.constexpr, COLUMNS: tl.constexpr, INPUTS_AT: tl.constexpr):
    """Write the bits of the inputs from ``INPUTS_AT`` on; -1: not at all."""
    column = tl.arange(0, COLUMNS)
    if INPUTS_AT >= 0:
        for first in range(0, HIDDEN, COLUMNS):
            inside = first + column < HIDDEN
            value = tl.load(x + first + column, mask=inside, other=0.0).to(tl.float32)
            to = packed + INPUTS_AT + first + column
            tl.store(to, value.to(tl.int32, bitcast=True), mask=inside)


@triton.jit
def _tell_score(
    x,
    router,
    bias,
    correction,
    packed,
    expert,
    HIDDEN: tl.constexpr,
    COLUMNS: tl.constexpr,
    SCORES_AT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SIGMOID_FIRST: tl.constexpr,
    CORRECTED: tl.constexpr,
):
    """Write the bits of the score of one expert of a later layer."""
    column = tl.arange(0, COLUMNS)
    row = router + expert.to(tl.int64) * HIDDEN
    sums = tl.zeros([COLUMNS], tl.float32)
    for first in range(0, HIDDEN, COLUMNS):
        inside = first + column < HIDDEN
        value = tl.load(x + first + column, mask=inside, other=0.0).to(tl.float32)
        sums += value * tl.load(row + first + column, mask=inside, other=0.0)
    score = tl.sum(sums, axis=0)
    if HAS_BIAS:
        score += tl.load(bias + expert)
    if SIGMOID_FIRST:
        score = 1.0 / (1.0 + tl.exp(-score))
    if CORRECTED:
        score += tl.load(correction + expert)
    tl.store(packed + SCORES_AT + expert, score.to(tl.int32, bitcast=True))


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
    if FIRST and expert == 0:
        pick = tl.arange(0, PICKS_PADDED)
        there = pick < PICKS
        tl.store(packed + pick, tl.load(index + pick, mask=there, other=0).to(tl.int32), mask=there)
        weight = tl.load(weights + pick, mask=there, other=0.0).to(tl.float32)
        tl.store(packed + PICKS + pick, weight.to(tl.int32, bitcast=True), mask=there)
        _tell_inputs(x, packed, HIDDEN, COLUMNS, INPUTS_AT)
    if SCORES:
        _tell_score(
            x, router, bias, correction, packed, expert, HIDDEN, COLUMNS, SCORES_AT, HAS_BIAS,
            SIGMOID_FIRST, CORRECTED,
        )  # fmt: skip


@triton.jit
def routed_request(
    logits,
    own_correction,
    scale,
    x,
    router,
    bias,
    correction,
    packed,
    EXPERTS: tl.constexpr,
    PADDED: tl.constexpr,
    PICKS: tl.constexpr,
    SCORING: tl.constexpr,
    OWN_CORRECTED: tl.constexpr,
    NORMALISE: tl.constexpr,
    WEIGHTS: tl.constexpr,
    HIDDEN: tl.constexpr,
    COLUMNS: tl.constexpr,
    SCORES_AT: tl.constexpr,
    INPUTS_AT: tl.constexpr,
    SCORES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SIGMOID_FIRST: tl.constexpr,
    CORRECTED: tl.constexpr,
):
    """:func:`route` of one token and the first :func:`request` of its layer, whose weights are rounded to the
    type ``WEIGHTS``.
    """
    expert = tl.program_id(0)
    if expert == 0:
        weight, place = _choice(
            logits, own_correction, scale, EXPERTS, PADDED, PICKS, SCORING, OWN_CORRECTED, NORMALISE
        )
        chosen = place >= 0
        tl.store(packed + place, tl.arange(0, PADDED), mask=chosen)
        rounded = weight.to(WEIGHTS).to(tl.float32)
        tl.store(packed + PICKS + place, rounded.to(tl.int32, bitcast=True), mask=chosen)
        _tell_inputs(x, packed, HIDDEN, COLUMNS, INPUTS_AT)
    if SCORES:
        _tell_score(
            x, router, bias, correction, packed, expert, HIDDEN, COLUMNS, SCORES_AT, HAS_BIAS,
            SIGMOID_FIRST, CORRECTED,
        )  # fmt: skip
