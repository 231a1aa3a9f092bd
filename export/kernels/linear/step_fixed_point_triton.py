# mypy: allow-untyped-defs
"""Integer weights times inputs in fixed point, by `dp4a`, the instruction that adds four products of bytes to an integer.

The inputs of a lane, 32 for four-bit weights and 16 for eight-bit weights, share a scale, a power of two that brings the
largest to between 2^14 and 2^15. Each input is rounded to an integer, which is 256 times a signed byte plus an unsigned byte.
So the error of an input is at most 2^-15 of the largest input, and zero for a bfloat16 within a factor of 2^7 of the largest.
A word of four-bit weights becomes two registers of four bytes: its low nibbles, and its high nibbles, which count 16 times.
That is two ANDs and four products per word; float32 takes eight of each and a shift. A word of eight-bit weights is
multiplied as it is, by two products.
"""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
# When this is added to a float32 below 2^22, the low bits of the sum are the nearest integer, in two's complement.
ROUNDING = tl.constexpr(12582912.0)


@triton.jit
def fixed_point(x):
    """x, the tiles [WORDS] that a word's weights multiply -> (the bytes of x, the lanes' scales [LANES]).

    x is eight tiles for nibbles, and four for bytes. The bytes of x are tiles like x. For nibbles they are four: upper and
    lower bytes of the inputs that low nibbles multiply, then the same for high nibbles. For bytes they are two, upper and
    lower.
    """
    largest = larger(larger(tl.abs(x[0]), tl.abs(x[1])), larger(tl.abs(x[2]), tl.abs(x[3])))
    if len(x) == 8:
        largest = larger(largest, larger(larger(tl.abs(x[4]), tl.abs(x[5])), larger(tl.abs(x[6]), tl.abs(x[7]))))
    first, second = tl.split(tl.reshape(largest, [largest.shape[0] // 4, 2, 2]))
    first, second = tl.split(larger(first, second))
    lane_largest = larger(larger(first, second), 2.0**-100)
    # A little more than the largest, so that no number is rounded to 2^15.
    exponent = (lane_largest * (1.0 + 2.0**-10)).to(tl.uint32, bitcast=True) & 0x7F800000
    inverse = (((127 + 14 + 127) << 23) - exponent).to(tl.float32, bitcast=True)
    inverse = tl.reshape(tl.broadcast_to(tl.expand_dims(inverse, 1), [inverse.shape[0], 4]), [inverse.shape[0] * 4])
    # Infinity and NaN must show in the product.
    scale = (exponent - (14 << 23)).to(tl.float32, bitcast=True) + (lane_largest - lane_largest)
    if len(x) == 8:
        low_upper, low_lower = two_bytes(x[0] * inverse, x[2] * inverse, x[4] * inverse, x[6] * inverse)
        high_upper, high_lower = two_bytes(x[1] * inverse, x[3] * inverse, x[5] * inverse, x[7] * inverse)
        planes = (low_upper, low_lower, high_upper, high_lower)
    else:
        planes = two_bytes(x[0] * inverse, x[1] * inverse, x[2] * inverse, x[3] * inverse)
    return planes, scale


@triton.jit
def larger(x, y):
    """The maximum, NaN where either is NaN."""
    return tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def two_bytes(x0, x1, x2, x3):
    """Round four numbers below 2^15 to integers -> their upper bytes, and their lower bytes: four in 32 bits each."""
    b0 = (x0 + ROUNDING).to(tl.int32, bitcast=True)
    b1 = (x1 + ROUNDING).to(tl.int32, bitcast=True)
    b2 = (x2 + ROUNDING).to(tl.int32, bitcast=True)
    b3 = (x3 + ROUNDING).to(tl.int32, bitcast=True)
    if INTERPRETED:
        upper = ((b0 >> 8) & 255) | (b1 & 0xFF00) | ((b2 & 0xFF00) << 8) | ((b3 & 0xFF00) << 16)
        lower = (b0 & 255) | ((b1 & 255) << 8) | ((b2 & 255) << 16) | ((b3 & 255) << 24)
    else:
        upper, lower = tl.inline_asm_elementwise(
            """{
            .reg .b32 first, second;
            prmt.b32 first, $2, $3, 0x5140;
            prmt.b32 second, $4, $5, 0x5140;
            prmt.b32 $0, first, second, 0x7632;
            prmt.b32 $1, first, second, 0x5410;
            }""",
            "=&r,=r,r,r,r,r",
            [b0, b1, b2, b3],
            dtype=(tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
    return upper, lower


@triton.jit
def offsets(x):
    """The sums from which `multiply_words` starts in int4: x times -8, since a nibble stores q + 8.

    High nibbles count 16 times, so their sums start from x times -128.
    """
    if INTERPRETED:
        ones = tl.full(x[0].shape, 0x01010101, tl.int32)
        low_upper = lane_products(x[0], ones, True) * -8
        low_lower = lane_products(x[1], ones, False) * -8
        high_upper = lane_products(x[2], ones, True) * -128
        high_lower = lane_products(x[3], ones, False) * -128
        started = join_four(low_upper, low_lower, high_upper, high_lower)
    else:
        # Takes the four words of a lane at once. The four results stand in the places of the words.
        started = tl.inline_asm_elementwise(
            """{
            .reg .b32 low, high;
            mov.b32 low, 0xF8F8F8F8;
            mov.b32 high, 0x80808080;
            dp4a.s32.s32 $0, $4, low, 0;
            dp4a.s32.s32 $0, $5, low, $0;
            dp4a.s32.s32 $0, $6, low, $0;
            dp4a.s32.s32 $0, $7, low, $0;
            dp4a.u32.s32 $1, $8, low, 0;
            dp4a.u32.s32 $1, $9, low, $1;
            dp4a.u32.s32 $1, $10, low, $1;
            dp4a.u32.s32 $1, $11, low, $1;
            dp4a.s32.s32 $2, $12, high, 0;
            dp4a.s32.s32 $2, $13, high, $2;
            dp4a.s32.s32 $2, $14, high, $2;
            dp4a.s32.s32 $2, $15, high, $2;
            dp4a.u32.s32 $3, $16, high, 0;
            dp4a.u32.s32 $3, $17, high, $3;
            dp4a.u32.s32 $3, $18, high, $3;
            dp4a.u32.s32 $3, $19, high, $3;
            }""",
            "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r",
            [x[0], x[1], x[2], x[3]],
            dtype=tl.int32,
            is_pure=True,
            pack=4,
        )
    return started


@triton.jit
def multiply_words(words, x, started):
    """Each lane's sums of weight times x in fixed point, [LANES] int32 each: for low nibbles, and for high ones times 16."""
    if INTERPRETED:
        sums = started + join_four(
            lane_products(x[0], words & 0x0F0F0F0F, True),
            lane_products(x[1], words & 0x0F0F0F0F, False),
            lane_products(x[2], words & 0xF0F0F0F0, True),
            lane_products(x[3], words & 0xF0F0F0F0, False),
        )
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
            dp4a.u32.s32 $0, l0, $8, $24;
            dp4a.u32.u32 $1, l0, $12, $25;
            dp4a.u32.s32 $2, h0, $16, $26;
            dp4a.u32.u32 $3, h0, $20, $27;
            dp4a.u32.s32 $0, l1, $9, $0;
            dp4a.u32.u32 $1, l1, $13, $1;
            dp4a.u32.s32 $2, h1, $17, $2;
            dp4a.u32.u32 $3, h1, $21, $3;
            dp4a.u32.s32 $0, l2, $10, $0;
            dp4a.u32.u32 $1, l2, $14, $1;
            dp4a.u32.s32 $2, h2, $18, $2;
            dp4a.u32.u32 $3, h2, $22, $3;
            dp4a.u32.s32 $0, l3, $11, $0;
            dp4a.u32.u32 $1, l3, $15, $1;
            dp4a.u32.s32 $2, h3, $19, $2;
            dp4a.u32.u32 $3, h3, $23, $3;
            }""",
            "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r",
            [words, x[0], x[1], x[2], x[3], started],
            dtype=tl.int32,
            is_pure=True,
            pack=4,
        )
    upper, lower = tl.split(tl.reshape(sums, [sums.shape[0] // 4, 2, 2]))
    return tl.split(upper * 256 + lower)


@triton.jit
def multiply_bytes(words, x):
    """Each lane's sum of eight-bit weights times x, two tiles of `fixed_point`: [LANES] int32."""
    if INTERPRETED:
        total = lane_products(x[0], words, True, True) * 256 + lane_products(x[1], words, False, True)
    else:
        # Takes the four words of a lane at once: two sums of upper bytes, and two of lower bytes.
        sums = tl.inline_asm_elementwise(
            """{
            dp4a.s32.s32 $0, $4, $8, 0;
            dp4a.s32.s32 $1, $5, $9, 0;
            dp4a.s32.u32 $2, $4, $12, 0;
            dp4a.s32.u32 $3, $5, $13, 0;
            dp4a.s32.s32 $0, $6, $10, $0;
            dp4a.s32.s32 $1, $7, $11, $1;
            dp4a.s32.u32 $2, $6, $14, $2;
            dp4a.s32.u32 $3, $7, $15, $3;
            }""",
            "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r,r,r,r,r",
            [words, x[0], x[1]],
            dtype=tl.int32,
            is_pure=True,
            pack=4,
        )
        first, second = tl.split(tl.reshape(sums, [sums.shape[0] // 4, 2, 2]))
        upper, lower = tl.split(first + second)
        total = upper * 256 + lower
    return total


@triton.jit
def lane_products(x, weights, SIGNED: tl.constexpr, SIGNED_WEIGHTS: tl.constexpr = False):
    """The sum that `dp4a` forms for each lane, as plain code for the interpreter: [LANES] int32."""
    total = tl.zeros(x.shape, tl.int32)
    for i in tl.static_range(4):
        total += byte_of(x, i, SIGNED) * byte_of(weights, i, SIGNED_WEIGHTS)
    return tl.sum(tl.reshape(total, [x.shape[0] // 4, 4]), axis=1)


@triton.jit
def byte_of(words, INDEX: tl.constexpr, SIGNED: tl.constexpr):
    byte = ((words >> (8 * INDEX)) & 255).to(tl.int32)
    return tl.where(byte > 127, byte - 256, byte) if SIGNED else byte


@triton.jit
def join_four(x0, x1, x2, x3):
    """Four tensors [LANES] -> [WORDS], with a lane's four values side by side."""
    return tl.reshape(tl.join(tl.join(x0, x2), tl.join(x1, x3)), [x0.shape[0] * 4])
