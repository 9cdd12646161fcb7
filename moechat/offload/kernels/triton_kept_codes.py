"""Codes and scales of kept encodings in Triton: the values of a file, not quantised again.

The byte map is in ``native/src/kernels/layout/kept_encodings.h``. A group of 64 columns is cut into 2 or 4
sub-blocks, and a weight is ``step * code - min`` with a step and a min of its sub-block. Column ``4d + k`` of
a group is byte ``k`` of code dword ``d``, and dwords are cut into planes of 8, 4, 2 or 1 bits. A word of a
plane therefore has neighbouring columns, in the order of :func:`place_in_word`. Encodings with grids have
numbers in place of planes, see :mod:`moechat.offload.kernels.triton_kept_grids`.

Compile-time parameters ``TABLE`` to ``SHARED`` come from
:func:`moechat.offload.kernels.kept_form.kept_constants`.
"""

# Triton reads annotations as types of its own, and its functions are not functions to a type checker.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, operator, index"

import triton
import triton.language as tl

NO_TABLE = tl.constexpr(0)
IQ4 = tl.constexpr(1)
E2M1 = tl.constexpr(2)
FP8 = tl.constexpr(3)

# Kinds of scale words. Of encodings with grids each has one of its own, which tells the encoding, too.
IQ2_XXS = tl.constexpr(0)
IQ2_XS = tl.constexpr(1)
IQ2_S = tl.constexpr(2)
IQ3_XXS = tl.constexpr(3)
IQ3_S = tl.constexpr(4)
IQ1_S = tl.constexpr(5)
IQ1_M = tl.constexpr(6)
# From here on codes are in planes.
HALVES = tl.constexpr(7)
EXPONENTS = tl.constexpr(8)
SIGNED2 = tl.constexpr(9)
SIGNED4 = tl.constexpr(10)
E4M3 = tl.constexpr(11)
WHOLES = tl.constexpr(12)
# From here on sub-blocks have mins.
MINS = tl.constexpr(13)
FACTORS = tl.constexpr(14)
NIBBLES = tl.constexpr(15)
FLOATS = tl.constexpr(16)


