# mypy: allow-untyped-defs
"""Up to FEW_ROWS rows in bfloat16, as they are, times int4 weights in groups of 128 that are unpacked to bfloat16.

For products without a norm ahead. No kernel prepares the rows: an integer is exact in bfloat16, and the root mean square of a
head is a factor of a group's sum, beside the group's scale. As in `rows_direct_int4_triton` each warp has a stretch of four
blocks, and all weights are loaded before the wait. The sums of the warps are added in one order, and no row sees another.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ostinato.export.kernels.early_start_triton import start_next, wait_for_previous

from .rows_direct_int4_triton import STRETCH, load_weights
from .rows_direct_store_triton import load_factors, load_residual, multiply, store_direct
from .rows_tiles_triton import BLOCK, sum_of_warps, unpack_nibbles
from .scales_triton import of_pair
from .step_tiles_triton import hold_loads


@triton.jit
def direct_unpacked_rows_early(
    x_ptr,
    squares_ptr,
    weight_ptr,
    scale_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    rows,
    EPS: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    HEADS: tl.constexpr,
    PARTS: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WARPS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Write out [R, N], R <= COLUMNS: the product of x [R, K] with a weight, and the operations behind it.

    A program has ROWS weight rows.

    Args:
        HEADS: number of heads of a row, which are divided by their root mean squares; 0: x has no heads.
        PARTS: number of parts of a head's sum of squares.
    """
    SCALE: tl.constexpr = scale_ptr.dtype.element_ty
    start_next(EARLY)
    rows = tl.cast(rows, tl.int32)
    first = tl.program_id(0) * ROWS
    row = tl.arange(0, COLUMNS)
    output = first + tl.arange(0, ROWS)
    tiles, scales = load_weights(weight_ptr, scale_ptr, first, N, K, False, ROWS, WARPS)
    wait_for_previous(EARLY)
    inputs = ()
    for turn in tl.static_range(STRETCH):
        inputs = inputs + load_inputs(x_ptr, rows, turn, K, COLUMNS, WARPS)
    residual = load_residual(residual_ptr, output, row, rows, N) if RESIDUAL else 0.0
    hold_loads()
    factors = ()
    if HEADS > 0:
        factors = load_factors(squares_ptr, rows, EPS, K, HEADS, PARTS, COLUMNS, WARPS, STRETCH)
    sums = tl.zeros([WARPS, ROWS, COLUMNS], tl.float32)
    for turn in tl.static_range(STRETCH):
        low, high = unpack_nibbles(tiles[turn], tl.bfloat16, False)
        products = tl.zeros([WARPS, ROWS, COLUMNS], tl.float32)
        products = multiply(low, inputs[2 * turn], products)
        products = multiply(high, inputs[2 * turn + 1], products)
        factor = of_pair(scales >> (32 * (turn // 2)), turn % 2 == 1, SCALE)[:, :, None]
        if HEADS > 0:
            factor = factor * factors[turn][:, None, :]
        sums += products * factor
    store_direct(
        sum_of_warps(sums), residual, bias_ptr, out_ptr, out_ptr, out_ptr, (), (), row, row, output, row, rows,
        N, BIAS, RESIDUAL, False, 0, 0,
    )  # fmt: skip


@triton.jit
def load_inputs(x_ptr, rows, TURN: tl.constexpr, K: tl.constexpr, COLUMNS: tl.constexpr, WARPS: tl.constexpr):
    """Load block TURN of each warp's stretch: what low nibbles multiply and what high ones do, [8, WARPS, COLUMNS / 8, 64].

    Zeros past the last row and for warps without a stretch.
    """
    STRETCHES: tl.constexpr = K // (STRETCH * BLOCK)
    lane = tl.arange(0, 4)[:, None, None, None, None]
    row = tl.arange(0, COLUMNS // 8)[None, None, None, :, None] * 8 + tl.arange(0, 8)[None, :, None, None, None]
    warp = tl.arange(0, WARPS)[None, None, :, None, None]
    inside = (row < rows) & ((warp < STRETCHES) | (STRETCHES == WARPS))
    at = x_ptr + row * K + warp * (STRETCH * BLOCK) + TURN * BLOCK + (lane // 2 * 64 + lane % 2 * 16)
    at += tl.arange(0, 8)[None, None, None, None, :]
    halves = ()
    for half in tl.static_range(2):
        # A lane has 32 bytes of a row, and loads 16 at a time.
        first = tl.load(at + half * 32, mask=inside, other=0.0)
        second = tl.load(at + half * 32 + 8, mask=inside, other=0.0)
        both = tl.permute(tl.join(first, second), (1, 2, 3, 0, 5, 4))
        halves = halves + (tl.reshape(both, [8, WARPS, COLUMNS // 8, 64]),)  # type: ignore[assignment]  # noqa: RUF005
    return halves
