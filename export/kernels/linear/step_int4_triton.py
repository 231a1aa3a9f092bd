# mypy: allow-untyped-defs
"""Four-bit weights in the tiles of `step_tiles_triton`: the inputs that a word's nibbles multiply, and products in float32.

Words. The layout is that of formats/int4.py. A span is eight 32-bit words. Word `j` holds the elements `4 j` to `4 j + 3` in
its nibbles 0, 2, 4, 6, and the elements 32 places behind these in its nibbles 1, 3, 5, 7.

From a nibble to a number. A nibble q that is masked out of its word and read as the bits of a float32 is the number
q 2^(p - 149), where p is the place of its lowest bit. Subnormal numbers and those of the first exponent are evenly spaced, so
this holds up to bit 23. The input is multiplied by 2^(SHIFT - p) beforehand, and the sum by 2^(149 - SHIFT) afterwards; both
are exact. So a nibble costs an AND and a multiply-add. At the memory's full speed a multiprocessor receives 37 nibbles per
clock and can issue on 128 lanes: too few lanes to extract and convert each nibble. With SHIFT = 80 inputs may be as large as
2^47, and the part of an input that is lost is below 2^-69.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .scales_triton import of_pair
from .step_fixed_point_triton import fixed_point, input_sums, multiply_halves, multiply_words

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
SHIFT = tl.constexpr(80)
# The place of each nibble's lowest bit: in its word or, from nibble 3 on, in the word shifted right by 8. Nibble 2 in the
# shifted word would cost a shift of its own.
PLACES = tl.constexpr((0, 4, 8, 4, 8, 12, 16, 20))


@triton.jit
def first_fours(word):
    """Index, in fours, of the four neighbouring inputs that a word's low nibbles multiply. For its high nibbles add 8."""
    return word // 8 * 16 + word % 8


@triton.jit
def load_eights(vector, low, inside):
    """The inputs that nibbles 0 to 7 of words multiply: eight float32 tiles, zeros where not `inside`.

    low: result of `first_fours`.
    """
    if vector.dtype.element_ty == tl.bfloat16:
        # As `load_fours`, but with both loads ahead of what is done with them.
        fours = vector.to(tl.pointer_type(tl.int64))
        low_bits = tl.load(fours + low, mask=inside, other=0)
        high_bits = tl.load(fours + low + 8, mask=inside, other=0)
        x0, x2 = two_floats(low_bits.to(tl.int32))
        x4, x6 = two_floats((low_bits >> 32).to(tl.int32))
        x1, x3 = two_floats(high_bits.to(tl.int32))
        x5, x7 = two_floats((high_bits >> 32).to(tl.int32))
    else:
        x0, x2, x4, x6 = load_fours(vector, low, inside)
        x1, x3, x5, x7 = load_fours(vector, low + 8, inside)
    return x0, x1, x2, x3, x4, x5, x6, x7


@triton.jit
def load_fours(vector, four, inside):
    """Elements 4 i to 4 i + 3 of a vector for each i in `four`: four float32 tiles of the shape of `four`."""
    if vector.dtype.element_ty == tl.bfloat16:
        # Four at once, in 64 bits.
        bits = tl.load(vector.to(tl.pointer_type(tl.int64)) + four, mask=inside, other=0)
        x0, x1 = two_floats(bits.to(tl.int32))
        x2, x3 = two_floats((bits >> 32).to(tl.int32))
    else:
        first = vector + four * 4
        x0 = tl.load(first, mask=inside, other=0.0)
        x1 = tl.load(first + 1, mask=inside, other=0.0)
        x2 = tl.load(first + 2, mask=inside, other=0.0)
        x3 = tl.load(first + 3, mask=inside, other=0.0)
    return x0, x1, x2, x3


@triton.jit
def load_constant_eights(floats, low, inside):
    """`load_eights` of a constant float32 vector; arbitrary where not `inside`."""
    x0, x2, x4, x6 = load_constant_fours(floats, low, inside)
    x1, x3, x5, x7 = load_constant_fours(floats, low + 8, inside)
    return x0, x1, x2, x3, x4, x5, x6, x7


@triton.jit
def load_constant_fours(floats, four, inside):
    """`load_fours`, 16 bytes at a time, for data aligned to 16 bytes that no kernel writes; arbitrary where not `inside`.

    The compiler joins only loads of the same tile: each of the four loads would touch every cache line. If the assembly were
    not pure, torch would assume that the kernel writes every argument. As `ld.global.nc` the load would be moved down to its
    use, behind the wait.
    """
    if INTERPRETED:
        w0, w1, w2, w3 = load_fours(floats, four, inside)
    else:
        w0, w1, w2, w3 = tl.inline_asm_elementwise(
            "ld.global.v4.f32 {$0, $1, $2, $3}, [$4];",
            "=f,=f,=f,=f,l",
            [(floats + tl.where(inside, four, 0) * 4).to(tl.int64)],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )
    return w0, w1, w2, w3


@triton.jit
def two_floats(bits):
    """The two bfloat16 numbers in an int32 as float32, the lower half first: a bfloat16 is the upper half of its float32."""
    return (bits << 16).to(tl.float32, bitcast=True), (bits & -0x10000).to(tl.float32, bitcast=True)


