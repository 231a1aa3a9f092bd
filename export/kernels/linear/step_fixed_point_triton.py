# mypy: allow-untyped-defs
"""Integer weights times inputs in fixed point, by `dp2a`: it adds two products of 16 bits of input with a byte of a weight.

The inputs of a lane, 32 for four-bit weights and 16 for eight-bit weights, share a scale, a power of two that brings the
largest to between 2^13.9 and 2^15. Each input is rounded to an integer, so its error is at most 2^-14.9 of the largest input.
A word of eight-bit weights is multiplied as it is, by two products.

Four-bit weights. A byte of a word is 16 h + l, with the nibbles h and l. If both have one scale, h b + l a is wanted for the
inputs b and a, and 16 (h b + l a) = (16 h + l) b + 16 l (a - b / 16). So the word is multiplied as it is by b, and its low
nibbles by a - b / 16, which is what is rounded. That is an AND and four products per word; float32 takes eight of each and a
shift. With scales of their own, in groups of 32, low nibbles are multiplied by a and high ones by b.
"""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
# When this is added to a float32 below 2^22, the low bits of the sum are the nearest integer, in two's complement.
ROUNDING = tl.constexpr(12582912.0)


@triton.jit
def fixed_point(x, JOINED: tl.constexpr = False):
    """x, the tiles [WORDS] that a word's weights multiply -> (the pairs of x, the lanes' scales [LANES]).

    x is eight tiles for nibbles, and four for bytes. The pairs of x are tiles like x, with two inputs in 32 bits each. For
    nibbles they are four: the inputs that low nibbles multiply, then those of high nibbles. For bytes they are two. With
    JOINED those of low nibbles are what is left to multiply if words are multiplied as they are (see the top of the file).
    """
    largest = larger(larger(tl.abs(x[0]), tl.abs(x[1])), larger(tl.abs(x[2]), tl.abs(x[3])))
    if len(x) == 8:
        largest = larger(largest, larger(larger(tl.abs(x[4]), tl.abs(x[5])), larger(tl.abs(x[6]), tl.abs(x[7]))))
    first, second = tl.split(tl.reshape(largest, [largest.shape[0] // 4, 2, 2]))
    first, second = tl.split(larger(first, second))
    lane_largest = larger(larger(first, second), 2.0**-100)
    # A little more than the largest number that is rounded, so that none is rounded to 2^15.
    MARGIN: tl.constexpr = 1.0 + 2.0**-10 + (2.0**-4 if JOINED else 0.0)
    exponent = (lane_largest * MARGIN).to(tl.uint32, bitcast=True) & 0x7F800000
    inverse = (((127 + 14 + 127) << 23) - exponent).to(tl.float32, bitcast=True)
    inverse = of_neighbours(inverse, 4)
    # Infinity and NaN must show in the product.
    scale = (exponent - (14 << 23)).to(tl.float32, bitcast=True) + (lane_largest - lane_largest)
    if len(x) == 8:
        h0, h1 = rounded(x[1] * inverse), rounded(x[3] * inverse)
        h2, h3 = rounded(x[5] * inverse), rounded(x[7] * inverse)
        l0, l1, l2, l3 = x[0] * inverse, x[2] * inverse, x[4] * inverse, x[6] * inverse
        if JOINED:
            l0, l1 = left_of(l0, h0), left_of(l1, h1)
            l2, l3 = left_of(l2, h2), left_of(l3, h3)
        low = pair_of(rounded(l0), rounded(l1)), pair_of(rounded(l2), rounded(l3))
        pairs = low[0], low[1], pair_of(h0, h1), pair_of(h2, h3)
    else:
        first = pair_of(rounded(x[0] * inverse), rounded(x[1] * inverse))
        second = pair_of(rounded(x[2] * inverse), rounded(x[3] * inverse))
        pairs = first, second  # type: ignore[assignment]
    return pairs, scale


@triton.jit
def larger(x, y):
    """The maximum, NaN where either is NaN."""
    return tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def rounded(x):
    """The nearest integer plus ROUNDING, for numbers below 2^22."""
    return x + ROUNDING


@triton.jit
def left_of(low, high):
    """`low` less a sixteenth of the integer in `high`, a result of `rounded`."""
    return low - (high - ROUNDING) * 2.0**-4


@triton.jit
def pair_of(first, second):
    """Two results of `rounded`, integers of 16 bits, in 32 bits."""
    first, second = first.to(tl.int32, bitcast=True), second.to(tl.int32, bitcast=True)
    if INTERPRETED:
        pair = (first & 0xFFFF) | (second << 16)
    else:
        pair = tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, 0x5410;", "=r,r,r", [first, second], dtype=tl.int32, is_pure=True, pack=1
        )
    return pair


@triton.jit
def input_sums(x):
    """Each lane's sums of the inputs of low nibbles, and of those of high nibbles: two tensors [LANES] int32."""
    none = tl.zeros([x[0].shape[0] // 4], tl.int32)
    low, high = multiply_halves(tl.full(x[0].shape, 0x11111111, tl.uint32), x, none, none)
    return low, high >> 4


@triton.jit
def multiply_words(words, x, started):
    """Each lane's sum of nibbles times inputs, times 16, from `started`: [LANES] int32. x is a result with JOINED."""
    if INTERPRETED:
        low = lane_products(x[0], x[1], words & 0x0F0F0F0F)
        total = started + low * 16 + lane_products(x[2], x[3], words)
    else:
        # Takes the four words of a lane at once, as all that follow.
        sums = tl.inline_asm_elementwise(
            """{
            .reg .b32 l0, l1, l2, l3, low;
            and.b32 l0, $4, 0x0F0F0F0F;
            and.b32 l1, $5, 0x0F0F0F0F;
            and.b32 l2, $6, 0x0F0F0F0F;
            and.b32 l3, $7, 0x0F0F0F0F;
            dp2a.lo.s32.u32 $0, $16, $4, $24;
            dp2a.lo.s32.u32 low, $8, l0, 0;
            dp2a.hi.s32.u32 $0, $20, $4, $0;
            dp2a.hi.s32.u32 low, $12, l0, low;
            dp2a.lo.s32.u32 $0, $17, $5, $0;
            dp2a.lo.s32.u32 low, $9, l1, low;
            dp2a.hi.s32.u32 $0, $21, $5, $0;
            dp2a.hi.s32.u32 low, $13, l1, low;
            dp2a.lo.s32.u32 $0, $18, $6, $0;
            dp2a.lo.s32.u32 low, $10, l2, low;
            dp2a.hi.s32.u32 $0, $22, $6, $0;
            dp2a.hi.s32.u32 low, $14, l2, low;
            dp2a.lo.s32.u32 $0, $19, $7, $0;
            dp2a.lo.s32.u32 low, $11, l3, low;
            dp2a.hi.s32.u32 $0, $23, $7, $0;
            dp2a.hi.s32.u32 low, $15, l3, low;
            mad.lo.s32 $0, low, 16, $0;
            mov.b32 $1, $0;
            mov.b32 $2, $0;
            mov.b32 $3, $0;
            }""",
            "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r",
            [words, x[0], x[1], x[2], x[3], of_neighbours(started, 4)],
            dtype=tl.int32,
            is_pure=True,
            pack=4,
        )
        total, _ = first_places(sums)
    return total


@triton.jit
def multiply_halves(words, x, low_started, high_started):
    """Each lane's sums of low nibbles times inputs, and of high ones times 16, from two starts: two tensors [LANES] int32."""
    if INTERPRETED:
        low = low_started + lane_products(x[0], x[1], words & 0x0F0F0F0F)
        high = high_started + lane_products(x[2], x[3], words & 0xF0F0F0F0)
    else:
        sums = tl.inline_asm_elementwise(
            """{
            .reg .b32 l0, l1, l2, l3, h0, h1, h2, h3;
            and.b32 l0, $4, 0x0F0F0F0F;
            and.b32 h0, $4, 0xF0F0F0F0;
            and.b32 l1, $5, 0x0F0F0F0F;
            and.b32 h1, $5, 0xF0F0F0F0;
            and.b32 l2, $6, 0x0F0F0F0F;
            and.b32 h2, $6, 0xF0F0F0F0;
            and.b32 l3, $7, 0x0F0F0F0F;
            and.b32 h3, $7, 0xF0F0F0F0;
            dp2a.lo.s32.u32 $0, $8, l0, $24;
            dp2a.lo.s32.u32 $1, $16, h0, $28;
            dp2a.hi.s32.u32 $0, $12, l0, $0;
            dp2a.hi.s32.u32 $1, $20, h0, $1;
            dp2a.lo.s32.u32 $0, $9, l1, $0;
            dp2a.lo.s32.u32 $1, $17, h1, $1;
            dp2a.hi.s32.u32 $0, $13, l1, $0;
            dp2a.hi.s32.u32 $1, $21, h1, $1;
            dp2a.lo.s32.u32 $0, $10, l2, $0;
            dp2a.lo.s32.u32 $1, $18, h2, $1;
            dp2a.hi.s32.u32 $0, $14, l2, $0;
            dp2a.hi.s32.u32 $1, $22, h2, $1;
            dp2a.lo.s32.u32 $0, $11, l3, $0;
            dp2a.lo.s32.u32 $1, $19, h3, $1;
            dp2a.hi.s32.u32 $0, $15, l3, $0;
            dp2a.hi.s32.u32 $1, $23, h3, $1;
            mov.b32 $2, $0;
            mov.b32 $3, $1;
            }""",
            "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r",
            [words, x[0], x[1], x[2], x[3], of_neighbours(low_started, 4), of_neighbours(high_started, 4)],
            dtype=tl.int32,
            is_pure=True,
            pack=4,
        )
        low, high = first_places(sums)
    return low, high


@triton.jit
def multiply_bytes(words, x):
    """Each lane's sum of eight-bit weights times x, two tiles of `fixed_point`: [LANES] int32."""
    if INTERPRETED:
        total = lane_products(x[0], x[1], words, True)
    else:
        sums = tl.inline_asm_elementwise(
            """{
            dp2a.lo.s32.s32 $0, $8, $4, 0;
            dp2a.lo.s32.s32 $1, $9, $5, 0;
            dp2a.hi.s32.s32 $0, $12, $4, $0;
            dp2a.hi.s32.s32 $1, $13, $5, $1;
            dp2a.lo.s32.s32 $0, $10, $6, $0;
            dp2a.lo.s32.s32 $1, $11, $7, $1;
            dp2a.hi.s32.s32 $0, $14, $6, $0;
            dp2a.hi.s32.s32 $1, $15, $7, $1;
            mov.b32 $2, $0;
            mov.b32 $3, $1;
            }""",
            "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r,r,r,r,r",
            [words, x[0], x[1]],
            dtype=tl.int32,
            is_pure=True,
            pack=4,
        )
        first, second = first_places(sums)
        total = first + second
    return total


@triton.jit
def first_places(x):
    """The first two of a lane's four values in [WORDS]: two tensors [LANES]."""
    even, odd = tl.split(tl.reshape(x, [x.shape[0] // 4, 2, 2]))
    return tl.split(even)[0], tl.split(odd)[0]


@triton.jit
def of_neighbours(x, LANE: tl.constexpr):
    """[UNITS / LANE] -> [UNITS]: each value repeated for LANE neighbours."""
    wide = tl.broadcast_to(tl.expand_dims(x, 1), [x.shape[0], LANE])
    return tl.reshape(wide, [x.shape[0] * LANE])


@triton.jit
def lane_products(first, second, weights, SIGNED: tl.constexpr = False):
    """The sum that `dp2a` forms for each lane, as plain code for the interpreter: [LANES] int32. SIGNED: the weights are."""
    total = tl.zeros(first.shape, tl.int32)
    for i in tl.static_range(4):
        pair = first if i < 2 else second
        byte = ((weights >> (8 * i)) & 255).to(tl.int32)
        if SIGNED:
            byte = tl.where(byte > 127, byte - 256, byte)
        # Shifts of signed integers keep the sign.
        total += ((pair >> 16) if i % 2 else ((pair << 16) >> 16)) * byte
    return tl.sum(tl.reshape(total, [first.shape[0] // 4, 4]), axis=1)
