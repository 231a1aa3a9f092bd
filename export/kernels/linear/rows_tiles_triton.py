# mypy: allow-untyped-defs
"""How int4 weights become operands of tensor cores where a step takes several rows. A *block* is 128 elements of a row.

As bytes, for inputs in fixed point: a block is 64 bytes of two nibbles, two tiles of 16 times the weights, one of its low
nibbles and one of its high ones. Inputs must be in that order: `rows_prepare_triton`.
"""

from __future__ import annotations

import triton
import triton.language as tl

BLOCK = tl.constexpr(128)
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def unpack_bytes(packed):
    """Bytes [.., 64] uint8 -> two tiles [.., 64] int8: the weights of low nibbles and of high ones, times 16.

    Two instructions for four weights of low nibbles, and one for four of high ones.
    """
    if INTERPRETED:
        low = ((packed.to(tl.int32) & 15) - 8) * 16
        high = ((packed.to(tl.int32) >> 4) - 8) * 16
        return low.to(tl.int8), high.to(tl.int8)
    else:
        # What is read is not needed after the first result is written: the two may share a register.
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 shifted;
            shl.b32 shifted, $2, 4;
            lop3.b32 $1, $2, 0xF0F0F0F0, 0x80808080, 0x6A;
            lop3.b32 $0, shifted, 0xF0F0F0F0, 0x80808080, 0x6A;
            }""",
            "=r,=r,r",
            [packed],
            dtype=(tl.int8, tl.int8),
            is_pure=True,
            pack=4,
        )


@triton.jit
def load_scale_pairs(scale_ptr, weight_row, pair, K: tl.constexpr):
    """The scales [ROWS] of two neighbouring groups of 128, as one int32."""
    return tl.load(scale_ptr.to(tl.pointer_type(tl.int32)) + weight_row * (K // 256) + pair)


@triton.jit
def of_pair(pairs, SECOND: tl.constexpr):
    """The first or the second bfloat16 of each int32, as float32."""
    return ((pairs & -65536) if SECOND else (pairs << 16)).to(tl.float32, bitcast=True)
