"""Scale words of weights of 2 to 4 bits in Triton; see ``native/src/kernels/layout/block_layout.h``.

A weight is ``(code * factor - offset) * step``, with a factor and an offset for each half of a group.
"""

# Triton reads annotations as types of its own, and its functions are not functions to a type checker.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, operator, index"

import triton
import triton.language as tl

# Weights of more bits have a scale and a zero in fp16 in place of scale words, those of 16 bits neither.
MOST_WORD_BITS = tl.constexpr(4)


@triton.jit
def step_of(words):
    """Steps in float32 of scale words int32."""
    return (((words >> 4) & 0x0FF00000) + 0x33800000).to(tl.float32, bitcast=True)


@triton.jit
def factor_of(words, half):
    """Factors int32 of a half, 0 or 1."""
    return (words >> (8 + 4 * half)) & 15


@triton.jit
def offset_of(words, half):
    """Offsets int32 of a half, 0 or 1."""
    return (words >> (16 * half)) & 255
