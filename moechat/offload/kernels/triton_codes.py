"""Products of a few tokens with packed weights in Triton: two instructions a weight, and no conversions.

A code stays where it stands in its word. With the other bits masked out, the word is the pattern of a
subnormal float32, the code times a power of two, and a multiply-add takes it as it is: ``fma.rn.f32`` takes
subnormal numbers, at full speed on all GPUs since Fermi (NVIDIA, "Floating Point and IEEE 754
Compliance"; PTX ISA, ``fma``). Inputs are multiplied by a power of two before, a smaller one for codes that
stand higher, so that products are of ordinary size, and :data:`UNSCALED` undoes both. All of this is exact: a
sum is rounded as that of codes in float32 would be, for inputs below 2^60.

Axes are (token, group, row). A thread keeps whole groups of rows, so that it meets others only at the end.
"""

# Triton reads annotations as types of its own, and its functions are not functions to a type checker.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, operator, index, assignment"

import triton
import triton.language as tl

from moechat.offload.kernels.triton_scales import MOST_WORD_BITS

# Inputs are multiplied by 2^64; a code in the lowest bits of a word is a float32 of 2^-149 times its value.
INPUT_EXPONENT = tl.constexpr(64)
UNSCALED = tl.constexpr(2.0**85)


@triton.jit
def column_input(x, column, last, MASKED: tl.constexpr):
    """Inputs float32 ``[T, G, 1]`` of a column."""
    if MASKED:
        value = tl.load(x + column, mask=column < last, other=0.0)
    else:
        value = tl.load(x + column)
    return value.to(tl.float32)


@triton.jit
def packed_words(words, real, PARTLY: tl.constexpr):
    """One 32-bit word of each row, ``[1, G, R]``."""
    if PARTLY:
        packed = tl.load(words, mask=real, other=0)
    else:
        packed = tl.load(words)
    return packed


@triton.jit
def issue_loads():
    """Keeps the loads that come before ahead of everything after.

    The compiler would move each load down to its use, and a warp would wait for memory once for every word.
    It moves none over a barrier, which itself waits for no load.
    """
    tl.debug_barrier()


