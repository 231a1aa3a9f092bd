# mypy: allow-untyped-defs
"""How int4 weights become operands of tensor cores where a step takes several rows. A *block* is 128 elements of a row.

As bytes, for inputs in fixed point: a block is 64 bytes of two nibbles, two tiles of 16 times the weights, one of its low
nibbles and one of its high ones. Inputs must be in that order: `rows_prepare_triton`.

Where few rows share a weight, a program's warps divide its blocks: each has one of WARPS neighbouring blocks, of all rows. A
product of three dimensions is one for each warp, and its operands go from memory to registers with no shared memory between
(`operand`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from .step_fixed_point_triton import ROUNDING

BLOCK = tl.constexpr(128)
# Of a program whose warps divide blocks.
WARPS = tl.constexpr(4)
# The bits of ROUNDING. Sums of products that begin there are, as float32, the sums plus ROUNDING, if they are below 2^22.
ROUNDING_BITS = tl.constexpr(0x4B400000)
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
def nibble_order(element):
    """Where an element of a block stands: those that low nibbles multiply, in the order of bytes, then the others.

    Taken twice it gives the element again: it is also which element stands in a place.
    """
    return element // 32 % 2 * 64 + element // 64 * 32 + element % 32


@triton.jit
def load_scale_pairs(scale_ptr, weight_row, pair, K: tl.constexpr):
    """The scales [ROWS] of two neighbouring groups of 128, as one int32."""
    return tl.load(scale_ptr.to(tl.pointer_type(tl.int32)) + weight_row * (K // 256) + pair)


@triton.jit
def of_pair(pairs, SECOND: tl.constexpr):
    """The first or the second bfloat16 of each int32, as float32."""
    return ((pairs & -65536) if SECOND else (pairs << 16)).to(tl.float32, bitcast=True)


@triton.jit
def operand_offsets(ROWS: tl.constexpr):
    """Which row, block and byte each element of a tile [8, WARPS, ROWS / 8, 64] is: three tensors that broadcast to it."""
    row = tl.arange(0, ROWS // 8)[None, None, :, None] * 8 + tl.arange(0, 8)[:, None, None, None]
    return row, tl.arange(0, WARPS)[None, :, None, None], tl.arange(0, 64)[None, None, None, :]


@triton.jit
def operand(tile):
    """A tile of bytes as `operand_offsets` has it -> [WARPS, ROWS, 64], one operand of a product; the other one transposed.

    A lane loads 16 neighbouring bytes of a row, four lanes a block. Of a product's inner dimension a lane holds four bytes
    in each of four places, so the 16 bytes count as these four: the order is the same in both operands, and no byte has to
    move to another lane.
    """
    ROWS: tl.constexpr = tile.shape[2] * 8
    tile = tl.reshape(tl.permute(tile, (1, 2, 0, 3)), [WARPS, ROWS, 4, 4, 4])
    return tl.reshape(tl.permute(tile, (0, 1, 3, 2, 4)), [WARPS, ROWS, 64])


@triton.jit
def load_blocks(pointers, block, FIRST: tl.constexpr, BLOCKS: tl.constexpr):
    """Of the blocks FIRST to FIRST + WARPS, zeros for those past the last; `block` counts from FIRST."""
    return tl.load(pointers) if FIRST + WARPS <= BLOCKS else tl.load(pointers, mask=block + FIRST < BLOCKS, other=0)


@triton.jit
def joined(sums):
    """[.., 2 N] int32, sums from ROUNDING_BITS on of upper and of lower bytes -> [.., N] float32, rounded once."""
    floats = sums.to(tl.float32, bitcast=True) - ROUNDING
    if len(sums.shape) == 3:
        upper, lower = tl.split(tl.reshape(floats, [sums.shape[0], sums.shape[1], sums.shape[2] // 2, 2]))
    else:
        upper, lower = tl.split(tl.reshape(floats, [sums.shape[0], sums.shape[1] // 2, 2]))
    return upper * 256.0 + lower


@triton.jit
def sum_of_warps(values):
    """[WARPS, M, N] -> [M, N]: warps 0 and 2, 1 and 3, then both."""
    parts = tl.reshape(tl.permute(values, (1, 2, 0)), [values.shape[1], values.shape[2], 2, 2])
    first, second = tl.split(parts)
    first, second = tl.split(first + second)
    return first + second
