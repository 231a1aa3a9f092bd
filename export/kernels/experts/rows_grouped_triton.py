# mypy: allow-untyped-defs
"""Products of integer experts with blocks of rows in bfloat16, as `linear.rows_grouped_triton` computes them.

Weights are unpacked without their scales, which is exact, and the product of a group is multiplied by the group's scale in
float32. Inputs stand in the order of `element_at`, in pieces of 32; minima are multiplied by the pieces' sums. Where one
projection is of integers and another in a floating dtype, the floats are read in this order too.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ostinato.export.kernels.linear.rows_grouped_triton import (
    PIECE,
    add_products,
    element_at,
    load_block_scales,
    load_weights,
    multiply_minima,
)
from ostinato.export.kernels.linear.rows_tiles_triton import BLOCK as ELEMENTS


@triton.jit
def multiply_groups(
    total,
    inputs,
    inputs_sums,
    filled,
    stored,
    line,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    MINIMUM: tl.constexpr,
):
    """total [TILE, BLOCK] float32 + products of an expert's weight rows `line` [TILE] with input rows at `inputs` [BLOCK].

    Input rows that are not `filled` are not read.

    Args:
        inputs_sums: where each input row's sums of pieces begin; not read without MINIMUM.
        COLUMNS: elements per row, a multiple of 64.
    """
    BLOCKS: tl.constexpr = (COLUMNS + ELEMENTS - 1) // ELEMENTS
    SCALE: tl.constexpr = stored[1].dtype.element_ty
    if MINIMUM:
        total = multiply_minima(total, inputs_sums, filled, stored[2], line, 0, COLUMNS // PIECE, COLUMNS)
    words = stored[0].to(tl.pointer_type(tl.uint32))
    words = words + line[:, None] * (COLUMNS * BITS // 32) + tl.arange(0, 16)[None, :]
    inputs_at = inputs[None, :] + tl.arange(0, PIECE)[:, None]
    scales = load_block_scales(stored[1], line, 0, COLUMNS, GROUP)
    for block in range(BLOCKS):
        # The next block's scales are loaded while this block is multiplied.
        next_scales = load_block_scales(stored[1], line, tl.minimum(block + 1, BLOCKS - 1), COLUMNS, GROUP)
        pieces = load_pieces(inputs_at + block * ELEMENTS, filled, block, COLUMNS)
        weights = load_weights(words, block, COLUMNS, BITS, MINIMUM)
        total = add_products(total, weights, pieces, scales, GROUP, SCALE)
        scales = next_scales
    return total


@triton.jit
def load_pieces(inputs_at, filled, block, COLUMNS: tl.constexpr):
    """The four pieces of a block of inputs, [PIECE, BLOCK] each; zeros past the end of the row."""
    pieces = ()
    for piece in tl.static_range(ELEMENTS // PIECE):
        mask = filled[None, :]
        if COLUMNS % 128 != 0:
            mask = mask & (block * ELEMENTS + piece * PIECE < COLUMNS)
        loaded = tl.load(inputs_at + piece * PIECE, mask=mask, other=0.0)
        pieces = pieces + (loaded,)  # type: ignore[assignment]  # noqa: RUF005
    return pieces


@triton.jit
def multiply_floats(total, inputs, filled, weight, line, COLUMNS: tl.constexpr):
    """`multiply_groups` by weights in a floating dtype, for any COLUMNS."""
    step = tl.arange(0, PIECE)
    for start in range(0, COLUMNS, PIECE):
        element = start + element_at(step)
        inside = element < COLUMNS
        tile = tl.load(inputs[None, :] + (start + step)[:, None], mask=inside[:, None] & filled[None, :], other=0.0)
        left = tl.load(weight + line[:, None] * COLUMNS + element[None, :], mask=inside[None, :], other=0.0)
        total = tl.dot(left.to(tile.dtype), tile, total)
    return total