@triton.jit
def _codes(
    products,
    sums,
    x,
    last,
    packed,
    FIRST: tl.constexpr,
    BITS: tl.constexpr,
    EXPONENT: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Adds the columns of words, from ``FIRST`` on: to ``sums`` the inputs, to ``products`` those with codes,
    times 2^(``EXPONENT`` - 149).
    """
    HALF: tl.constexpr = 16 // BITS
    low = packed.to(tl.uint32, bitcast=True)
    high = low >> 16
    for column in tl.static_range(2 * HALF):
        value = column_input(x, FIRST + column, last, MASKED)
        sums += value
        code = (low if column < HALF else high) & (((1 << BITS) - 1) << (column % HALF * BITS))
        scaled = value * (2.0 ** (EXPONENT - column % HALF * BITS))
        products += scaled * code.to(tl.float32, bitcast=True)
    return products, sums


@triton.jit
def _high_codes(products, x, last, packed, FIRST: tl.constexpr, MASKED: tl.constexpr):
    """Adds to ``products`` what the high two bits of codes of 6 bits are worth, in a word of 16 columns from
    ``FIRST`` on; as :func:`_codes`.
    """
    low = packed.to(tl.uint32, bitcast=True)
    high = low >> 16
    for half in tl.static_range(2):
        for place in tl.static_range(0, 16, 2):
            column = half * 4 + place // 8 * 2 + place // 4 % 2 * 8 + place // 2 % 2
            value = column_input(x, FIRST + column, last, MASKED)
            code = (high if half else low) & (3 << place)
            scaled = value * (2.0 ** (INPUT_EXPONENT + 4 - place))
            products += scaled * code.to(tl.float32, bitcast=True)
    return products


@triton.jit
def _halves(products, x, last, packed, FIRST: tl.constexpr, FP16: tl.constexpr, MASKED: tl.constexpr):
    """Adds the products of two columns of 16-bit weights, from ``FIRST`` on."""
    for column in tl.static_range(2):
        if FP16:
            pattern = ((packed >> (16 * column)) & 0xFFFF).to(tl.int16)
            weight = pattern.to(tl.float16, bitcast=True).to(tl.float32)
        else:
            weight = ((packed << (16 - 16 * column)) & -65536).to(tl.float32, bitcast=True)
        products += column_input(x, FIRST + column, last, MASKED) * weight
    return products


@triton.jit
def _field(words, PLACE: tl.constexpr, MASK: tl.constexpr):
    """float32 of the bits ``MASK`` from ``PLACE`` on, times 2^PLACE; not for bits above the 22nd.

    Set into the mantissa of 2^23, they become a float by an OR and a subtraction, both exact.
    """
    return ((words & (MASK << PLACE)) | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0


@triton.jit
def plane_words(words, real, FIRST: tl.constexpr, COUNT: tl.constexpr, PARTLY: tl.constexpr):
    """``COUNT`` words of each row from word ``FIRST`` of a group on, a tuple of ``[1, G, R]``."""
    packed = (packed_words(words + FIRST * 16, real, PARTLY),)
    for step in tl.static_range(1, COUNT):
        packed = packed + (packed_words(words + (FIRST + step) * 16, real, PARTLY),)
    return packed


@triton.jit
def _half_words(words, real, HALF: tl.constexpr, BITS: tl.constexpr, PARTLY: tl.constexpr):
    """The words of half a group, of 6, 8 or 16 bits: ``BITS`` of each row, at 6 bits four with the low bits
    and two with the high ones.
    """
    if BITS == 6:
        low = plane_words(words, real, HALF * 4, 4, PARTLY)
        packed = low + plane_words(words, real, 8 + HALF * 2, 2, PARTLY)
    else:
        packed = plane_words(words, real, HALF * BITS, BITS, PARTLY)
    return packed


@triton.jit
def _narrow(x, last, packed, scales, BITS: tl.constexpr, MASKED: tl.constexpr):
    """Products ``[T, G, R]`` with the words of whole groups, of 2 to 4 bits."""
    CODES: tl.constexpr = 2 if BITS == 3 else BITS
    STEPS: tl.constexpr = CODES
    total = tl.zeros([x.shape[0], scales.shape[1], scales.shape[2]], dtype=tl.float32)
    for half in tl.static_range(2):
        products = tl.zeros_like(total)
        sums = tl.zeros([x.shape[0], x.shape[1], 1], dtype=tl.float32)
        for step in tl.static_range(STEPS):
            products, sums = _codes(
                products,
                sums,
                x,
                last,
                packed[half * STEPS + step],
                32 * half + step * (32 // CODES),
                CODES,
                INPUT_EXPONENT,
                MASKED,
            )
        if BITS == 3:
            products, _ = _codes(
                products, sums, x, last, packed[4 + half], 32 * half, 1, INPUT_EXPONENT + 2, MASKED
            )
        factor = _field(scales, 8 + 4 * half, 15)
        # Bits 16 to 23 are one too many for the mantissa.
        offset = _field(scales >> 16 if half else scales, 0, 255)
        total += products * (UNSCALED * 2.0 ** (-8 - 4 * half)) * factor
        total -= sums * offset
    return total * (((scales >> 4) & 0x0FF00000) + 0x33800000).to(tl.float32, bitcast=True)


@triton.jit
def _wide(
    products,
    sums,
    x,
    last,
    packed,
    FIRST: tl.constexpr,
    BITS: tl.constexpr,
    FP16: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Adds the products with the words of half a group, of 6, 8 or 16 bits, whose first column is
    ``FIRST``.
    """
    for step in tl.static_range(BITS):
        if BITS == 16:
            products = _halves(products, x, last, packed[step], FIRST + step * 2, FP16, MASKED)
        elif BITS == 6:
            if step < 4:
                products, sums = _codes(
                    products, sums, x, last, packed[step], FIRST + step * 8, 4, INPUT_EXPONENT, MASKED
                )
            else:
                products = _high_codes(products, x, last, packed[step], FIRST + (step - 4) * 16, MASKED)
        else:
            products, sums = _codes(
                products, sums, x, last, packed[step], FIRST + step * 4, 8, INPUT_EXPONENT, MASKED
            )
    return products, sums


@triton.jit
def _scaled(products, sums, sz, real, BITS: tl.constexpr, PARTLY: tl.constexpr):
    """Values of the products of :func:`_wide`."""
    if BITS < 16:
        scale = packed_words(sz, real, PARTLY).to(tl.float32)
        zero = packed_words(sz + 16, real, PARTLY).to(tl.float32)
        products = (products * UNSCALED - sums * zero) * scale
    return products


@triton.jit
def group_products(
    x,
    last,
    words,
    sz,
    real,
    BITS: tl.constexpr,
    FP16: tl.constexpr,
    MASKED: tl.constexpr,
    PARTLY: tl.constexpr,
):
    """Products float32 ``[T, G, R]`` of the inputs with one group of 64 columns of rows.

    Args:
        x: ``[T, G, 1]`` points to the first column of a group of each token.
        last: ``[1, G, 1]`` where the columns end, from there on.
        words: ``[1, G, R]`` points to the first word of a group of each row, in int32.
        sz: ``[1, G, R]`` points to the scale of each row: at 6 and 8 bits in fp16, 16 of them and 16
            zeros a tile; at 2 to 4, scale words.
        real: ``[1, 1, R]`` which rows there are.
        MASKED: Some columns are not there.
        PARTLY: Some rows are not there.
    """
    if BITS <= MOST_WORD_BITS:
        packed = plane_words(words, real, 0, 2 * BITS, PARTLY)
        scales = packed_words(sz, real, PARTLY)
        issue_loads()
        products = _narrow(x, last, packed, scales, BITS, MASKED)
    else:
        products = tl.zeros([x.shape[0], words.shape[1], words.shape[2]], dtype=tl.float32)
        sums = tl.zeros([x.shape[0], x.shape[1], 1], dtype=tl.float32)
        for half in tl.static_range(2):
            packed = _half_words(words, real, half, BITS, PARTLY)
            issue_loads()
            products, sums = _wide(products, sums, x, last, packed, 32 * half, BITS, FP16, MASKED)
        products = _scaled(products, sums, sz, real, BITS, PARTLY)
    return products


@triton.jit
def pair_products(
    x,
    last,
    words,
    sz,
    UP: tl.constexpr,
    UP_SZ: tl.constexpr,
    BITS: tl.constexpr,
    FP16: tl.constexpr,
    MASKED: tl.constexpr,
):
    """As :func:`group_products`, with two matrices: the second one's words and scales stand ``UP`` and
    ``UP_SZ`` elements after the first one's.
    """
    every = tl.full([1, 1, 1], True, tl.int1)
    if BITS <= MOST_WORD_BITS:
        first = plane_words(words, every, 0, 2 * BITS, False)
        second = plane_words(words + UP, every, 0, 2 * BITS, False)
        scales = tl.load(sz)
        others = tl.load(sz + UP_SZ)
        issue_loads()
        gate = _narrow(x, last, first, scales, BITS, MASKED)
        up = _narrow(x, last, second, others, BITS, MASKED)
    else:
        gate = tl.zeros([x.shape[0], words.shape[1], words.shape[2]], dtype=tl.float32)
        up = tl.zeros_like(gate)
        sums = tl.zeros([x.shape[0], x.shape[1], 1], dtype=tl.float32)
        for half in tl.static_range(2):
            first = _half_words(words, every, half, BITS, False)
            second = _half_words(words + UP, every, half, BITS, False)
            issue_loads()
            up, _ = _wide(up, sums, x, last, second, 32 * half, BITS, FP16, MASKED)
            gate, sums = _wide(gate, sums, x, last, first, 32 * half, BITS, FP16, MASKED)
        gate = _scaled(gate, sums, sz, every, BITS, False)
        up = _scaled(up, sums, sz + UP_SZ, every, BITS, False)
    return gate, up