@triton.jit
def multiply_int4(
    sums,
    tile,
    x,
    factor,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    INTEGER: tl.constexpr,
    SCALE: tl.constexpr,
    MINIMUM: tl.constexpr,
):
    """Add words times x (eight tiles) times `factor` ([LANES] or 1) to the rows' sums, [LANES] each.

    With INTEGER the products are in fixed point, for inputs that had 8 bits (bfloat16); else they are in float32. With
    MINIMUM a nibble stores q, not q + 8, and the groups have minima. A lane's minima multiply the sums of its inputs, which
    are the same for all rows.
    """
    words, scales, minima = tile
    if INTEGER:
        pairs, lane_scale = fixed_point(x, GROUP > 32)
        low_sum, high_sum = input_sums(pairs)
        # Sums start from what the nibbles' 8s add, negated.
        low_start, high_start = low_sum * (0 if MINIMUM else -8), high_sum * (0 if MINIMUM else -128)
        start = low_sum * -128 + high_sum * -136
        factor *= lane_scale
    else:
        nibbles, low, high = coefficients(x, GROUP, MINIMUM)
    if MINIMUM:
        if INTEGER:
            low_inputs, high_inputs = low_sum.to(tl.float32), high_sum.to(tl.float32)
        else:
            low_inputs, high_inputs = sum_four(x[0] + x[2] + x[4] + x[6]), sum_four(x[1] + x[3] + x[5] + x[7])
    added = ()
    for row in tl.static_range(ROWS):
        if GROUP == 32:
            scale, high_scale = of_pair(scales[row], False, SCALE), of_pair(scales[row], True, SCALE)
        else:
            scale = scales[row].to(tl.float32)
            high_scale = scale
        if INTEGER:
            if GROUP == 32:
                low_sum, high_sum = multiply_halves(words[row], pairs, low_start, high_start)
                product = low_sum.to(tl.float32) * scale + high_sum.to(tl.float32) * (high_scale * 2.0**-4)
            else:
                product = multiply_words(words[row], pairs, start).to(tl.float32) * (scale * factor * 2.0**-4)
        else:
            scale *= 2.0 ** (149 - SHIFT)
            high_scale *= 2.0 ** (149 - SHIFT)
            product = multiply_row(words[row], nibbles, low, high, scale, high_scale, GROUP)
        if MINIMUM:
            product += low_inputs * of_pair(minima[row], False, SCALE) + high_inputs * of_pair(minima[row], True, SCALE)
        # With one scale per lane, fixed point has the factor in it.
        if not INTEGER or GROUP == 32:
            product *= factor
        # Triton does not take a starred expression.
        added = added + (sums[row] + product,)  # type: ignore[assignment]  # noqa: RUF005
    return added


@triton.jit
def coefficients(x, GROUP: tl.constexpr, MINIMUM: tl.constexpr):
    """The factors of `multiply_row`, eight tiles of x times powers of two, and the two tiles from which its sums start.

    In groups of 64 and more, nibble 7 is not masked out: the shifted word is multiplied whole, with nibbles 2 to 7 in its 24
    bits. So the factor of nibble 7 is subtracted from the factors of nibbles 2 to 6. A nibble stores q + 8. The start
    subtracts the 8s, word by word, so that no large numbers cancel. In groups of 32 the low nibbles have one start, and the
    high nibbles another. With MINIMUM a nibble stores q, and the starts are zeros.
    """
    last = x[7] * 2.0 ** (SHIFT - PLACES[7])
    nibbles = ()
    low = tl.zeros(last.shape, tl.float32)
    high = tl.zeros(last.shape, tl.float32)
    for i in tl.static_range(8):
        scaled = x[i] * 2.0 ** (SHIFT - PLACES[i])
        if not MINIMUM:
            if i % 2 == 0:
                low += scaled * (-8.0 * 2.0 ** (PLACES[i] - 149))
            else:
                high += scaled * (-8.0 * 2.0 ** (PLACES[i] - 149))
        if GROUP > 32 and i == 2:
            scaled -= last * 2.0**-8
        elif GROUP > 32 and i > 2 and i < 7:
            scaled -= last
        nibbles = nibbles + (scaled,)  # type: ignore[assignment]  # noqa: RUF005
    if GROUP > 32:
        low += high
    return nibbles, low, high


@triton.jit
def multiply_row(words, nibbles, low, high, scale, high_scale, GROUP: tl.constexpr):
    """Each lane's sum over its words of weight times input times `scale`: [LANES].

    Sums of products are too large by 2^(SHIFT - 149); the scales remove this factor.
    """
    # A nibble masked out of its word is a float32: see the top of the file.
    shifted = words >> 8
    if GROUP > 32:
        low += shifted.to(tl.float32, bitcast=True) * nibbles[7]
        for i in tl.static_range(3):
            low += masked(words, i) * nibbles[i]
        for i in tl.static_range(3, 7):
            low += masked(shifted, i) * nibbles[i]
        return sum_four(low) * scale
    for i in tl.static_range(0, 8, 2):
        low += masked(words if i < 3 else shifted, i) * nibbles[i]
        high += masked(words if i + 1 < 3 else shifted, i + 1) * nibbles[i + 1]
    return sum_four(low) * scale + sum_four(high) * high_scale


@triton.jit
def masked(words, NIBBLE: tl.constexpr):
    return (words & (15 << PLACES[NIBBLE])).to(tl.float32, bitcast=True)


@triton.jit
def sum_four(x):
    """[WORDS] -> [LANES]: the sum over a lane's four words."""
    return tl.sum(tl.reshape(x, [x.shape[0] // 4, 4]), axis=1)
