"""Triton kernels of the small steps between a decoded token's products: norm and rotation.

Each does in one launch what takes torch about ten. They compute in float32 and round where the families
round. Launched by :mod:`moechat.offload.kernels.steps`, which gives the shapes.

Strides are specialised as usual: only rows known to be aligned are read 16 bytes at a time, and a model has
few strides.
"""

# Triton reads annotations as types of its own, and its functions are not functions to a type checker.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, operator, index"

import triton
import triton.language as tl


@triton.jit
def rms_norm(
    x,
    added,
    weight,
    total,
    out,
    row_stride,
    eps,
    offset,
    COLUMNS: tl.constexpr,
    PADDED: tl.constexpr,
    ROUND_FIRST: tl.constexpr,
    ADDS: tl.constexpr,
):
    """One row for each program. If ``ADDS``, of ``x + added``, rows without gaps, which go to ``total``."""
    row = tl.program_id(0)
    column = tl.arange(0, PADDED)
    inside = column < COLUMNS
    wide = tl.load(x + row * row_stride + column, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        wide += tl.load(added + row * COLUMNS + column, mask=inside, other=0.0).to(tl.float32)
        rounded = wide.to(total.dtype.element_ty)
        tl.store(total + row * COLUMNS + column, rounded, mask=inside)
        wide = rounded.to(tl.float32)
    factor = offset + tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    wide = wide * tl.rsqrt(tl.sum(wide * wide, axis=0) / COLUMNS + eps)
    if ROUND_FIRST:
        wide = wide.to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * COLUMNS + column, (factor * wide).to(out.dtype.element_ty), mask=inside)


@triton.jit
def turned(
    x,
    weight,
    cos,
    sin,
    out,
    eps,
    offset,
    DIM: tl.constexpr,
    ANGLES: tl.constexpr,
    WIDTH: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    REST_PADDED: tl.constexpr,
    NORMED: tl.constexpr,
    ROUND_FIRST: tl.constexpr,
    NEIGHBOURS: tl.constexpr = False,
):
    """One head, normed if ``NORMED``; its first ``WIDTH`` elements are rotated, the others copied.

    If ``NEIGHBOURS``, a pair's elements lie side by side in ``x``; their weights are not given then.
    """
    HALF: tl.constexpr = WIDTH // 2
    # Where the second element of a pair has its angle: it has one of its own, or shares that of the first.
    SECOND: tl.constexpr = HALF if ANGLES == WIDTH else 0
    pair = tl.arange(0, HALF_PADDED)
    inside = pair < HALF
    rest = WIDTH + tl.arange(0, REST_PADDED)
    behind = rest < DIM
    kind = out.dtype.element_ty
    if NEIGHBOURS:
        first = tl.load(x + 2 * pair, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(x + 2 * pair + 1, mask=inside, other=0.0).to(tl.float32)
    else:
        first = tl.load(x + pair, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(x + HALF + pair, mask=inside, other=0.0).to(tl.float32)
    others = tl.load(x + rest, mask=behind, other=0.0).to(tl.float32)
    if NORMED:
        squares = tl.sum(first * first + second * second, axis=0) + tl.sum(others * others, axis=0)
        factor = tl.rsqrt(squares / DIM + eps)
        first = _scaled(first * factor, weight + pair, offset, inside, kind, ROUND_FIRST)
        second = _scaled(second * factor, weight + HALF + pair, offset, inside, kind, ROUND_FIRST)
        others = _scaled(others * factor, weight + rest, offset, behind, kind, ROUND_FIRST)
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
        tl.store(out + rest, others.to(kind), mask=behind)


@triton.jit
def _scaled(x, weight, offset, inside, kind: tl.constexpr, ROUND_FIRST: tl.constexpr):
    """Normed elements times the weights, rounded as the norm's module rounds them."""
    if ROUND_FIRST:
        x = x.to(kind).to(tl.float32)
    factor = offset + tl.load(weight, mask=inside, other=0.0).to(tl.float32)
    return (factor * x).to(kind).to(tl.float32)


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
    NEIGHBOURS: tl.constexpr,
):
    """Programs ``[q_heads + k_heads, tokens]``: one head of queries or of keys each."""
    head = tl.program_id(0)
    token = tl.program_id(1)
    cos += token * ANGLES
    sin += token * ANGLES
    if head < q_heads:
        x = q + head * q_head + token * q_token
        out = q_out + (token * q_heads + head) * DIM
        turned(
            x, x, cos, sin, out, 0.0, 0.0, DIM, ANGLES, WIDTH, HALF_PADDED, REST_PADDED, False, False,
            NEIGHBOURS,
        )  # fmt: skip
    else:
        head -= q_heads
        x = k + head * k_head + token * k_token
        out = k_out + (token * k_heads + head) * DIM
        turned(
            x, x, cos, sin, out, 0.0, 0.0, DIM, ANGLES, WIDTH, HALF_PADDED, REST_PADDED, False, False,
            NEIGHBOURS,
        )  # fmt: skip
