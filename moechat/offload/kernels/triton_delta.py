"""Triton kernels of linear attention by the gated delta rule, for one token.

They compute in float32 and round where the families round. Launched by
:mod:`moechat.offload.kernels.gated_delta`, which gives the shapes; the formulas are in
:mod:`moechat.models.decode.gated_delta`.
"""

# Triton reads annotations as types of its own, and its functions are not functions to a type checker.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, operator, index"

import triton
import triton.language as tl


@triton.jit
def convolved(
    mixed,
    taps,
    before,
    out,
    q_start,
    q_stride,
    k_start,
    k_stride,
    v_start,
    v_stride,
    K_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    TAPS: tl.constexpr,
    PADDED: tl.constexpr,
    TAPS_PADDED: tl.constexpr,
):
    """Convolution of queries, keys and values over the last tokens, which move on by one.

    Program: a head of queries, of keys, or of values, in this order.
    """
    head = tl.program_id(0)
    element = tl.arange(0, PADDED)
    if head < 2 * K_HEADS:
        dim = K_DIM
        channel = head * K_DIM
        if head < K_HEADS:
            source = q_start + head * q_stride
        else:
            source = k_start + (head - K_HEADS) * k_stride
    else:
        dim = V_DIM
        value = head - 2 * K_HEADS
        channel = 2 * K_HEADS * K_DIM + value * V_DIM
        source = v_start + value // GROUP * v_stride + value % GROUP * V_DIM
    inside = element < dim
    x = tl.load(mixed + source + element, mask=inside, other=0.0)
    tap = tl.arange(0, TAPS_PADDED)
    place = (channel + element)[:, None] * TAPS + tap[None, :]
    # The tokens before it, one place on; the new one comes last.
    earlier = inside[:, None] & (tap < TAPS - 1)[None, :]
    window = tl.load(before + place + 1, mask=earlier, other=0.0)
    window = tl.where((tap == TAPS - 1)[None, :], x[:, None].to(window.dtype), window)
    known = inside[:, None] & (tap < TAPS)[None, :]
    weights = tl.load(taps + place, mask=known, other=0.0).to(tl.float32)
    total = tl.sum(window.to(tl.float32) * weights, axis=1).to(out.dtype.element_ty).to(tl.float32)
    # Every thread has read its window before the first of them overwrites it.
    tl.debug_barrier()
    tl.store(before + place, window, mask=known)
    tl.store(out + channel + element, (total / (1.0 + tl.exp(-total))).to(out.dtype.element_ty), mask=inside)


@triton.jit
def ruled(
    mixed,
    beta,
    decay,
    log_rates,
    biases,
    state,
    out,
    beta_start,
    beta_stride,
    decay_start,
    decay_stride,
    scale,
    eps,
    K_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    K_PADDED: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The delta rule. Program (head of values, some columns of its state)."""
    value = tl.program_id(0)
    head = value // GROUP
    row = tl.arange(0, K_PADDED)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    rows, columns = row < K_DIM, column < V_DIM
    q = tl.load(mixed + head * K_DIM + row, mask=rows, other=0.0).to(tl.float32)
    k = tl.load(mixed + (K_HEADS + head) * K_DIM + row, mask=rows, other=0.0).to(tl.float32)
    v = tl.load(mixed + 2 * K_HEADS * K_DIM + value * V_DIM + column, mask=columns, other=0.0).to(tl.float32)
    q = q * tl.rsqrt(tl.sum(q * q, axis=0) + eps) * scale
    k = k * tl.rsqrt(tl.sum(k * k, axis=0) + eps)
    place = head * beta_stride + value % GROUP
    kind = beta.dtype.element_ty
    b = tl.load(beta + beta_start + place).to(tl.float32)
    b = (1.0 / (1.0 + tl.exp(-b))).to(kind).to(tl.float32)
    place = head * decay_stride + value % GROUP
    a = tl.load(decay + decay_start + place).to(tl.float32) + tl.load(biases + value).to(tl.float32)
    # Beyond 20 torch's softplus returns its argument; so does this one, but for rounding.
    soft = tl.maximum(a, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(a)))
    kept = tl.exp(-tl.exp(tl.load(log_rates + value).to(tl.float32)) * soft)
    there = rows[:, None] & columns[None, :]
    place = value.to(tl.int64) * (K_DIM * V_DIM) + row[:, None] * V_DIM + column[None, :]
    s = tl.load(state + place, mask=there, other=0.0) * kept
    change = (v - tl.sum(s * k[:, None], axis=0)) * b
    s += k[:, None] * change[None, :]
    tl.store(state + place, s, mask=there)
    total = tl.sum(s * q[:, None], axis=0)
    tl.store(out + value * V_DIM + column, total.to(out.dtype.element_ty), mask=columns)


@triton.jit
def gated_norm(
    x,
    gate,
    weight,
    out,
    gate_start,
    gate_stride,
    eps,
    GROUP: tl.constexpr,
    V_DIM: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Norm of a head of values, times its activated gate. Program: a head."""
    value = tl.program_id(0)
    element = tl.arange(0, PADDED)
    inside = element < V_DIM
    wide = tl.load(x + value * V_DIM + element, mask=inside, other=0.0).to(tl.float32)
    wide = wide * tl.rsqrt(tl.sum(wide * wide, axis=0) / V_DIM + eps)
    kind = out.dtype.element_ty
    factor = tl.load(weight + element, mask=inside, other=0.0).to(tl.float32)
    normed = (factor * wide.to(kind).to(tl.float32)).to(kind).to(tl.float32)
    place = gate_start + value // GROUP * gate_stride + value % GROUP * V_DIM + element
    z = tl.load(gate + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + value * V_DIM + element, (normed * (z / (1.0 + tl.exp(-z)))).to(kind), mask=inside)
