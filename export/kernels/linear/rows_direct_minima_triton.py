# mypy: allow-untyped-defs
"""Minima of up to STEP_ROWS rows' direct products, times the sums of their groups' inputs. A group has 32 elements.

The products are in TF32, which has all bits of a minimum. A sum is two numbers of which it has all bits. Minima and sums go
from memory directly into operands of `mma`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .rows_tiles_triton import BLOCK

GROUP = tl.constexpr(32)
# Groups whose minima a warp multiplies in a turn: eight for each of four lanes.
MINIMA = tl.constexpr(32)
# Mask of the bits that TF32 has of float32: 11 of the 21 that a sum of 32 in fixed point has.
TF32 = tl.constexpr(-0x2000)


@triton.jit
def store_sums(sums_ptr, upper, lower, factor, row, block, K: tl.constexpr):
    """Store sums [2 COLUMNS, K / 32] float32 of blocks [BLOCKS, 128] of a row: two for the row, which add up to the exact sum
    of 32 neighbours in fixed point times their factor.

    Args:
        upper, lower: the planes of the blocks, int8.
        factor: the blocks' factors [BLOCKS].
    """
    values = (upper.to(tl.float32) * 256.0 + lower.to(tl.float32)) * factor[:, None]
    of_groups = tl.sum(tl.reshape(values, [upper.shape[0], BLOCK // GROUP, GROUP]), 2)
    first = (of_groups.to(tl.int32, bitcast=True) & TF32).to(tl.float32, bitcast=True)
    group = block[:, None, None] * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)[None, :, None]
    at = sums_ptr + (2 * row + tl.arange(0, 2)[None, None, :]) * (K // GROUP) + group
    # One store: the values of another would go through shared memory again.
    tl.store(at, tl.join(first, of_groups - first), mask=group < K // GROUP)


@triton.jit
def load_minima(minimum_ptr, line, K: tl.constexpr, WARPS: tl.constexpr):
    """Load the minima of lines, a tensor for each turn of the warps; see `load_groups`."""
    minima = ()
    for turn in tl.static_range((K // GROUP + WARPS * MINIMA - 1) // (WARPS * MINIMA)):
        minima = minima + (load_groups(minimum_ptr, line, turn, K, WARPS),)  # type: ignore[assignment]  # noqa: RUF005
    return minima


@triton.jit
def minima_products(
    minima, sums_ptr, rows, K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WARPS: tl.constexpr
):
    """The minima of `load_minima` times the sums of `store_sums`: [WARPS, ROWS, COLUMNS]."""
    eight = tl.arange(0, COLUMNS // 4)[None, None, None, :, None]
    column = eight * 8 + tl.arange(0, 8)[None, :, None, None, None]
    # Behind the last row is the last one again: numbers that were never written may be NaN.
    column = tl.minimum(column, 2 * rows - 1)
    products = tl.zeros([WARPS, ROWS, 2 * COLUMNS], tl.float32)
    for turn in tl.static_range(len(minima)):
        right = tl.permute(load_groups(sums_ptr, column, turn, K, WARPS), (0, 2, 1))
        products = tl.dot(minima[turn].to(tl.float32), right, products, input_precision="tf32")
    first, second = tl.split(tl.reshape(products, [WARPS, ROWS, COLUMNS, 2]))
    return first + second


@triton.jit
def load_groups(at, line, number, K: tl.constexpr, WARPS: tl.constexpr):
    """Load what lines have for a turn of MINIMA groups of each warp: [WARPS, LINES, MINIMA], zeros behind the last group. As
    float32 it is the left operand of a product in TF32; the right one must be transposed. Moves no data.

    A lane has eight neighbouring groups. Their order is not that of memory; it is the same for all dtypes.

    Args:
        at: pointer to lines of K / 32 groups.
        line: numbers of lines [1, 8, 1, LINES / 8, 1].
    """
    # A load has 16 bytes for each lane: with more, Triton would give these to two lanes.
    LOADS: tl.constexpr = at.dtype.element_ty.primitive_bitwidth // 16
    own = number * WARPS + tl.arange(0, WARPS)[None, None, :, None, None]
    group = own * MINIMA + tl.arange(0, 4)[:, None, None, None, None] * 8
    group += tl.arange(0, 8 // LOADS)[None, None, None, None, :]
    values = tl.load(at + line * (K // GROUP) + group, mask=group < K // GROUP, other=0.0)
    if LOADS == 2:
        group += 4
        more = tl.load(at + line * (K // GROUP) + group, mask=group < K // GROUP, other=0.0)
        eights = tl.reshape(tl.join(values, more), [4, 8, WARPS, line.shape[3], 2, 2, 2])
        values = tl.permute(eights, (0, 1, 2, 3, 6, 4, 5))
    # Dimensions: lane, line of eight, warp, eight, pair of groups, and group of a pair.
    pairs = tl.reshape(values, [4, 8, WARPS, line.shape[3], 4, 2])
    return tl.reshape(tl.permute(pairs, (2, 3, 1, 4, 0, 5)), [WARPS, line.shape[3] * 8, MINIMA])
