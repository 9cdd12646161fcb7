"""Codes of encodings with grids, IQ1 to IQ3, in Triton: numbers choose them from a table.

The byte map is in ``native/src/kernels/layout/kept_encodings.h``. A number stands for 8 neighbouring columns,
in IQ3 for 4. The functions here make code dwords of them: byte ``k`` of dword ``d`` is the code of column
``4d + k`` of a group, its sign or delta included. They are what a plane of 8 bits would hold, and kernels go
on with them as with Q8_0.

``SCALES`` tells the encoding. *Half*: 32 columns, 8 dwords; *run*: 8 columns, two dwords. Dwords, runs and
halves are counted in a group.
"""

# Triton reads annotations as types of its own, and its functions are not functions to a type checker.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, operator, index, assignment"

import triton
import triton.language as tl

from moechat.offload.kernels.triton_kept_codes import (
    HALVES,
    IQ1_M,
    IQ1_S,
    IQ2_S,
    IQ2_XS,
    IQ2_XXS,
    IQ3_S,
    IQ3_XXS,
)

# Dwords of the table of :func:`moechat.offload.kernels.kept_form.value_table`.
TABLE_DWORDS = 8464


@triton.constexpr_function
def grid_place(scales):
    """First dword of an encoding's grid in the table; both of IQ1 have one."""
    return (16, 528, 1552, 3600, 3856, 4368, 4368)[scales]


@triton.constexpr_function
def _number_steps(scales):
    """Steps of a group that have numbers, or at least their low 8 bits."""
    return (2, 4, 2, 4, 4, 2, 2)[scales]


@triton.constexpr_function
def grid_steps(scales):
    """Steps of the q of a group; after the numbers come those with signs or deltas."""
    return _number_steps(scales) + (1, 0, 2, 1, 2, 0, 1)[scales]


@triton.constexpr_function
def group_words(first, second, scales):
    """int32 words of the q of a (tile, group), for codes in planes or with a grid."""
    return 16 * grid_steps(scales) if scales < HALVES else 32 * (first + second)


@triton.constexpr_function
def _of_four(scales):
    """Whether a number stands for 4 columns, not 8."""
    return scales in (IQ3_XXS, IQ3_S)


@triton.constexpr_function
def _signs_beside_factors(scales):
    """Whether the signs of a half are 7 bits for each run, in one word with the factor: of half 0 in a step,
    of half 1 the scale word.
    """
    return scales in (IQ2_XXS, IQ3_XXS)


