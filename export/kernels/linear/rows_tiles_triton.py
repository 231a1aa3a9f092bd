# mypy: allow-untyped-defs
"""Int4 weights as operands of tensor cores. A *block* is 128 elements of a row.

A block is stored in 64 bytes of two nibbles. It becomes two tiles, one from the low nibbles and one from the high nibbles:
of bfloat16, or of bytes, for inputs in fixed point. Each byte is 16 times a weight. Inputs must stand in the same order
(`rows_prepare_triton`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from .step_fixed_point_triton import ROUNDING

BLOCK = tl.constexpr(128)
# How often the most warps of a program can be halved.
MAX_HALVINGS = tl.constexpr(3)
# The bits of ROUNDING. An integer sum can start from these bits, not from 0. If it stays below 2^22, its bits read as float32
# are the sum plus ROUNDING: no conversion is needed.
ROUNDING_BITS = tl.constexpr(0x4B400000)
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
# Eight nibbles -> four low ones and four high ones, as bytes that are 16 times a weight. The input is not read after the
# first result is written, so the two may share a register. One line: Inductor writes constants into a string literal.
UNPACK = tl.constexpr(
    "{ .reg .b32 shifted; shl.b32 shifted, $2, 4; "
    "lop3.b32 $1, $2, 0xF0F0F0F0, 0x80808080, 0x6A; lop3.b32 $0, shifted, 0xF0F0F0F0, 0x80808080, 0x6A; }"
)


@triton.jit
def unpack_bytes(packed):
    """Bytes [.., 64] uint8 -> two tiles [.., 64] int8: the weights of low nibbles and of high ones, times 16.

    This takes two instructions for four low nibbles, and one for four high nibbles.
    """
    if INTERPRETED:
        low = ((packed.to(tl.int32) & 15) - 8) * 16
        high = ((packed.to(tl.int32) >> 4) - 8) * 16
        return low.to(tl.int8), high.to(tl.int8)
    else:
        return tl.inline_asm_elementwise(UNPACK, "=r,=r,r", [packed], (tl.int8, tl.int8), is_pure=True, pack=4)


@triton.jit
def unpack_nibbles(packed, dtype: tl.constexpr, MINIMUM: tl.constexpr):
    """Packed bytes [.., B] -> the weights of their low and of their high nibbles, without scales: [.., B] each, exact in
    `dtype`. With MINIMUM a nibble is q, else q + 8."""
    if INTERPRETED or dtype != tl.bfloat16:
        LEAST: tl.constexpr = 0.0 if MINIMUM else 8.0
        low = (packed & 15).to(tl.float32) - LEAST
        high = (packed >> 4).to(tl.float32) - LEAST
        return low.to(dtype), high.to(dtype)
    else:
        # -128 or -136, twice.
        OFFSET: tl.constexpr = "0xc300c300" if MINIMUM else "0xc308c308"
        # A nibble below the byte 0x43 is the bits of the bfloat16 128 + nibble. This code unpacks four bytes at a time;
        # Triton's own would unpack them one by one.
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 low, high, magic, one, offset;
            mov.b32 magic, 0x43434343;
            mov.b32 one, 0x3f803f80;
            mov.b32 offset, """
            + OFFSET
            + """;
            and.b32 low, $4, 0x0f0f0f0f;
            shr.u32 high, $4, 4;
            and.b32 high, high, 0x0f0f0f0f;
            prmt.b32 $0, low, magic, 0x4140;
            prmt.b32 $1, low, magic, 0x4342;
            prmt.b32 $2, high, magic, 0x4140;
            prmt.b32 $3, high, magic, 0x4342;
            fma.rn.bf16x2 $0, $0, one, offset;
            fma.rn.bf16x2 $1, $1, one, offset;
            fma.rn.bf16x2 $2, $2, one, offset;
            fma.rn.bf16x2 $3, $3, one, offset;
            }""",
            "=&r,=&r,=&r,=&r,r",
            [packed],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )


@triton.jit
def nibble_order(element):
    """The place of a block's element. The elements that low nibbles multiply come first, in the order of bytes.

    The elements of high nibbles follow. Bytes 0 to 31 hold the first 64 elements, the other bytes the rest; the first half of
    64 is in low nibbles. The function is its own inverse: it also gives the element that stands in a place.
    """
    return element // 32 % 2 * 64 + element // 64 * 32 + element % 32


@triton.jit
def load_scale_pairs(scale_ptr, weight_row, pair, K: tl.constexpr):
    """The scales [ROWS] of two neighbouring groups of 128, as one int32."""
    return tl.load(scale_ptr.to(tl.pointer_type(tl.int32)) + weight_row * (K // 256) + pair)


@triton.jit
def joined(sums):
    """sums [.., 2 N] int32 -> upper * 256 + lower, [.., N] float32, rounded once.

    sums: sums of upper and of lower bytes, in neighbouring columns. They started from ROUNDING_BITS, not from 0.
    """
    upper, lower = planes_of(sums.to(tl.float32, bitcast=True) - ROUNDING)
    return upper * 256.0 + lower


@triton.jit
def joined_shortly(sums):
    """As `joined`, by two instructions where that has three. But the compiler then orders others: a layer of an 8B with 4/8
    rows takes in int4_min 57.4/69.7 us, not 59.0/70.9, in int8 g32 74.9/80.7, not 73.6/81.7, and the flagship's with 8 rows
    53.0, not 51.9 (one H200, 2026-12-01)."""
    upper, lower = planes_of(sums.to(tl.float32, bitcast=True))
    # Exact but for the last addition: the others are of multiples of 256, below 2^32.
    return (upper * 256.0 - 257.0 * ROUNDING) + lower


@triton.jit
def planes_of(sums):
    """sums [.., 2 N], of upper and of lower bytes in neighbouring columns -> each of them, [.., N]."""
    if len(sums.shape) == 3:
        pairs = tl.reshape(sums, [sums.shape[0], sums.shape[1], sums.shape[2] // 2, 2])
    else:
        pairs = tl.reshape(sums, [sums.shape[0], sums.shape[1] // 2, 2])
    return tl.split(pairs)


@triton.jit
def sum_of_warps(values):
    """[WARPS, M, N] -> [M, N], WARPS a power of two: adds both halves of the warps, then the halves of these sums, and so on.

    The values go through shared memory once, and each lane adds those of its output. `tl.sum` needs three ways through it and
    four barriers.
    """
    left = tl.permute(values, (1, 2, 0))
    for _ in tl.static_range(MAX_HALVINGS):
        if left.shape[2] > 1:
            halves = tl.reshape(left, [left.shape[0], left.shape[1], 2, left.shape[2] // 2])
            first, second = tl.split(tl.permute(halves, (0, 1, 3, 2)))
            left = first + second
    return tl.reshape(left, [left.shape[0], left.shape[1]])