@triton.jit
def _fp16(bits):
    """float32 of the fp16 patterns in the low halves of int32."""
    return (bits & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _signed(words, place):
    """float32 of the signed byte at bit ``place`` of int32."""
    return ((words << (24 - place)) >> 24).to(tl.float32)


@triton.jit
def _e4m3(patterns):
    """float32 of the e4m3 patterns in the low bytes of int32, 256 times smaller: as fp16."""
    return _fp16(((patterns & 0x7F) << 7) | ((patterns & 0x80) << 8))


@triton.jit
def kept_values(codes, table, TABLE: tl.constexpr, ZERO: tl.constexpr):
    """float32 values of codes int32, less the zero of the encoding; those of E2M1 twice as large, of FP8
    256 times smaller.

    All but those of FP8 are integers of at most 8 bits and a sign. ``table`` has the values of IQ4 codes.
    """
    if TABLE == IQ4:
        values = tl.load(table + codes)
    elif TABLE == E2M1:
        # The three low bits of E2M1 are exponent and mantissa: in the place of those of a float32, they are
        # its value times 2^-126, the subnormal 0.5 included.
        patterns = ((codes & 7) << 22) | ((codes & 8) << 28)
        values = patterns.to(tl.float32, bitcast=True) * (2.0**127)
    elif TABLE == FP8:
        values = _e4m3(codes)
    else:
        # In the mantissa of 2^23 a code becomes a float by an OR and a subtraction, both exact.
        values = (codes | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + ZERO)
    return values


@triton.jit
def place_in_word(column, WIDTH: tl.constexpr):
    """Lowest bit of a column of a plane of ``WIDTH`` bits, columns of a word counted from 0."""
    return 8 * (column % 4) + WIDTH * (column // 4)


@triton.jit
def super_of(first, tile, group, groups, lane, SUPERS: tl.constexpr, SHARED: tl.constexpr):
    """Points to the fp16 values of rows that ``SHARED`` groups of columns share.

    Args:
        first: Pointer to the super field, in fp16.
        groups: In a row.
    """
    blocks = (groups + SHARED - 1) // SHARED
    return first + ((tile * blocks + group // SHARED) * 16 + lane) * SUPERS


@triton.jit
def super_values(pointers, there, SUPERS: tl.constexpr, SCALES: tl.constexpr):
    """The values of the super field that scales of a kind need; zeros in place of those that there are not.

    float32 of the one or two fp16. In their place ``FLOATS`` has a scale word, int32, and ``E4M3`` a float32.

    Args:
        pointers: From :func:`super_of`.
        there: Which exist, of their shape.
    """
    second = tl.zeros(there.shape, dtype=tl.float32)
    if SUPERS == 0:
        first = tl.zeros(there.shape, dtype=tl.float32)
    elif SCALES == FLOATS:
        first = tl.load(pointers.to(tl.pointer_type(tl.int32)), mask=there, other=0)
    elif SCALES == E4M3:
        first = tl.load(pointers.to(tl.pointer_type(tl.float32)), mask=there, other=0.0)
    else:
        first = tl.load(pointers, mask=there, other=0.0).to(tl.float32)
        if SUPERS == 2:
            second = tl.load(pointers + 1, mask=there, other=0.0).to(tl.float32)
    return first, second


@triton.jit
def _odd_step(words, first, sub, SUPERS: tl.constexpr, SCALES: tl.constexpr):
    """Steps, float32, of sub-blocks of encodings with grids: a number of the file times an odd factor."""
    if SCALES == IQ2_XXS or SCALES == IQ3_XXS:
        factor = (words >> 28) & 15
    elif SCALES == IQ2_XS:
        factor = (words >> (4 * sub)) & 15
    elif SCALES == IQ2_S or SCALES == IQ3_S:
        factor = (words >> (16 + 4 * sub)) & 15
    elif SCALES == IQ1_S:
        factor = (words >> (12 + 16 * sub)) & 7
    else:
        tl.static_assert(SCALES == IQ1_M)
        factor = (words >> (3 * sub)) & 7
    UNIT: tl.constexpr = 1.0 if SCALES == IQ3_S else 0.25 if SCALES == IQ3_XXS else 0.125
    number = first if SUPERS else _fp16(words >> 16)
    return number * ((2 * factor + 1).to(tl.float32) * UNIT)


@triton.jit
def steps_of(words, first, second, sub, SUPERS: tl.constexpr, SCALES: tl.constexpr):
    """Steps and mins, float32, of sub-blocks.

    Args:
        words: int32 scale words; of encodings with grids those of ``triton_kept_grids.factor_words``.
        first: From :func:`super_values`, as ``second``.
        sub: Numbers of sub-blocks, which broadcast with ``words``.
    """
    if SCALES == FLOATS and SUPERS:
        words = tl.where(sub == 0, words, first)
    if SCALES == HALVES or SCALES == MINS:
        step = _fp16(words >> (16 * sub))
    elif SCALES == EXPONENTS:
        step = (((words >> (8 * sub)) & 255) << 23).to(tl.float32, bitcast=True)
    elif SCALES == FLOATS:
        # In the low byte the zero, above it a float32.
        step = (words & -256).to(tl.float32, bitcast=True)
    elif SCALES == E4M3:
        step = first * _e4m3(words >> (8 * sub))
    elif SCALES == WHOLES:
        step = words.to(tl.float32, bitcast=True) * 256.0
    elif SCALES == SIGNED2:
        step = _fp16(words >> 16) * _signed(words, 8 * sub)
    elif SCALES == SIGNED4:
        step = first * _signed(words, 8 * sub)
    elif SCALES == FACTORS:
        step = first * ((words >> (8 * sub)) & 255).to(tl.float32)
    elif SCALES == NIBBLES:
        step = first * ((words >> (8 * sub)) & 15).to(tl.float32)
    else:
        step = _odd_step(words, first, sub, SUPERS, SCALES)
    if SCALES == MINS:
        minimum = -tl.where(sub == 0, first, second)
    elif SCALES == FACTORS:
        minimum = second * ((words >> (16 + 8 * sub)) & 255).to(tl.float32)
    elif SCALES == NIBBLES:
        minimum = second * ((words >> (4 + 8 * sub)) & 15).to(tl.float32)
    elif SCALES == FLOATS:
        minimum = step * (words & 255).to(tl.float32)
    else:
        minimum = tl.zeros_like(step)
    return step, minimum