@triton.jit
def _number(low, signs, scale, dword, SCALES: tl.constexpr):
    """Numbers, int32, that choose code dwords; arguments are those of :func:`_with_signs`."""
    run = dword // 2
    if SCALES == IQ2_XS:
        number = (low >> (16 * (run % 2))) & 511
    else:
        which = dword if _of_four(SCALES) else run
        number = (low >> (8 * (which % 4))) & 255
        if SCALES == IQ2_S:
            number |= ((scale >> (2 * run)) & 3) << 8
        elif SCALES == IQ3_S:
            number |= ((scale >> dword) & 1) << 8
        elif SCALES == IQ1_S:
            number |= ((scale >> (16 * (dword // 8) + 3 * (run % 4))) & 7) << 8
        elif SCALES == IQ1_M:
            number |= ((signs >> (4 * run)) & 7) << 8
    return number


@triton.jit
def _with_signs(entries, low, signs, scale, dword, SCALES: tl.constexpr):
    """Code dwords, int32, from those of the grid.

    Args:
        entries: Code dwords as the grid has them.
        low: Words that have the numbers, or their low 8 bits.
        signs: Words that have the signs, or deltas; see :func:`_sign_words`.
        scale: Scale words.
        dword: Their places in a group.
    """
    run = dword // 2
    if SCALES == IQ1_S or SCALES == IQ1_M:
        place = 16 * (dword // 8) + 15 if SCALES == IQ1_S else 4 * run + 3
        # Codes are at least 2, so no byte borrows from the next one.
        codes = entries - ((signs >> place) & 1) * 0x02020202
    else:
        if SCALES == IQ2_S or SCALES == IQ3_S:
            bits = signs >> (8 * (run % 4))
        else:
            if SCALES == IQ2_XS:
                seven = (low >> (16 * (run % 2) + 9)) & 127
            else:
                seven = (signs >> (7 * (run % 4))) & 127
            # The eighth makes the number of set bits even: 0x6996 has the parities of 4 bits.
            odd = (0x6996 >> ((seven ^ (seven >> 4)) & 15)) & 1
            bits = seven | (odd << 7)
        four = (bits >> (4 * (dword % 2))) & 15
        # One in each byte whose column has a sign. There 64 + v becomes 64 - v, by inversion of the low 7
        # bits and an addition that no byte carries.
        ones = (four * 0x00204081) & 0x01010101
        codes = (entries ^ (ones * 127)) + ones
    return codes


@triton.jit
def _sign_words(words, scale, half, there, SCALES: tl.constexpr):
    """Words that have the signs of halves, or the deltas: of a step, or scale words.

    Args:
        words: Points to the first word of a group of rows, in int32.
        scale: Scale words of the same rows.
        half: 0 or 1; of shapes that broadcast with ``words``.
        there: Which rows there are.
    """
    STEP: tl.constexpr = _number_steps(SCALES)
    if _signs_beside_factors(SCALES):
        signs = tl.where(half == 0, tl.load(words + STEP * 16, mask=there, other=0), scale)
    elif SCALES == IQ2_S or SCALES == IQ3_S:
        signs = tl.load(words + (STEP + half) * 16, mask=there, other=0)
    elif SCALES == IQ1_M:
        signs = tl.load(words + STEP * 16, mask=there, other=0)
    else:
        signs = scale
    return signs


@triton.jit
def factor_words(words, scale, half, there, SCALES: tl.constexpr):
    """Words that have the factors of halves' sub-blocks, for ``steps_of``; as :func:`_sign_words`."""
    if _signs_beside_factors(SCALES):
        factors = _sign_words(words, scale, half, there, SCALES)
    else:
        factors = scale
    return factors


@triton.jit
def grid_codes(words, scale, dword, there, table, SCALES: tl.constexpr):
    """Code dwords ``dword``, int32, which broadcast with ``words``; as :func:`_sign_words`."""
    PER: tl.constexpr = 16 // _number_steps(SCALES)
    low = tl.load(words + dword // PER * 16, mask=there, other=0)
    signs = _sign_words(words, scale, dword // 8, there, SCALES)
    number = _number(low, signs, scale, dword, SCALES)
    place = number if _of_four(SCALES) else 2 * number + dword % 2
    entries = tl.load(table.to(tl.pointer_type(tl.int32)) + grid_place(SCALES) + place)
    return _with_signs(entries, low, signs, scale, dword, SCALES)


@triton.jit
def half_codes(words, scale, table, HALF: tl.constexpr, SCALES: tl.constexpr):
    """Code dwords of a half, a tuple of 8, and the words that have its factors.

    Args:
        words: Those of all steps of a group, a tuple of int32 tensors of one shape.
        scale: Scale words, of their shape.
        table: See :func:`moechat.offload.kernels.kept_form.value_table`.
    """
    STEPS: tl.constexpr = _number_steps(SCALES)
    if (_signs_beside_factors(SCALES) and HALF == 0) or SCALES == IQ1_M:
        signs = words[STEPS]
    elif SCALES == IQ2_S or SCALES == IQ3_S:
        signs = words[STEPS + HALF]
    else:
        signs = scale
    codes = ()
    for run in tl.static_range(4 * HALF, 4 * HALF + 4):
        low = words[run * STEPS // 8]
        if _of_four(SCALES):
            grid = table.to(tl.pointer_type(tl.int32)) + grid_place(SCALES)
            one = tl.load(grid + _number(low, signs, scale, 2 * run, SCALES))
            two = tl.load(grid + _number(low, signs, scale, 2 * run + 1, SCALES))
        else:
            # Both dwords of a number with one load.
            grid = (table + grid_place(SCALES)).to(tl.pointer_type(tl.int64))
            both = tl.load(grid + _number(low, signs, scale, 2 * run, SCALES))
            one = both.to(tl.int32)
            two = (both >> 32).to(tl.int32)
        one = _with_signs(one, low, signs, scale, 2 * run, SCALES)
        two = _with_signs(two, low, signs, scale, 2 * run + 1, SCALES)
        codes = codes + (one, two)
    if _signs_beside_factors(SCALES):
        factors = signs
    else:
        factors = scale
    return codes, factors
