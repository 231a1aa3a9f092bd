# mypy: allow-untyped-defs
"""Up to STEP_ROWS rows times int4 weights in groups of 128, in fixed point: from memory directly into operands of `mma`.

A program has some weight rows, and each of its warps a stretch of four blocks of them. All
weights are loaded before the wait, 16 bytes of a row per lane. Bytes of weights and of inputs are operands as they stand: no
byte moves to another lane.

A block's sum is an exact integer, the sums of the warps are added in one order, and no row sees another. So a row has the
same bits for every number of rows, and whatever stands beside it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ostinato.export.kernels.early_start_triton import start_next, wait_for_previous

from .rows_direct_store_triton import (
    load_past,
    load_residual,
    load_taps,
    multiply,
    offset_in_run,
    store_direct,
    stored_lines,
)
from .rows_tiles_triton import BLOCK, ROUNDING_BITS, joined, sum_of_warps, unpack_bytes
from .scales_triton import of_pair

# Neighbouring blocks that a warp has; their scales are loaded as one number.
STRETCH = tl.constexpr(4)


@triton.jit
def direct_rows_early(
    planes_ptr,
    factors_ptr,
    weight_ptr,
    scale_ptr,
    bias_ptr,
    residual_ptr,
    conv_ptr,
    state_ptr,
    positions_ptr,
    slots_ptr,
    out_ptr,
    rows,
    N: tl.constexpr,
    K: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    SWIGLU: tl.constexpr,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WARPS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Write out [R, N], R <= COLUMNS: the product of rows in fixed point with a weight, and the operations behind it.

    A program has ROWS weight rows; with SWIGLU, ROWS / 2 gate rows and the up rows N rows behind these.

    Args:
        planes, factors: see `store_operands` in `rows_direct_integers_triton`.
        CHANNELS: outputs that are convolved with TAPS taps, the first ones; see `store_direct`. 0: none is.
    """
    OUTPUTS: tl.constexpr = ROWS // 2 if SWIGLU else ROWS
    SCALE: tl.constexpr = scale_ptr.dtype.element_ty
    start_next(EARLY)
    rows = tl.cast(rows, tl.int32)
    first = tl.program_id(0) * OUTPUTS
    row = tl.arange(0, COLUMNS)
    output = first + tl.arange(0, OUTPUTS)
    tiles, scales = load_weights(weight_ptr, scale_ptr, first, N, K, SWIGLU, ROWS, WARPS)
    taps, past, slot, offset = (), (), row, row
    if CHANNELS > 0:
        slot = tl.load(slots_ptr + row, mask=row < rows, other=-2)
        offset = offset_in_run(slots_ptr, slot, row, rows)
        taps = load_taps(conv_ptr, output, CHANNELS, TAPS)
        past = load_past(state_ptr, positions_ptr, slot, offset, output, row, rows, CHANNELS, TAPS)
    wait_for_previous(EARLY)
    following = load_inputs(planes_ptr, factors_ptr, rows, 0, K, COLUMNS, WARPS)
    residual = load_residual(residual_ptr, output, row, rows, N) if RESIDUAL else 0.0
    sums = tl.zeros([WARPS, ROWS, COLUMNS], tl.float32)
    for turn in tl.static_range(STRETCH):
        low_x, high_x, factor = following
        if turn + 1 < STRETCH:
            following = load_inputs(planes_ptr, factors_ptr, rows, turn + 1, K, COLUMNS, WARPS)
        low, high = unpack_bytes(tiles[turn])
        start = tl.full([WARPS, ROWS, 2 * COLUMNS], ROUNDING_BITS, tl.int32)
        integers = multiply(low, low_x, start)
        integers = multiply(high, high_x, integers)
        of_line = of_pair(scales >> (32 * (turn // 2)), turn % 2 == 1, SCALE)
        sums += joined(integers) * (of_line[:, :, None] * factor[:, None, :])
    store_direct(
        sum_of_warps(sums), residual, bias_ptr, state_ptr, slots_ptr, out_ptr, taps, past, slot, offset, output, row, rows,
        N, BIAS, RESIDUAL, SWIGLU, CHANNELS, TAPS,
    )  # fmt: skip


# --- weights


@triton.jit
def load_weights(
    weight_ptr,
    scale_ptr,
    first,
    N: tl.constexpr,
    K: tl.constexpr,
    SWIGLU: tl.constexpr,
    ROWS: tl.constexpr,
    WARPS: tl.constexpr,
):
    """Load the warps' stretches: a tuple of tiles of bytes, one for each block, and the blocks' scales [WARPS, ROWS], four in
    an int64. Zeros for warps without a stretch.

    A tile of bytes is [8, WARPS, ROWS / 8, 64]. So a lane has 16 bytes of a row, and four lanes have the block.
    """
    STRETCHES: tl.constexpr = K // (STRETCH * BLOCK)
    line = tl.arange(0, ROWS // 8)[None, None, :, None] * 8 + tl.arange(0, 8)[:, None, None, None]
    line = stored_lines(line, first, N, SWIGLU, ROWS)
    warp = tl.arange(0, WARPS)[None, :, None, None]
    byte = warp * (STRETCH * 64) + tl.arange(0, 64)[None, None, None, :]
    at = weight_ptr + first.to(tl.int64) * (K // 2) + (line * (K // 2) + byte)
    inside = (warp < STRETCHES) | (STRETCHES == WARPS)
    tiles = ()
    for turn in tl.static_range(STRETCH):
        tiles = tiles + (tl.load(at + turn * 64, mask=inside, other=0),)  # type: ignore[assignment]  # noqa: RUF005
    warp = tl.arange(0, WARPS)[:, None]
    line = stored_lines(tl.arange(0, ROWS)[None, :], first, N, SWIGLU, ROWS)
    fours = scale_ptr.to(tl.pointer_type(tl.int64)) + first.to(tl.int64) * STRETCHES
    inside = (warp < STRETCHES) | (STRETCHES == WARPS)
    return tiles, tl.load(fours + (line * STRETCHES + warp), mask=inside, other=0)


# --- products


@triton.jit
def load_inputs(
    planes_ptr, factors_ptr, rows, TURN: tl.constexpr, K: tl.constexpr, COLUMNS: tl.constexpr, WARPS: tl.constexpr
):
    """Load the inputs of block TURN of each warp's stretch: the bytes that low nibbles multiply and those that high ones do,
    [8, WARPS, COLUMNS / 4, 64], a row's planes in neighbouring columns, and the blocks' factors [WARPS, COLUMNS].

    Zeros past the last row and for warps without a stretch.
    """
    STRETCHES: tl.constexpr = K // (STRETCH * BLOCK)
    eight, of_eight = tl.arange(0, COLUMNS // 4)[None, None, :, None], tl.arange(0, 8)[:, None, None, None]
    warp = tl.arange(0, WARPS)[None, :, None, None]
    inside = (eight * 8 + of_eight < 2 * rows) & ((warp < STRETCHES) | (STRETCHES == WARPS))
    at = planes_ptr + (warp * STRETCH + TURN) * (2 * COLUMNS * BLOCK) + eight * (8 * BLOCK) + of_eight * (BLOCK // 2)
    at += tl.arange(0, BLOCK // 2)[None, None, None, :]
    low, high = tl.load(at, mask=inside, other=0), tl.load(at + 4 * BLOCK, mask=inside, other=0)
    of_row = tl.arange(0, COLUMNS)[None, :]
    of_warp = tl.arange(0, WARPS)[:, None]
    known = (of_row < rows) & (of_warp < STRETCHES)
    return low, high, tl.load(factors_ptr + (of_warp * STRETCH + TURN) * COLUMNS + of_row, mask=known, other=0.0)
